"""Watching a run: header, progress, metrics, trackers.

Nobody has to be there: a closed console or a broken tracker stops nothing.
"""
