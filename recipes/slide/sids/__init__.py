"""Building semantic IDs: features of items, quantizers, collisions, and a report of their quality."""
