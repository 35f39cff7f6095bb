"""Wan's video transformer, as diffusers builds it: its shape, its folders, and flow matching."""
