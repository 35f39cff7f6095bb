"""Adapters against each other on real texts: `python -m benchmarks.lelora`."""
