"""One link between two nodes, as the sender's kernel saw it, and what is said of slow ones."""

from __future__ import annotations

from dataclasses import dataclass

# The kernel counts busy time in ticks of its clock.
_TICK = 0.004

# Bytes, and seconds in which the network was busy with them, between one sample and the next.
Stretch = tuple[int, float]


@dataclass(frozen=True)
class Link:
    """From an address of one node to one of another, over all connections between them."""

    source: str
    target: str
    bytes: int
    busy_seconds: float
    # Over how long that was.
    seconds: float
    stretches: tuple[Stretch, ...] = ()
    source_address: str = ""
    target_address: str = ""
    # Between the same two samples; None where the sender's ranks did not step.
    steps: float | None = None
    retransmits: int = 0
    # The shortest round trip that was ever seen, in microseconds.
    min_rtt: int = 0

    @property
    def bandwidth(self) -> float:
        """Bytes a second while it was asked."""
        return self.bytes / max(self.busy_seconds, _TICK)

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def ends(self) -> tuple[str, str]:
        return self.source, self.target

    @property
    def addresses(self) -> tuple[str, str]:
        return self.source_address, self.target_address


@dataclass(frozen=True)
class SlowLink:
    """`nodes`: the one node whose links are all slow, or both ends of the one link that is."""

    nodes: tuple[str, ...]
    links: tuple[Link, ...]
    # Bytes a second: of the slow links, and of the others while they were asked.
    bandwidth: float
    usual: float
    # Of that node, where it has several and the links of the others are not slow.
    address: str = ""

    @property
    def factor(self) -> float:
        return self.usual / self.bandwidth

    @property
    def worst(self) -> Link:
        """The one that loses the most: the others of a ring wait meanwhile."""
        return max(self.links, key=self._lost)

    def seconds_lost(self) -> float:
        """Over the whole time watched, against a link like the others."""
        return self._lost(self.worst)

    def seconds_lost_a_step(self) -> float | None:
        steps = self.worst.steps
        return self.seconds_lost() / steps if steps else None

    def _lost(self, link: Link) -> float:
        return link.busy_seconds - link.bytes / self.usual
