"""Histograms of saved gradients. Needs numpy, which TensorBoard requires anyway."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.analysis.allreduce.saved_gradients import Saved, saved_files
from ddpcheck.analysis.tensor_values import CapturedTensors
from ddpcheck.analysis.timeseries.model import Histogram

if TYPE_CHECKING:
    import numpy

BINS = 30
# Maximum number of histograms.
MOST = 4000
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
ByRank = Mapping[int, list[CapturedTensors]]


def gradient_histograms(folder: Path, ranks: Sequence[int]) -> tuple[Histogram, ...]:
    """Of the last attempt with saved gradients: local gradients of each rank, and reduced gradients once."""
    attempts = saved_files(folder)
    if not attempts:
        return ()
    latest = attempts[-1]
    modules = {saved.module for saved in latest}
    histograms: list[Histogram] = []
    for step in _some([saved.step for saved in latest], _size(latest, ranks)):
        for module in sorted(modules):
            by_rank: dict[int, list[CapturedTensors]] = {}
            for saved in latest:
                if (saved.step, saved.module) == (step, module):
                    by_rank.setdefault(saved.rank, []).append(saved.tensors)
            of = f"module {module}" if len(modules) > 1 else ""
            histograms += _of_step(step, by_rank, frozenset(ranks), of)
    return tuple(histograms[:MOST])


def _size(saved: Sequence[Saved], ranks: Sequence[int]) -> int:
    """Approximate number of histograms of one step."""
    names = {key for one in saved[:64] for key, _, _ in one.tensors.entries()}
    return max(1, len(names) * (len(ranks) + 1) // 2)


def _some(steps: Sequence[int], size: int) -> list[int]:
    distinct = sorted(set(steps))
    most = max(1, MOST // size)
    return distinct[:: -(-len(distinct) // most)]


def _of_step(step: int, by_rank: ByRank, shown: frozenset[int], of: str) -> Iterator[Histogram]:
    kinds = {key: dtype for files in by_rank.values() for file in files for key, dtype, _ in file.entries()}
    for key, dtype in kinds.items():
        part, _, name = key.partition("/")
        if part not in ("local", "reduced"):
            continue
        raw = {rank: b"".join(file.read(key) for file in files) for rank, files in by_rank.items()}
        raw = {rank: data for rank, data in raw.items() if data}
        if part == "reduced" and len(set(raw.values())) == 1:
            by_rank_data: dict[int | None, bytes] = {None: next(iter(raw.values()))}
        else:
            by_rank_data = {rank: data for rank, data in raw.items() if rank in shown}
        for rank, data in by_rank_data.items():
            numbers = _numbers(data, dtype)
            if numbers is not None and numbers.size:
                edges, counts = _counted(numbers)
                yield Histogram(step, name, part == "reduced", rank, edges, counts, of)


def _numbers(data: bytes, dtype: str) -> numpy.ndarray | None:
    """The finite values; None for other dtypes or truncated data."""
    import numpy

    if dtype == "BF16" and len(data) % 2 == 0:
        wide = numpy.frombuffer(data, "<u2").astype("<u4") << 16
        values = wide.view("<f4").astype("<f8")
    elif dtype in _NUMPY and len(data) % numpy.dtype(_NUMPY[dtype]).itemsize == 0:
        values = numpy.frombuffer(data, _NUMPY[dtype]).astype("<f8")
    else:
        return None
    finite: numpy.ndarray = values[numpy.isfinite(values)]
    return finite


def _counted(numbers: numpy.ndarray) -> tuple[tuple[float, ...], tuple[int, ...]]:
    import numpy

    low, high = float(numbers.min()), float(numbers.max())
    if not high > low:
        # All values are equal: one narrow bin.
        width = max(abs(low), 1.0) * math.ulp(1.0)
        return (low - width, low + width), (int(numbers.size),)
    counts, edges = numpy.histogram(numbers, bins=BINS, range=(low, high))
    return tuple(map(float, edges)), tuple(map(int, counts))
