"""Click models against each other: `python -m benchmarks.trip` (`benchmarks.trip.__main__`)."""
