"""Tables whose rows ranks divide: what is looked up travels, and the table stays where it is.

`exchange.py` carries numbers to the ranks that have their rows, and rows back, by torchrec; `divide.py`
gives each rank its rows, and `choice.py` says which tables are divided.
"""
