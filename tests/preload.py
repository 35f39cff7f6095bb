"""Imported once by the fork server of `tests.ranks`, so that ranks start fast."""

import models.causal_lm
import parallel.fsdp
import parallel.norm
import parallel.weights
import recipes.pretrain  # noqa: F401
