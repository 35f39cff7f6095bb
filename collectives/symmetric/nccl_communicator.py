"""A communicator of NCCL's beside torch's, among some ranks of a group; needs nccl4py."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from nccl import core as nccl


def make_communicator(group: dist.ProcessGroup, members: Sequence[int], **options: Any) -> Any:
    """Of `members` (ranks of `group`, this one among them), numbered by their place in the list.

    All ranks of `group` call it at the same time; those of a node or of a rail have the same members.
    """
    own = bytes(nccl.get_unique_id()) if members[0] == group.rank() else None
    ids: list[Any] = [None] * group.size()
    dist.all_gather_object(ids, own, group=group)
    return nccl.Communicator.init(
        len(members),
        members.index(group.rank()),
        nccl.UniqueId.from_bytes(ids[members[0]]),
        nccl.NCCLConfig(**options),
    )
