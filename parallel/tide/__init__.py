"""FSDP2 on TIDE's collectives: `use_tide(model)` after `fully_shard`, before the first forward pass."""

from parallel.tide.seam import Tide, use_tide

__all__ = ["Tide", "use_tide"]
