"""Symmetric memory: the same region on every rank of a group, written directly by peers."""
