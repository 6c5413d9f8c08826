"""The whole measurement as every rank goes through it: nodes, then ranks within a node, then AllReduce."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ddpcheck.links.evaluate import is_uneven, judge
from ddpcheck.links.measure import Transport, measure_pair, sweep_allreduce
from ddpcheck.links.model import BETWEEN, WITHIN, LinksReport, MeasuredLink, Node

Unit = TypeVar("Unit")


def rounds(units: Sequence[Unit]) -> list[list[tuple[Unit, Unit]]]:
    """A round-robin by the circle method: N - 1 rounds of N / 2 pairs, N rounds where N is odd.

    Nobody shares a cable with another pair of its round, and time grows with N, not with the number of pairs.
    """
    if len(units) < 2:
        return []
    circle: list[Unit | None] = [*units, *([None] if len(units) % 2 else [])]
    half = len(circle) // 2
    result = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(a, b) for a, b in facing if a is not None and b is not None])
        # The first stays, all others move on by one place.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


@dataclass(frozen=True)
class SurveyOptions:
    """Bytes of the messages, ascending; seconds for a pair; how many times slower a link may be."""

    sizes: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
    seconds: float = 2.0
    tolerance: float = 1.5


def survey(options: SurveyOptions, device: str) -> LinksReport:
    """Called by all ranks of a process group; all get the same report."""
    distributed: Any = torch.distributed
    started = time.monotonic()
    courier = Transport(device)
    nodes = _nodes()
    links = _look(courier, nodes, options)
    looks = 1
    if _agreed(is_uneven(links, options.tolerance)):
        # Something else that ran on a machine for a moment is no slow link.
        looks = 2
        links = _better(links, _look(courier, nodes, options))
    causes = _agreed(judge(nodes, links, options.tolerance))
    world_size = distributed.get_world_size()
    swept = sweep_allreduce(courier, options.sizes, options.seconds, world_size) if world_size > 1 else []
    if causes:
        # A process that gets no processor for some seconds looks like a slow link too: ask again, later.
        looks = 3
        links = _better(links, _look(courier, nodes, options))
        causes = _agreed(judge(nodes, links, options.tolerance))
    report = LinksReport(
        backend=str(distributed.get_backend()),
        nodes=tuple(nodes),
        links=tuple(links),
        allreduce=tuple(swept),
        explanations=tuple(causes),
        tolerance=options.tolerance,
        seconds=round(time.monotonic() - started, 3),
        looks=looks,
        slow=bool(causes),
    )
    return LinksReport.from_json(_agreed(report.to_json()))


def _nodes() -> list[Node]:
    hosts: list[str] = _gathered(socket.gethostname())
    return [
        Node(host, tuple(rank for rank, name in enumerate(hosts) if name == host))
        for host in dict.fromkeys(hosts)
    ]


def _look(courier: Transport, nodes: Sequence[Node], options: SurveyOptions) -> list[MeasuredLink]:
    """Every pair once. Ranks that have no part in a round wait at its end."""
    distributed: Any = torch.distributed
    me: int = distributed.get_rank()
    found: list[MeasuredLink] = []
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
                way = measure_pair(courier, me, partner, options.sizes, options.seconds)
                found.append(
                    MeasuredLink(
                        me, partner, group, way.latency, way.bandwidth, way.spread, way.size, way.messages
                    )
                )
            distributed.barrier()
    return sorted((link for links in _gathered(found) for link in links), key=_place)


def _better(first: Sequence[MeasuredLink], second: Sequence[MeasuredLink]) -> list[MeasuredLink]:
    """Of two looks at each link the one at which it was faster."""
    others = {_place(link): link for link in second}
    return [max(link, others[_place(link)], key=lambda one: one.bandwidth) for link in first]


def _place(link: MeasuredLink) -> tuple[str, int, int]:
    return link.group, link.source, link.target


def _gathered(mine: Any) -> list[Any]:
    distributed: Any = torch.distributed
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


def _agreed(mine: Any) -> Any:
    """What rank 0 says: figures that were rounded elsewhere must not lead ranks different ways."""
    distributed: Any = torch.distributed
    said = [mine]
    distributed.broadcast_object_list(said, src=0)
    return said[0]
