"""Bandwidth of a collective, as nccl-tests reckon it."""

from __future__ import annotations

from ddpcheck.traces.kernels import Kind


def algorithm_bandwidth(size: int | None, duration_ns: int) -> float | None:
    """Bytes over time in GB/s (1e9 bytes), which is bytes per nanosecond."""
    if size is None or duration_ns <= 0:
        return None
    return round(size / duration_ns, 3)


def bus_bandwidth(kind: Kind, algorithm: float | None, ranks: int | None) -> float | None:
    """What the links carried: comparable between operations and numbers of ranks."""
    if algorithm is None or not ranks:
        return None
    return round(algorithm * _factor(kind, ranks), 3)


def _factor(kind: Kind, ranks: int) -> float:
    if kind is Kind.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
        return (ranks - 1) / ranks
    return 1.0
