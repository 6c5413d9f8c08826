"""Measures latency and bandwidth between two ranks, and of AllReduce over all, each within a given time.

Two ranks agree on every message by one number that goes ahead of it, so the one that measures decides alone how often
and how long, and a link that is a thousand times slower than another takes no longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from ddpcheck.links.model import AllReduce

# On CUDA nothing of this has met a device yet: beside where tensors live, only `settle` differs.


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
        """An AllReduce of so many bytes over all ranks."""
        self._distributed.all_reduce(self._buffer(size).view(torch.float32))
        self.settle()

    def settle(self) -> None:
        """What was started on a device has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def now(self) -> float:
        self.settle()
        return time.perf_counter()

    def _buffer(self, size: int) -> torch.Tensor:
        """Of whole floats, and zeros: sums of them stay zeros."""
        if size not in self._buffers:
            self._buffers[size] = torch.zeros(max(4, size // 4 * 4), dtype=torch.uint8, device=self._device)
        return self._buffers[size]


_STOP = 0
_LATENCY_SHARE = 0.1
_MOST_PINGS = 200
_WARM_UP = 2
# At a size that is measured, so many messages at the least; those of the largest size tell the bandwidth.
_FEWEST = 4
_MOST = 400
# The share of the time left that the fewest messages of a larger size may take.
_WORTH_CLIMBING = 0.6


@dataclass(frozen=True)
class OneWay:
    """What one rank saw of its way to another."""

    latency: float
    bandwidth: float
    spread: float
    size: int
    messages: int


def measure_pair(courier: Transport, me: int, other: int, sizes: Sequence[int], seconds: float) -> OneWay:
    """Both ranks of a pair call this at the same time; each gets its own way to the other."""
    leads = me < other
    if leads:
        latency = _ping(courier, other, seconds * _LATENCY_SHARE)
        there = _send(courier, other, sizes, seconds * (1 - _LATENCY_SHARE) / 2, latency)
        courier.send_number(int(latency * 1e9), other)
        _receive(courier, other)
        return there
    _answer(courier, other)
    _receive(courier, other)
    latency = courier.receive_number(other) / 1e9
    return _send(courier, other, sizes, seconds * (1 - _LATENCY_SHARE) / 2, latency)


def _ping(courier: Transport, other: int, seconds: float) -> float:
    """Half the time of a number's way there and back."""
    times: list[float] = []
    started = courier.now()
    while len(times) < _MOST_PINGS and (len(times) < _FEWEST or courier.now() - started < seconds):
        before = courier.now()
        courier.send_number(1, other)
        courier.receive_number(other)
        times.append(courier.now() - before)
    courier.send_number(_STOP, other)
    return median(times[_WARM_UP:]) / 2


def _answer(courier: Transport, other: int) -> None:
    while courier.receive_number(other) != _STOP:
        courier.send_number(1, other)


def _send(courier: Transport, other: int, sizes: Sequence[int], seconds: float, latency: float) -> OneWay:
    """The largest size there is time for, until the time is up; each message is acknowledged on arrival."""
    deadline = courier.now() + seconds
    size = sizes[0]
    for larger in sizes[1:]:
        rate = median(_rates(courier, other, size, latency, most=_FEWEST))
        if larger / rate * _FEWEST > _WORTH_CLIMBING * (deadline - courier.now()):
            break
        size = larger
    rates = _rates(courier, other, size, latency, until=deadline)
    courier.send_number(_STOP, other)
    lower, _, upper = quantiles(rates, n=4)
    # Whatever else runs on these machines makes single messages slower, never faster than the link.
    return OneWay(latency, upper, (upper - lower) / upper, size, len(rates))


def _rates(
    courier: Transport, other: int, size: int, latency: float, most: int = _MOST, until: float = 0.0
) -> list[float]:
    """Bytes a second of so many messages, or of those until then; a few at the least."""
    rates: list[float] = []
    while len(rates) < _FEWEST or (len(rates) < most and courier.now() < until):
        courier.send_number(size, other)
        before = courier.now()
        courier.send(size, other)
        courier.receive_number(other)
        passed = courier.now() - before
        # The acknowledgement's own way back is no part of the transfer.
        rates.append(size / max(passed - latency, passed / 2))
    return rates


def _receive(courier: Transport, other: int) -> None:
    while (size := courier.receive_number(other)) != _STOP:
        courier.receive(size, other)
        courier.settle()
        courier.send_number(1, other)


def sweep_allreduce(
    courier: Transport, sizes: Sequence[int], seconds: float, world_size: int
) -> list[AllReduce]:
    """AllReduce at every size there is time for; the slowest rank counts."""
    swept: list[AllReduce] = []
    for size in sizes:
        courier.reduce(size)
        first = _slowest(_time_of(courier, size))
        if swept and first * _FEWEST > seconds:
            break
        times = sorted(_time_of(courier, size) for _ in range(_times(first, seconds / len(sizes))))
        usual = _slowest(median(times))
        swept.append(AllReduce(size, usual, size / usual, size / usual * 2 * (world_size - 1) / world_size))
    return swept


def _times(first: float, seconds: float) -> int:
    """How often, decided by a figure that all ranks have in common."""
    return max(_FEWEST, min(50, int(seconds / max(first, 1e-6))))


def _time_of(courier: Transport, size: int) -> float:
    before = courier.now()
    courier.reduce(size)
    return courier.now() - before


def _slowest(seconds: float) -> float:
    """Of all ranks."""
    distributed: Any = torch.distributed
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
    return float(value.item())
