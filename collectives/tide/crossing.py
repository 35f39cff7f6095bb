"""Exchanges between nodes in rounds, through buffers whose number does not depend on the nodes.

In round `q` of step `s` a node sends to the node `s` after it and receives from the node `s` before
it, through buffer `q % depth`. Who has emptied a buffer tells the node that will fill it next.
"""

import torch
from torch import Tensor

from collectives.symmetric.fabric import Fabric


class Crossing:
    """Rounds of one rail, of at most `nbytes` each; channels from `first_channel` on are its own."""

    def __init__(self, fabric: Fabric, nbytes: int, depth: int, first_channel: int) -> None:
        assert fabric.reducing is not None
        self.network, self.topology = fabric.reducing, fabric.topology
        self.buffer_nbytes, self.depth, self.channel = nbytes, depth, first_channel
        self.memory = fabric.allocate(2 * depth * nbytes, self.network)
        self.rounds = 0

    @property
    def nbytes(self) -> int:
        """Symmetric memory on each rank."""
        return self.memory.nbytes

    def outgoing(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The buffer to fill for this round; what it held before has left."""
        if self.rounds >= self.depth:
            self.network.flush()
        return self._buffer(self.rounds % self.depth, numel, dtype)

    def exchange(self, step: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Send the buffer `step` nodes on; what the node `step` before has sent here."""
        nodes, node, turn = self.topology.num_nodes, self.topology.node, self.rounds
        assert step == 1 + turn % (nodes - 1)
        target, source = (node + step) % nodes, (node - step) % nodes
        number = turn % self.depth
        if turn >= self.depth:
            self.network.wait(target, self._credit, turn)
        arrives = self.depth + number
        outgoing, region = self._buffer(number, numel, dtype), self.memory.remote
        assert region is not None
        place, channel = arrives * self.buffer_nbytes, self.channel + number
        self.network.put_signal(outgoing, region, place, target, channel, turn + 1)
        self.network.wait(source, channel, turn + 1)
        return self._buffer(arrives, numel, dtype)

    def acknowledge(self) -> None:
        """What arrived in this round has been read: its buffer may be filled by whoever is next."""
        following = self.rounds + self.depth
        step = 1 + following % (self.topology.num_nodes - 1)
        sender = (self.topology.node - step) % self.topology.num_nodes
        self.network.signal(sender, self._credit, following)
        self.rounds += 1

    @property
    def _credit(self) -> int:
        return self.channel + self.depth

    def _buffer(self, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        local = self.topology.local
        return self.memory.local.tensor(local, number * self.buffer_nbytes, numel, dtype)
