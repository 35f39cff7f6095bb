"""Joins everything: entry point, configuration, launch, loop, checkpoints, watching."""
