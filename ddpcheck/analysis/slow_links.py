"""Which link or node holds up the AllReduce, from what the kernels say of the job's own connections.

In a ring everybody waits for the slowest link, so all ranks see the same slow AllReduce. But a connection keeps
count of the time in which it had something to send: bytes over that time is what the link gave while it was asked.
Links that wait for others are hardly busy, and fast while they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

# Less than this tells more of the start of a connection than of the link.
LEAST_BYTES = 8 << 20
LEAST_BUSY_SECONDS = 0.5
# A link that is slower than all others by this factor …
LEAST_FACTOR = 1.6
# … and was busy for this part of the time that was watched.
LEAST_BUSY_SHARE = 0.2
# In so many of the stretches between two samples it has to be the slow one.
LEAST_STRETCHES = 3
LEAST_STEADY = 0.75
# The kernel counts in ticks of its clock.
_TICK = 0.004


@dataclass(frozen=True)
class Link:
    """From one node to another, over all connections between them."""

    source: str
    target: str
    bytes: int
    busy_seconds: float
    # Over how long that was.
    seconds: float
    # (bytes, busy seconds) between one sample and the next.
    stretches: tuple[tuple[int, float], ...] = ()

    @property
    def bandwidth(self) -> float:
        """Bytes a second while it was asked."""
        return self.bytes / max(self.busy_seconds, _TICK)

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.seconds if self.seconds > 0 else 0.0

    def touches(self, node: str) -> bool:
        return node in (self.source, self.target)


@dataclass(frozen=True)
class SlowLink:
    """`nodes`: the one node whose links are all slow, or both ends of the one link that is."""

    nodes: tuple[str, ...]
    links: tuple[Link, ...]
    # Bytes a second: of the slow links, and of the others while they were asked.
    bandwidth: float
    usual: float

    @property
    def factor(self) -> float:
        return self.usual / self.bandwidth

    def seconds_lost(self) -> float:
        """Over the whole time watched, by the slowest of them: the others of a ring wait meanwhile."""
        return max(link.busy_seconds - link.bytes / self.usual for link in self.links)


def slow_link(links: Iterable[Link]) -> SlowLink | None:
    """None where no link stands out, or where there is nothing to compare with."""
    used = [link for link in links if link.bytes >= LEAST_BYTES]
    busy = [link for link in used if link.busy_seconds >= LEAST_BUSY_SECONDS]
    if len(used) < 3 or not busy:
        return None
    candidates = [_whole_node(node, used) for node in sorted({node for link in used for node in _ends(link)})]
    candidates += [_single(link, used) for link in busy]
    found = [candidate for candidate in candidates if candidate is not None]
    # A node whose links are all slow explains more than one of those links does.
    return max(found, key=lambda one: (len(one.links), one.factor), default=None)


def _ends(link: Link) -> tuple[str, str]:
    return link.source, link.target


def _whole_node(node: str, links: Sequence[Link]) -> SlowLink | None:
    inside = [link for link in links if link.touches(node)]
    outside = [link for link in links if not link.touches(node)]
    sends, receives = (any(end(link) == node for link in inside) for end in (_source, _target))
    if not outside or not sends or not receives:
        return None
    return _judge((node,), inside, outside)


def _single(link: Link, links: Sequence[Link]) -> SlowLink | None:
    return _judge(_ends(link), [link], [other for other in links if other is not link])


def _source(link: Link) -> str:
    return link.source


def _target(link: Link) -> str:
    return link.target


def _judge(nodes: tuple[str, ...], slow: Sequence[Link], others: Sequence[Link]) -> SlowLink | None:
    bandwidth = max(link.bandwidth for link in slow)
    least = min(link.bandwidth for link in others)
    if bandwidth * LEAST_FACTOR > least or min(link.busy_share for link in slow) < LEAST_BUSY_SHARE:
        return None
    if not _steady(slow, others):
        return None
    given, usual = (median(link.bandwidth for link in links) for links in (slow, others))
    return SlowLink(nodes, tuple(slow), given, usual)


def _steady(slow: Sequence[Link], others: Sequence[Link]) -> bool:
    """Whether it was so most of the time: a neighbour's burst of traffic makes no slow link."""
    usual = min(link.bandwidth for link in others)
    worked = [
        [(count, busy) for count, busy in link.stretches if count >= LEAST_BYTES // 32 and busy > 0]
        for link in slow
    ]
    if min(map(len, worked), default=0) < LEAST_STRETCHES:
        return False
    return all(
        sum(count / busy * LEAST_FACTOR <= usual for count, busy in stretches)
        >= LEAST_STEADY * len(stretches)
        for stretches in worked
    )
