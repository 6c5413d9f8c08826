"""The cost of the links between nodes where none of them is faulty: what a step waits for, and at other rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.network.model import NodeLink
from ddpcheck.analysis.network.slow_link import LEAST_BUSY_SECONDS, LEAST_BYTES, carrying
from ddpcheck.analysis.timing.model import TimeTable

# Share of a step that all ranks wait for communication, below which the network is not what limits the job.
LEAST_EXPOSED = 0.2
# The busy time of the link has to explain this share of the wait.
LEAST_EXPLAINED = 0.5
LEAST_STEPS = 10
# With less, latency counts and not the rate.
LEAST_BYTES_A_STEP = 1 << 19
# Share of the card's rate above which the card is the limit. Headers alone take 5 % with an MTU of 1500.
NEAR_THE_RATE = 0.7
# Share of the rate that a faster card is expected to reach, where the rate of this one is not known.
USUAL_SHARE = 0.9
# In Gbit/s: of common cards.
RATES = (2.5, 10.0, 25.0, 100.0, 400.0)
MOST_RATES = 3
# Share of the bytes sent a second time from which loss matters to TCP. A packet has at most this many bytes of data.
MUCH_SENT_AGAIN = 0.001
_PACKET = 1448
# The throughput has fallen if it is below this share of the first one, each a median of this many intervals.
FALLEN = 0.5
_INTERVALS = 4


@dataclass(frozen=True)
class Card:
    """The interface that has an address. `speed` in Mbit/s; None: not known."""

    name: str
    speed: int | None


@dataclass(frozen=True)
class LinkBound:
    """A job that waits for its gradients on the way between nodes. Times in microseconds per step."""

    link: NodeLink
    card: Card | None
    step_us: int
    exposed_us: int
    busy_us: int
    # By rate in Gbit/s: the expected step.
    expected_us: Mapping[float, int]
    # Throughput in the first and in the last intervals, if it has fallen.
    fallen: tuple[float, float] | None = None

    @property
    def bytes_a_step(self) -> float:
        return self.link.bytes / (self.link.steps or 1)

    @property
    def without_us(self) -> int:
        """The step if these transfers took no time, as on one node."""
        return self.step_us - min(self.exposed_us, self.busy_us)

    @property
    def factor(self) -> float:
        return self.step_us / max(1, self.without_us)

    @property
    def of_the_rate(self) -> float | None:
        """Throughput while busy, as a share of the card's rate."""
        if self.card is None or not self.card.speed:
            return None
        return self.link.bandwidth * 8e-6 / self.card.speed

    @property
    def at_its_rate(self) -> bool:
        share = self.of_the_rate
        return share is not None and share >= NEAR_THE_RATE

    @property
    def loses_packets(self) -> bool:
        return self.link.retransmits * _PACKET >= MUCH_SENT_AGAIN * self.link.bytes


def link_bound(
    links: Sequence[NodeLink], cards: Mapping[str, Card], tables: Sequence[TimeTable]
) -> LinkBound | None:
    """None if ranks do not wait for the network, or if its transfers do not explain the wait."""
    timed = [link for link in carrying(links) if (link.steps or 0) >= LEAST_STEPS]
    if not timed or not tables:
        return None
    link = max(timed, key=lambda each: each.busy_seconds / (each.steps or 1))
    table = max(tables, key=lambda each: each.scaling.exposed_communication * each.step_us)
    exposed = table.scaling.exposed_communication * table.step_us
    busy = link.busy_seconds / (link.steps or 1) * 1e6
    bytes_a_step = link.bytes / (link.steps or 1)
    if (
        table.scaling.exposed_communication < LEAST_EXPOSED
        or busy < LEAST_EXPLAINED * exposed
        or link.busy_seconds < LEAST_BUSY_SECONDS
        or bytes_a_step < LEAST_BYTES_A_STEP
    ):
        return None
    card = cards.get(link.source_address)
    expected = _expected(link, card, table.step_us, exposed, busy)
    return LinkBound(link, card, table.step_us, round(exposed), round(busy), expected, _fallen(link))


def _expected(
    link: NodeLink, card: Card | None, step_us: int, exposed: float, busy: float
) -> dict[float, int]:
    """The time saved shortens the step at most by what ranks wait for."""
    now = link.bandwidth * 8e-9
    rate = card.speed / 1000 if card is not None and card.speed else now / USUAL_SHARE
    share = min(1.0, max(now / rate, NEAR_THE_RATE)) if card is not None and card.speed else USUAL_SHARE
    expected = {}
    for faster in [each for each in RATES if each >= 1.5 * max(rate, now)][:MOST_RATES]:
        saved = busy * (1 - now / (share * faster))
        expected[faster] = round(step_us - min(exposed, max(0.0, saved)))
    return expected


def _fallen(link: NodeLink) -> tuple[float, float] | None:
    used = [(count, busy) for count, busy in link.stretches if count >= LEAST_BYTES // 32 and busy > 0]
    if len(used) < 2 * _INTERVALS:
        return None
    rates = [count / busy for count, busy in used]
    first, last = median(rates[:_INTERVALS]), median(rates[-_INTERVALS:])
    return (first, last) if last < FALLEN * first else None
