"""Imported once by the fork server of `tests.ranks`, so that ranks start fast."""

import recipes.pretrain  # noqa: F401
