"""Which tables ranks divide by rows (`parallel.tables`), as pure arithmetic."""

WAYS = ("auto", "fsdp", "rows")
LARGE = 2**28
"""Bytes in fp32 from which a table is divided where that is left open: a million rows of 64. FSDP2 would
gather as many on every rank in every step, and reduce a gradient as large."""


def rows_each(num_rows: int, ranks: int) -> int:
    """Rows of each rank but the last ones, which have fewer or none: `torch.chunk` does the same."""
    return -(-num_rows // ranks)


def is_divided(way: str, nbytes: int, ranks: int) -> bool:
    """Whether a table of so many bytes is to be divided over `ranks`, if it can be."""
    return ranks > 1 and (way == "rows" or (way == "auto" and nbytes >= LARGE))
