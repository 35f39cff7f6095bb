"""Paced puts along a rail: at most `in_flight` to one peer that it has not yet acknowledged.

Pacing keeps a network card's queue short and a receiver from being written to by many at once. The
acknowledgement is a flag back (a credit), so a rank that has all its credits knows that what it sent
has arrived and that its sources are free.
"""

from dataclasses import dataclass, field

from torch import Tensor

from collectives.symmetric.transport import Network, Region


@dataclass
class Rail:
    """Counts of puts to and from each peer; channels `first_channel` and the next are its own."""

    network: Network
    first_channel: int
    in_flight: int
    sent: dict[int, int] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)

    def put(
        self, source: Tensor, region: Region, offset: int, peer: int, pitch: int | None = None
    ) -> None:
        """Put, once the peer has acknowledged enough of the puts before, and say so."""
        count = self.sent[peer] = self.sent.get(peer, 0) + 1
        self._await_credits(peer, count - self.in_flight)
        self.network.put_signal(source, region, offset, peer, self.first_channel, count, pitch)

    def take(self, peer: int) -> None:
        """Until the next put of `peer` has arrived; acknowledges it."""
        count = self.received[peer] = self.received.get(peer, 0) + 1
        self.network.wait(peer, self.first_channel, count)
        self.network.signal(peer, self.first_channel + 1, count)

    def finish(self, peer: int) -> None:
        """Until `peer` has acknowledged everything, and sources may be written again."""
        self._await_credits(peer, self.sent.get(peer, 0))
        self.network.flush()

    def _await_credits(self, peer: int, count: int) -> None:
        """Until `peer` has acknowledged so many puts."""
        for credit in range(self.acknowledged.get(peer, 0) + 1, count + 1):
            self.network.wait(peer, self.first_channel + 1, credit)
            self.acknowledged[peer] = credit


RAIL_CHANNELS = 2
