"""Which link or node holds up the AllReduce, from what the kernels say of the job's own connections.

In a ring everybody waits for the slowest link, so all ranks see the same slow AllReduce. But a connection keeps
count of the time in which it had something to send: bytes over that time is what the link gave while it was asked.
Links that wait for others are hardly busy, and fast while they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from ddpcheck.analysis.links.link import Link, SlowLink

# Less than this tells more of the start of a connection than of the link.
LEAST_BYTES = 8 << 20
# Of what the busiest link moved: less is the store, or somebody's messages, and not the gradients.
LEAST_OF_THE_MOST = 0.1
LEAST_BUSY_SECONDS = 0.5
# A link that is slower than all others by this factor …
LEAST_FACTOR = 1.6
# … and was busy for this part of the time that was watched.
LEAST_BUSY_SHARE = 0.2
# In so many of the stretches between two samples it has to be the slow one.
LEAST_STRETCHES = 3
LEAST_STEADY = 0.75


def slow_link(links: Iterable[Link]) -> SlowLink | None:
    """None where no link stands out, or where there is nothing to compare with."""
    used = carrying(links)
    if len(used) < 3 or not any(link.busy_seconds >= LEAST_BUSY_SECONDS for link in used):
        return None
    candidates = [_whole_node(node, used) for node in _distinct(link.ends for link in used)]
    candidates += [_address(address, used) for address in _distinct(link.addresses for link in used)]
    candidates += [_single(link, used) for link in used]
    found = [candidate for candidate in candidates if candidate is not None]
    # A node whose links are all slow explains more than one of those links does; of equals the first is the widest.
    return max(found, key=lambda one: (len(one.links), one.factor), default=None)


def carrying(links: Iterable[Link]) -> list[Link]:
    """Those that the gradients went over."""
    known = list(links)
    most = max((link.bytes for link in known), default=0)
    return [link for link in known if link.bytes >= max(LEAST_BYTES, LEAST_OF_THE_MOST * most)]


def _distinct(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return sorted({name for pair in pairs for name in pair if name})


def _whole_node(node: str, links: Sequence[Link]) -> SlowLink | None:
    inside = [link for link in links if node in link.ends]
    return _both_ways((node,), inside, links, sends=any(link.source == node for link in inside))


def _address(address: str, links: Sequence[Link]) -> SlowLink | None:
    """One of several cards of a node."""
    inside = [link for link in links if address in link.addresses]
    node = next(link.ends[link.addresses.index(address)] for link in inside)
    sends = any(link.source_address == address for link in inside)
    return _both_ways((node,), inside, links, sends, address)


def _both_ways(
    nodes: tuple[str, ...], inside: Sequence[Link], links: Sequence[Link], sends: bool, address: str = ""
) -> SlowLink | None:
    """One link alone tells nothing of which end it is."""
    receives = any(
        (link.target_address if address else link.target) == (address or nodes[0]) for link in inside
    )
    if not sends or not receives:
        return None
    return _judge(nodes, inside, [link for link in links if link not in inside], address)


def _single(link: Link, links: Sequence[Link]) -> SlowLink | None:
    return _judge(link.ends, [link], [other for other in links if other is not link])


def _judge(
    nodes: tuple[str, ...], slow: Sequence[Link], others: Sequence[Link], address: str = ""
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


def _steady(link: Link, usual: float) -> bool:
    """Whether it was so most of the time: a neighbour's burst of traffic makes no slow link."""
    worked = [(count, busy) for count, busy in link.stretches if count >= LEAST_BYTES // 32 and busy > 0]
    if len(worked) < LEAST_STRETCHES:
        return False
    slow = sum(count / busy * LEAST_FACTOR <= usual for count, busy in worked)
    return slow >= LEAST_STEADY * len(worked)
