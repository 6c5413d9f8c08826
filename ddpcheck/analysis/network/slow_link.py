"""Which link or node holds up the AllReduce, from what the kernels say of the job's own connections.

In a ring everybody waits for the slowest link, so all ranks see the same slow AllReduce. But a connection keeps
count of the time in which it had something to send: bytes over that time is what the link gave while it was asked.
Links that wait for others are hardly busy, and fast while they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from ddpcheck.analysis.network.model import NodeLink, SlowLink

# Less than this tells more of the start of a connection than of the link.
LEAST_BYTES = 8 << 20
# Of what the busiest link moved: less is the store, or somebody's messages, and not the gradients.
LEAST_OF_THE_MOST = 0.1
LEAST_BUSY_SECONDS = 0.5
# A link that is slower than all others by this factor …
LEAST_FACTOR = 1.5
# … and was busy for this part of the time that was watched.
LEAST_BUSY_SHARE = 0.2
# In so many of the stretches between two samples it has to be slower too, by this factor: each alone is less exact.
LEAST_STRETCHES = 3
LEAST_STEADY = 0.75
LEAST_FACTOR_OF_A_STRETCH = 1.25


def slow_link(links: Iterable[NodeLink]) -> SlowLink | None:
    """None where no link stands out, or where there is nothing to compare with."""
    used = carrying(links)
    if len(used) < 3:
        return None
    # Whatever is slow, the slowest link is a part of it.
    slowest = min(used, key=lambda link: link.bandwidth)
    if slowest.busy_seconds < LEAST_BUSY_SECONDS:
        return None
    candidates = [_node(node, used) for node in slowest.ends]
    candidates += [
        _card(*card, used) for card in zip(slowest.ends, slowest.addresses, strict=True) if card[1]
    ]
    candidates.append(_judge(slowest.ends, [slowest], [link for link in used if link is not slowest]))
    found = [candidate for candidate in candidates if candidate is not None]
    # A node whose links are all slow explains more than one of those links does; of equals the first is the widest.
    return max(found, key=lambda one: (len(one.links), one.factor), default=None)


def carrying(links: Iterable[NodeLink]) -> list[NodeLink]:
    """Those that the gradients went over."""
    known = list(links)
    most = max((link.bytes for link in known), default=0)
    return [link for link in known if link.bytes >= max(LEAST_BYTES, LEAST_OF_THE_MOST * most)]


def _node(node: str, links: Sequence[NodeLink]) -> SlowLink | None:
    """All links to and from a node: one alone does not tell which end it is."""
    inside, outside = _parted(links, lambda link: node in link.ends)
    if {link.source == node for link in inside} != {True, False}:
        return None
    return _judge((node,), inside, outside)


def _card(node: str, address: str, links: Sequence[NodeLink]) -> SlowLink | None:
    """One of several cards of a node."""
    inside, outside = _parted(links, lambda link: address in link.addresses)
    if {link.source_address == address for link in inside} != {True, False}:
        return None
    return _judge((node,), inside, outside, address)


def _parted(
    links: Sequence[NodeLink], belongs: Callable[[NodeLink], bool]
) -> tuple[list[NodeLink], list[NodeLink]]:
    return [link for link in links if belongs(link)], [link for link in links if not belongs(link)]


def _judge(
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
    given, usual = (median(link.bandwidth for link in links) for links in (slow, others))
    return SlowLink(nodes, tuple(slow), given, usual, address)


def _steady(link: NodeLink, usual: float) -> bool:
    """Whether it was so most of the time: a neighbour's burst of traffic makes no slow link."""
    worked = [(count, busy) for count, busy in link.stretches if count >= LEAST_BYTES // 32 and busy > 0]
    if len(worked) < LEAST_STRETCHES:
        return False
    slow = sum(count / busy * LEAST_FACTOR_OF_A_STRETCH <= usual for count, busy in worked)
    return slow >= LEAST_STEADY * len(worked)
