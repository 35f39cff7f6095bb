"""Side-by-side measurements: `python -m benchmarks.NAME [--device cpu|cuda] [--quick]`."""
