"""FSDP2 on torch's collectives and on TIDE, side by side: `python -m benchmarks.tide`."""
