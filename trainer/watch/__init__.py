"""Watching a run: header, progress, where the time goes, metrics, trackers, the page about it.

Nobody has to be there: a closed console or a broken tracker stops nothing.
"""
