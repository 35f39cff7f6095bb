"""SLIDE's comparisons on public sets: `python -m benchmarks.slide` (`benchmarks.slide.__main__`)."""
