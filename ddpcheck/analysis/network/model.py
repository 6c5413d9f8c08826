"""One link between two nodes, as the sender's kernel saw it, and what is said of slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.analysis.timing.model import TimeTable

# The kernel counts busy time in ticks of its clock.
_TICK = 0.004

# Bytes, and seconds in which the network was busy with them, between one sample and the next.
Stretch = tuple[int, float]


@dataclass(frozen=True)
class NodeLink:
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
    links: tuple[NodeLink, ...]
    # Bytes a second: of the slow links, and of the others while they were asked.
    bandwidth: float
    usual: float
    # Of that node, where it has several and the links of the others are not slow.
    address: str = ""

    @property
    def factor(self) -> float:
        return self.usual / self.bandwidth

    @property
    def worst(self) -> NodeLink:
        """The one that loses the most: the others of a ring wait meanwhile."""
        return max(self.links, key=self._lost)

    def seconds_lost(self) -> float:
        """Over the whole time watched, against a link like the others."""
        return self._lost(self.worst)

    def seconds_lost_a_step(self) -> float | None:
        steps = self.worst.steps
        return self.seconds_lost() / steps if steps else None

    def _lost(self, link: NodeLink) -> float:
        return link.busy_seconds - link.bytes / self.usual


@dataclass(frozen=True)
class Cost:
    """Microseconds of a step, and of how long a one."""

    cost_us: int
    step_us: int

    @property
    def share(self) -> float:
        return self.cost_us / self.step_us


def cost_of(slow: SlowLink, tables: Sequence[TimeTable]) -> Cost | None:
    """What the link takes longer than one like the others would, as far as the ranks wait for it.

    Transfers that hide behind the backward cost nothing. None where no step was clocked.
    """
    lost = slow.seconds_lost_a_step()
    if lost is None or not tables:
        return None
    waiting = max(tables, key=lambda table: table.scaling.exposed_communication * table.step_us)
    exposed = waiting.scaling.exposed_communication * waiting.step_us
    return Cost(round(max(0.0, min(lost * 1e6, exposed))), max(1, waiting.step_us))
