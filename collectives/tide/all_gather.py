"""TIDE all-gather: each rank casts its shards into its place in its slot and writes them to the same
place at every peer. The gathered bytes are the parameters; nothing is copied in or out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.tide.slots import Layout, Slot


@torch.no_grad()
def start_all_gather(slot: Slot, layout: Layout, shards: Sequence[Tensor], tenant: str) -> None:
    """Write this rank's `shards` everywhere; `slot.wait_ready()` completes the gather.

    A shard may have another dtype than its place in the slot: placing it is the cast.
    """
    slot.acquire(tenant)
    places, begins = slot.own_places(layout)
    torch._foreach_copy_(places, [shard.reshape(-1) for shard in shards])
    for peer in slot.peers:
        for place, begin in zip(places, begins, strict=True):
            slot.transport.put(place, slot.region, begin, peer)
        slot.announce(peer)
