"""A plan as text: what each parent's ranks hold, before repacking and after."""

from parallel.repacking.layout import Layout
from parallel.repacking.plan import FALLBACKS, Child, Parent, Plan

BARS = " ▏▎▍▌▋▊▉█"


def draw(plan: Plan, parents: int | None = None, columns: int = 32) -> str:
    """The first `parents` of a plan (None: all).

    One line a rank: the children's widths, the rows that the rank holds before and after as bars, and
    the samples of the child, the longest first.
    """
    lines = [
        f"{len(plan.ids)} samples, {int(plan.lengths.sum()):,} tokens on {plan.num_ranks} ranks, "
        f"nodes of {plan.node_size}; predicted {plan.seconds:.3f} s; plan {plan.digest[:12]}"
    ]
    shown = plan.parents if parents is None else plan.parents[:parents]
    for parent in shown:
        lines += _parent(plan, parent, columns)
    if len(shown) < len(plan.parents):
        lines.append(f"... and {len(plan.parents) - len(shown)} more parents")
    return "\n".join(lines)


def _parent(plan: Plan, parent: Parent, columns: int) -> list[str]:
    before, after = plan.wide_layout(parent), plan.layout(parent)
    most = max(int(before.rows_per_rank.max()), int(after.rows_per_rank.max()), 1)
    lines = [
        "",
        f"parent SP{parent.width}, ranks {parent.first_rank} to {parent.ranks[-1]}, "
        f"{len(parent.samples)} samples: {FALLBACKS[parent.fallback]}",
        f"  rank | wide layout{' ' * (columns - 11)} | child | own layout",
    ]
    for child in parent.children:
        for k in range(child.width):
            rank = child.first_rank - parent.first_rank + k
            if rank and (parent.first_rank + rank) % plan.node_size == 0:
                lines.append("  -----+" + "-" * (columns + 2) + "+-------+" + "-" * (columns + 2))
            name = f"SP{child.width}" if k == 0 else '"' if child.width > 1 else ""
            held = _samples(plan, child) if k == 0 else ""
            lines.append(
                f"  {parent.first_rank + rank:4d} | {_bar(before, rank, most, columns)} | {name:5s} "
                f"| {_bar(after, rank, most, columns)} {held}".rstrip()
            )
    return lines


def _bar(layout: Layout, rank: int, most: int, columns: int) -> str:
    eighths = round(8 * columns * int(layout.rows_per_rank[rank]) / most)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (BARS[part] if part else "")).ljust(columns)


def _samples(plan: Plan, child: Child) -> str:
    ids = child.samples[:3]
    pairs = zip(ids.tolist(), plan.lengths_of(ids).tolist(), strict=True)
    shown = [f"{i}:{length:,}" for i, length in pairs]
    return " ".join([*shown, "..."] if len(child.samples) > 3 else shown)
