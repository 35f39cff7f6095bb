"""SLIDE: a decoder over semantic IDs: items one by one by beam search, or a whole list at once."""
