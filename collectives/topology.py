"""How the ranks of a group lie on nodes, and which way data takes between them: pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Ranks of a group, node by node, the same number on each; this rank's place among them.

    Ranks with the same place on their nodes form a *rail*: data between nodes travels on rails.
    """

    num_nodes: int
    node_size: int
    """Ranks on each node."""
    node: int
    local: int
    """Place on the node."""

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.num_nodes * self.node_size

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.member(self.node, self.local)

    def member(self, node: int, local: int) -> int:
        """The number in the group of the rank at that place."""
        return node * self.node_size + local

    @property
    def neighbours(self) -> list[int]:
        """The group's ranks on this node, by place."""
        return [self.member(self.node, local) for local in range(self.node_size)]

    @property
    def others(self) -> list[int]:
        """Places of the others on this node, beginning with the next, so that not all write to one."""
        return [(self.local + k) % self.node_size for k in range(1, self.node_size)]

    @property
    def rail(self) -> list[int]:
        """The group's ranks at this place, by node."""
        return [self.member(node, self.local) for node in range(self.num_nodes)]


def make_topology(global_ranks: Sequence[int], rank: int, node_size: int) -> Topology:
    """Where `global_ranks`, the members of a group in their order, lie; `rank` is this one's number.

    Nodes hold `node_size` consecutive global ranks. Raises `ValueError` unless the group has the same
    number of members on each of its nodes and lists them node by node.
    """
    nodes = [member // node_size for member in global_ranks]
    order = list(dict.fromkeys(nodes))
    per_node = len(global_ranks) // len(order)
    if nodes != [node for node in order for _ in range(per_node)]:
        raise ValueError(
            f"ranks {list(global_ranks)} are not spread evenly over nodes of {node_size}: set "
            "parallel.node_size to a size that divides the group"
        )
    return Topology(len(order), per_node, rank // per_node, rank % per_node)


@dataclass(frozen=True)
class Step:
    """One exchange of an all-gather along a rail, as seen from one node."""

    target: int
    """The node that is sent to."""
    sends: tuple[int, ...]
    """The nodes whose blocks are sent."""
    source: int
    receives: tuple[int, ...]
    """The nodes whose blocks arrive from `source`; as many as are sent."""


def doubling(node: int, num_nodes: int) -> list[Step]:
    """Recursive doubling: in each step a node passes on all it holds, so ceil(log2(num_nodes)) do.

    Node `n` sends to `n - 2^s`, as Bruck et al. arrange it (IEEE TPDS 1997), which works for any
    number of nodes; the last step sends only what the others lack. Blocks go to their final places,
    so nothing is rotated at the end.
    """
    steps, held = [], 1
    while held < num_nodes:
        count = min(held, num_nodes - held)
        source = (node + held) % num_nodes
        steps.append(
            Step(
                target=(node - held) % num_nodes,
                sends=tuple((node + k) % num_nodes for k in range(count)),
                source=source,
                receives=tuple((source + k) % num_nodes for k in range(count)),
            )
        )
        held += count
    return steps
