"""Measures latency and bandwidth of all pairs of ranks, and of AllReduce over all, each within a given time.

The sender announces every message by a number, so it alone decides how many messages are sent and for how long. A slow
link takes no longer than a fast one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

from ddpcheck.device_api import api_of
from ddpcheck.links.evaluate import find_slow_links, is_uneven
from ddpcheck.links.model import BETWEEN, WITHIN, AllReduce, LinksReport, MeasuredLink, Node

# Not yet tested on a GPU: apart from the device of the tensors, only `synchronize` differs.


class Transport:
    """Point to point messages of one process group."""

    def __init__(self, device: str) -> None:
        self._distributed: Any = torch.distributed
        self._device = torch.device(device)
        self._buffers: dict[int, torch.Tensor] = {}
        self._number = torch.zeros(1, dtype=torch.int64, device=self._device)

    def send_number(self, number: int, to: int) -> None:
        self._number.fill_(number)
        self._distributed.send(self._number, to)

    def receive_number(self, source: int) -> int:
        self._distributed.recv(self._number, source)
        return int(self._number.item())

    def send(self, size: int, to: int) -> None:
        self._distributed.send(self._buffer(size), to)

    def receive(self, size: int, source: int) -> None:
        self._distributed.recv(self._buffer(size), source)

    def reduce(self, size: int) -> None:
        """An AllReduce of `size` bytes over all ranks."""
        self._distributed.all_reduce(self._buffer(size).view(torch.float32))
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        api = api_of(self._device)
        if api is not None:
            api.synchronize(self._device)

    def slowest(self, seconds: float) -> float:
        """The maximum over all ranks."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        self._distributed.all_reduce(value, op=self._distributed.ReduceOp.MAX)
        return float(value.item())

    def now(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def _buffer(self, size: int) -> torch.Tensor:
        """A buffer of zeros, so that sums stay zero; a whole number of floats."""
        if size not in self._buffers:
            self._buffers[size] = torch.zeros(max(4, size // 4 * 4), dtype=torch.uint8, device=self._device)
        return self._buffers[size]


_STOP = 0
_LATENCY_SHARE = 0.1
_MAX_PINGS = 200
_WARM_UP = 2
# Messages of each size; the bandwidth is that of the largest size.
_MIN_MESSAGES = 4
_MAX_MESSAGES = 400
# Share of the remaining time that the minimum number of messages of the next size may take.
_MAX_SHARE_OF_NEXT_SIZE = 0.6


@dataclass(frozen=True)
class OneWay:
    """Measurement of one direction."""

    latency: float
    bandwidth: float
    spread: float
    size: int
    messages: int


def measure_pair(transport: Transport, me: int, other: int, sizes: Sequence[int], seconds: float) -> OneWay:
    """Called by both ranks of a pair at the same time; each gets its direction to the other."""
    leads = me < other
    if leads:
        latency = _ping(transport, other, seconds * _LATENCY_SHARE)
        result = _send(transport, other, sizes, seconds * (1 - _LATENCY_SHARE) / 2, latency)
        transport.send_number(int(latency * 1e9), other)
        _receive(transport, other)
        return result
    _answer(transport, other)
    _receive(transport, other)
    latency = transport.receive_number(other) / 1e9
    return _send(transport, other, sizes, seconds * (1 - _LATENCY_SHARE) / 2, latency)


def _ping(transport: Transport, other: int, seconds: float) -> float:
    """Half the round-trip time of a number."""
    times: list[float] = []
    started = transport.now()
    while len(times) < _MAX_PINGS and (len(times) < _MIN_MESSAGES or transport.now() - started < seconds):
        before = transport.now()
        transport.send_number(1, other)
        transport.receive_number(other)
        times.append(transport.now() - before)
    transport.send_number(_STOP, other)
    return median(times[_WARM_UP:]) / 2


def _answer(transport: Transport, other: int) -> None:
    while transport.receive_number(other) != _STOP:
        transport.send_number(1, other)


def _send(transport: Transport, other: int, sizes: Sequence[int], seconds: float, latency: float) -> OneWay:
    """Send messages of the largest size that fits the time; each is acknowledged on arrival."""
    deadline = transport.now() + seconds
    size = sizes[0]
    for larger in sizes[1:]:
        rate = median(_rates(transport, other, size, latency, most=_MIN_MESSAGES))
        if larger / rate * _MIN_MESSAGES > _MAX_SHARE_OF_NEXT_SIZE * (deadline - transport.now()):
            break
        size = larger
    rates = _rates(transport, other, size, latency, until=deadline)
    transport.send_number(_STOP, other)
    lower, _, upper = quantiles(rates, n=4)
    # Other load makes single messages slower, never faster than the link: use the upper quartile.
    return OneWay(latency, upper, (upper - lower) / upper, size, len(rates))


def _rates(
    transport: Transport, other: int, size: int, latency: float, most: int = _MAX_MESSAGES, until: float = 0.0
) -> list[float]:
    """Bytes per second of each message, for at most `most` messages or until `until`."""
    rates: list[float] = []
    while len(rates) < _MIN_MESSAGES or (len(rates) < most and transport.now() < until):
        transport.send_number(size, other)
        before = transport.now()
        transport.send(size, other)
        transport.receive_number(other)
        passed = transport.now() - before
        # Subtract the latency of the acknowledgement.
        rates.append(size / max(passed - latency, passed / 2))
    return rates


def _receive(transport: Transport, other: int) -> None:
    while (size := transport.receive_number(other)) != _STOP:
        transport.receive(size, other)
        transport.synchronize()
        transport.send_number(1, other)


def sweep_allreduce(
    transport: Transport, sizes: Sequence[int], seconds: float, world_size: int
) -> list[AllReduce]:
    """AllReduce at every size that fits the time, by the slowest rank."""
    swept: list[AllReduce] = []
    for size in sizes:
        transport.reduce(size)
        first = transport.slowest(_time_of(transport, size))
        if swept and first * _MIN_MESSAGES > seconds:
            break
        times = sorted(_time_of(transport, size) for _ in range(_repetitions(first, seconds / len(sizes))))
        usual = transport.slowest(median(times))
        swept.append(AllReduce(size, usual, size / usual, size / usual * 2 * (world_size - 1) / world_size))
    return swept


def _repetitions(first: float, seconds: float) -> int:
    """Number of repetitions, from a value that is equal on all ranks."""
    return max(_MIN_MESSAGES, min(50, int(seconds / max(first, 1e-6))))


def _time_of(transport: Transport, size: int) -> float:
    before = transport.now()
    transport.reduce(size)
    return transport.now() - before


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
