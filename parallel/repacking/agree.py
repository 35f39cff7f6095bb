"""All ranks with one plan: by checking that they came to the same, or by sending one rank's."""

import torch
import torch.distributed as dist

from parallel.repacking.plan import Plan


def check_same(plan: Plan, group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
    """Raise `ValueError` on every rank of `group` unless all hold the same plan.

    One small all-gather.
    """
    mine = torch.tensor(list(bytes.fromhex(plan.digest)), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    others = [rank for rank, digest in enumerate(every) if not torch.equal(digest, every[0])]
    if others:
        raise ValueError(
            f"ranks {others} of the group have another plan than its rank 0: their lengths, ids or "
            "parallel.repacking settings differ, or a search by the clock ran on each of them; set "
            "parallel.repacking.search_seconds=null, or let one rank plan for all"
        )


def broadcast_plan(
    plan: Plan | None, source: int = 0, group: dist.ProcessGroup | None = None, device: str = "cpu"
) -> Plan:
    """The plan of rank `source` of `group` on all of its ranks; the others give None.

    For a search that ends by the clock: it would end at another point on each rank.
    """
    first = dist.get_global_rank(group, source) if group is not None else source
    is_source = dist.get_rank(group) == source
    data = torch.empty(0, dtype=torch.uint8, device=device)
    if is_source:
        if plan is None:
            raise ValueError(f"rank {source} is to send its plan, but has none")
        data = torch.tensor(list(plan.to_json().encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, first, group=group)
    if not is_source:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, first, group=group)
    if is_source:
        assert plan is not None
        return plan
    return Plan.from_json(bytes(data.tolist()).decode())
