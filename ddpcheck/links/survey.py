"""The measurement on all ranks: links between nodes, links within nodes, AllReduce."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ddpcheck.links.evaluate import find_slow_links, is_uneven
from ddpcheck.links.measure import Transport, measure_pair, sweep_allreduce
from ddpcheck.links.model import BETWEEN, WITHIN, LinksReport, MeasuredLink, Node

Unit = TypeVar("Unit")


def rounds(units: Sequence[Unit]) -> list[list[tuple[Unit, Unit]]]:
    """Round robin by the circle method: N - 1 rounds of N / 2 pairs, or N rounds if N is odd.

    Pairs of a round are disjoint, and the time grows with N, not with the number of pairs.
    """
    if len(units) < 2:
        return []
    circle: list[Unit | None] = [*units, *([None] if len(units) % 2 else [])]
    half = len(circle) // 2
    result = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(a, b) for a, b in facing if a is not None and b is not None])
        # The first stays, all others move by one position.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


@dataclass(frozen=True)
class SurveyOptions:
    """Message sizes in bytes, ascending; seconds per pair; slowdown factor that is tolerated."""

    sizes: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
    seconds: float = 2.0
    tolerance: float = 1.5


def survey(options: SurveyOptions, device: str) -> LinksReport:
    """Called by all ranks of a process group; all get the same report."""
    distributed: Any = torch.distributed
    started = time.monotonic()
    transport = Transport(device)
    nodes = _nodes()
    links = _measure_all(transport, nodes, options)
    measurements = 1
    if _from_rank_zero(is_uneven(links, options.tolerance)):
        # Measure again: other load on a machine for a short time is not a slow link.
        measurements = 2
        links = _faster_of(links, _measure_all(transport, nodes, options))
    causes = _from_rank_zero(find_slow_links(nodes, links, options.tolerance))
    world_size = distributed.get_world_size()
    swept = sweep_allreduce(transport, options.sizes, options.seconds, world_size) if world_size > 1 else []
    if causes:
        # A process without a CPU for some seconds also looks like a slow link: measure again later.
        measurements = 3
        links = _faster_of(links, _measure_all(transport, nodes, options))
        causes = _from_rank_zero(find_slow_links(nodes, links, options.tolerance))
    report = LinksReport(
        backend=str(distributed.get_backend()),
        nodes=tuple(nodes),
        links=tuple(links),
        allreduce=tuple(swept),
        explanations=tuple(causes),
        tolerance=options.tolerance,
        seconds=round(time.monotonic() - started, 3),
        looks=measurements,
        slow=bool(causes),
    )
    return LinksReport.from_json(_from_rank_zero(report.to_json()))


def _nodes() -> list[Node]:
    hosts: list[str] = _gathered(socket.gethostname())
    return [
        Node(host, tuple(rank for rank, name in enumerate(hosts) if name == host))
        for host in dict.fromkeys(hosts)
    ]


def _measure_all(transport: Transport, nodes: Sequence[Node], options: SurveyOptions) -> list[MeasuredLink]:
    """Measure every pair once. Ranks without a partner wait at the end of the round."""
    distributed: Any = torch.distributed
    me: int = distributed.get_rank()
    links: list[MeasuredLink] = []
    across = [[(a.ranks[0], b.ranks[0]) for a, b in pairs] for pairs in rounds(nodes)]
    inside = [rounds(node.ranks) for node in nodes]
    within = [
        [pair for node in inside if turn < len(node) for pair in node[turn]]
        for turn in range(max(map(len, inside)))
    ]
    for group, turns in ((BETWEEN, across), (WITHIN, within)):
        for pairs in turns:
            partner = next((a + b - me for a, b in pairs if me in (a, b)), None)
            if partner is not None:
                way = measure_pair(transport, me, partner, options.sizes, options.seconds)
                links.append(
                    MeasuredLink(
                        me, partner, group, way.latency, way.bandwidth, way.spread, way.size, way.messages
                    )
                )
            distributed.barrier()
    return sorted((link for links in _gathered(links) for link in links), key=_link_key)


def _faster_of(first: Sequence[MeasuredLink], second: Sequence[MeasuredLink]) -> list[MeasuredLink]:
    """The faster of two measurements of each link."""
    others = {_link_key(link): link for link in second}
    return [max(link, others[_link_key(link)], key=lambda one: one.bandwidth) for link in first]


def _link_key(link: MeasuredLink) -> tuple[str, int, int]:
    return link.group, link.source, link.target


def _gathered(mine: Any) -> list[Any]:
    distributed: Any = torch.distributed
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    return gathered


def _from_rank_zero(mine: Any) -> Any:
    """The value of rank 0, so that all ranks take the same decision."""
    distributed: Any = torch.distributed
    value = [mine]
    distributed.broadcast_object_list(value, src=0)
    return value[0]
