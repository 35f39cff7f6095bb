"""Plain modules that run on one process; nothing here knows about ranks."""
