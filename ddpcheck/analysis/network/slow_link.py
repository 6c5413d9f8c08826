"""Detects the slow link, node or InfiniBand port from the counters of the job's own traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.network.model import NodeLink, SlowLink

# With fewer bytes the start of the connection dominates.
LEAST_BYTES = 8 << 20
# Relative to the link with the most bytes: less is control traffic, not gradients.
LEAST_OF_THE_MOST = 0.1
LEAST_BUSY_SECONDS = 0.5
LEAST_FACTOR_OF_A_DIRECTION = 2.0
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
    if len(used) == 2:
        return _slow_direction(*used)
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


def _slow_direction(one: NodeLink, other: NodeLink) -> SlowLink | None:
    """Of two nodes: each direction can be compared with the other one only, so it takes a larger difference."""
    slow, usual = sorted((one, other), key=lambda link: link.bandwidth)
    if slow.ends != usual.ends[::-1] or slow.busy_seconds < LEAST_BUSY_SECONDS:
        return None
    if slow.bandwidth * LEAST_FACTOR_OF_A_DIRECTION > usual.bandwidth:
        return None
    return _candidate(slow.ends, [slow], [usual])


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


# Bit errors, retransmits and lost packets. A healthy port has none in hours.
LEAST_ERRORS = 10
# Factor of errors, or of waiting per byte, compared with every other port.
MANY_TIMES = 10.0
# Minimum number of ticks, which are a few nanoseconds long.
LEAST_WAITED = 10_000_000


@dataclass(frozen=True)
class PortUse:
    """One port between two samples while the ranks stepped."""

    node: str
    name: str
    # Current speed in Mbit/s: with a bad cable, a port falls back to fewer lanes or a lower rate.
    speed: int | None
    sent: int
    received: int
    errors: int
    # Ticks of the port's clock in which it had data and could not send.
    waited: int
    seconds: float

    @property
    def waited_a_byte(self) -> float:
        return self.waited / max(self.sent, 1)


@dataclass(frozen=True)
class SlowPort:
    """`why` is "rate", "errors" or "waiting"; `usual` is the median of the other ports."""

    port: PortUse
    why: str
    own: float
    usual: float


def ports_of(nodes: Mapping[str, NodeSamples]) -> Iterable[PortUse]:
    for name, node in nodes.items():
        before, after = node.opening, node.closing
        if before is None or after is None or after.time <= before.time:
            continue
        for port, facts in node.facts.infiniband.items():
            old, new = before.infiniband.get(port), after.infiniband.get(port)
            if old is None or new is None:
                continue
            received, sent, errors, waited = (max(0, b - a) for a, b in zip(old, new, strict=True))
            yield PortUse(name, port, facts.speed, sent, received, errors, waited, after.time - before.time)


def slow_port(ports: Sequence[PortUse]) -> SlowPort | None:
    """The outlier among the ports that carry the job's traffic; the most reliable sign first."""
    most = max((port.sent for port in ports), default=0)
    used = [port for port in ports if port.sent >= max(LEAST_BYTES, LEAST_OF_THE_MOST * most)]
    if len({port.node for port in used}) < 2:
        return None
    return _by_rate(used) or _by_errors(used) or _by_waiting(used)


def _by_rate(used: Sequence[PortUse]) -> SlowPort | None:
    known = [(port.speed, port) for port in used if port.speed]
    if len(known) < len(used):
        return None
    (speed, port), *rest = sorted(known, key=lambda pair: pair[0])
    others = [speed for speed, _ in rest]
    if speed * LEAST_FACTOR > min(others):
        return None
    return SlowPort(port, "rate", speed, median(others))


def _by_errors(used: Sequence[PortUse]) -> SlowPort | None:
    *rest, port = sorted(used, key=lambda port: port.errors)
    if port.errors < max(LEAST_ERRORS, MANY_TIMES * rest[-1].errors):
        return None
    return SlowPort(port, "errors", port.errors, median(other.errors for other in rest))


def _by_waiting(used: Sequence[PortUse]) -> SlowPort | None:
    """Needs three ports: with two, either of them may be the cause."""
    *rest, port = sorted(used, key=lambda port: port.waited_a_byte)
    if len(rest) < 2 or port.waited < LEAST_WAITED:
        return None
    if port.waited_a_byte < MANY_TIMES * rest[-1].waited_a_byte:
        return None
    return SlowPort(port, "waiting", port.waited_a_byte, median(other.waited_a_byte for other in rest))
