"""Slow-link detector: finds the link or node that slows AllReduce, from TCP counters of the job's own connections.

In a ring all ranks wait for the slowest link, so all see the same slow AllReduce. But the kernel counts the time in
which a connection had data to send: bytes divided by that busy time is the throughput of the link. Links that wait for
others are rarely busy, and fast while they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from ddpcheck.analysis.network.model import NodeLink, SlowLink

# With fewer bytes the start of the connection dominates.
LEAST_BYTES = 8 << 20
# Relative to the link with the most bytes: less is control traffic, not gradients.
LEAST_OF_THE_MOST = 0.1
LEAST_BUSY_SECONDS = 0.5
# A link that is slower than all others by this factor …
LEAST_FACTOR = 1.5
# … and was busy for this share of the time.
LEAST_BUSY_SHARE = 0.2
# It must also be slower in this share of the intervals, by a smaller factor, because each interval is less precise.
LEAST_INTERVALS = 3
LEAST_STEADY = 0.75
LEAST_FACTOR_OF_AN_INTERVAL = 1.25


def slow_link(links: Iterable[NodeLink]) -> SlowLink | None:
    """None if no link is an outlier, or there is nothing to compare with."""
    used = carrying(links)
    if len(used) < 3:
        return None
    # The slowest link is part of whatever is slow.
    slowest = min(used, key=lambda link: link.bandwidth)
    if slowest.busy_seconds < LEAST_BUSY_SECONDS:
        return None
    candidates = [_node(node, used) for node in slowest.ends]
    candidates += [
        _card(*card, used) for card in zip(slowest.ends, slowest.addresses, strict=True) if card[1]
    ]
    candidates.append(_candidate(slowest.ends, [slowest], [link for link in used if link is not slowest]))
    slow = [candidate for candidate in candidates if candidate is not None]
    # Prefer the explanation that covers the most links; candidates are ordered from the widest.
    return max(slow, key=lambda one: (len(one.links), one.factor), default=None)


def carrying(links: Iterable[NodeLink]) -> list[NodeLink]:
    """The links that carried gradients."""
    known = list(links)
    most = max((link.bytes for link in known), default=0)
    return [link for link in known if link.bytes >= max(LEAST_BYTES, LEAST_OF_THE_MOST * most)]


def _node(node: str, links: Sequence[NodeLink]) -> SlowLink | None:
    """A slow node: needs links in both directions, because one link does not show which end is slow."""
    inside, outside = _split(links, lambda link: node in link.ends)
    if {link.source == node for link in inside} != {True, False}:
        return None
    return _candidate((node,), inside, outside)


def _card(node: str, address: str, links: Sequence[NodeLink]) -> SlowLink | None:
    """A slow interface of a node with several."""
    inside, outside = _split(links, lambda link: address in link.addresses)
    if {link.source_address == address for link in inside} != {True, False}:
        return None
    return _candidate((node,), inside, outside, address)


def _split(
    links: Sequence[NodeLink], belongs: Callable[[NodeLink], bool]
) -> tuple[list[NodeLink], list[NodeLink]]:
    return [link for link in links if belongs(link)], [link for link in links if not belongs(link)]


def _candidate(
    nodes: tuple[str, ...], slow: Sequence[NodeLink], others: Sequence[NodeLink], address: str = ""
) -> SlowLink | None:
    if not others:
        return None
    bandwidth = max(link.bandwidth for link in slow)
    least = min(link.bandwidth for link in others)
    if bandwidth * LEAST_FACTOR > least or min(link.busy_share for link in slow) < LEAST_BUSY_SHARE:
        return None
    if not all(_steady(link, least) for link in slow):
        return None
    throughput, usual = (median(link.bandwidth for link in links) for links in (slow, others))
    return SlowLink(nodes, tuple(slow), throughput, usual, address)


def _steady(link: NodeLink, usual: float) -> bool:
    """True if the link was slow most of the time: a burst of other traffic is not a slow link."""
    busy_intervals = [
        (count, busy) for count, busy in link.stretches if count >= LEAST_BYTES // 32 and busy > 0
    ]
    if len(busy_intervals) < LEAST_INTERVALS:
        return False
    slow = sum(count / busy * LEAST_FACTOR_OF_AN_INTERVAL <= usual for count, busy in busy_intervals)
    return slow >= LEAST_STEADY * len(busy_intervals)
