"""Expert parallelism: the ranks of a block divide the experts of each layer, and rows travel to them.

`exchange.py` carries rows to their experts and back, `divide.py` gives each rank its experts, and
`layout.py` says which ranks that are.
"""
