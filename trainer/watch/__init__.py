"""Watching a run: header, progress, metrics, trackers. Nothing here can stop training."""
