"""Compares saved gradients element by element: across ranks, and the reduced ones with the mean of the local ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpcheck.analysis.evidence import CapturedTensors, element_size, value
from ddpcheck.errors import RunNotFound

FOLDER = "gradients"
# Values of a tensor that reports show.
SHOWN = 4
# More elements would take too long to compare one by one; the bytes of the ranks are compared in any case.
MOST_ELEMENTS = 2_000_000

_FILE = re.compile(
    r"step-(?P<step>\d+)-module-(?P<module>\d+)-rank-(?P<rank>\d+)(?:-(?P<start>[0-9a-f]{8}))?(?:-parameters)?"
    r"\.safetensors"
)
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64"}


@dataclass(frozen=True)
class SavedStage:
    """One saved tensor of one rank."""

    norm: float
    first: tuple[Any, ...]


@dataclass(frozen=True)
class SavedParameter:
    """One parameter's gradients, and its values before and after the step."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    local: Mapping[int, SavedStage]
    reduced: Mapping[int, SavedStage]
    before: Mapping[int, SavedStage]
    after: Mapping[int, SavedStage]
    reduced_equal: bool
    # Largest difference between an element of the reduced gradient and the mean of the local ones.
    off_mean: float | None


@dataclass(frozen=True)
class SavedGradients:
    """The saved tensors of one module at one step."""

    step: int
    module: int
    ranks: tuple[int, ...]
    parameters: tuple[SavedParameter, ...]
    # Ranks of the module's group without a file.
    missing: tuple[int, ...] = ()
    # Number of this attempt among those that saved this step, and their count: a restart may repeat a step.
    attempt: int = 0
    attempts: int = 1


@dataclass(frozen=True)
class Saved:
    """One file of saved gradients."""

    step: int
    module: int
    rank: int
    tensors: CapturedTensors


def saved_files(path: Path) -> list[list[Saved]]:
    """All saved files by attempt, the oldest first; damaged files are skipped."""
    by_attempt: dict[str, list[Saved]] = {}
    for file in sorted((path / FOLDER).glob("*.safetensors"), key=_age):
        match = _FILE.fullmatch(file.name)
        if match is not None and (tensors := CapturedTensors(file)).entries():
            saved = Saved(int(match["step"]), int(match["module"]), int(match["rank"]), tensors)
            by_attempt.setdefault(match["start"] or "", []).append(saved)
    return list(by_attempt.values())


# By module and group (ranks of different groups number their modules separately), then by rank.
_Files = dict[tuple[int, tuple[int, ...]], dict[int, list[CapturedTensors]]]


def saved_gradients(path: Path, step: int) -> list[SavedGradients]:
    """One entry per attempt and module; RunNotFound if nothing was saved at that step."""
    by_attempt: dict[str, _Files] = {}
    steps: set[int] = set()
    # Oldest first, so attempts are in order.
    for file in sorted((path / FOLDER).glob("*.safetensors"), key=_age):
        match = _FILE.fullmatch(file.name)
        if match is None:
            continue
        steps.add(int(match["step"]))
        if int(match["step"]) == step:
            tensors = CapturedTensors(file)
            if tensors.entries():
                modules = by_attempt.setdefault(match["start"] or "", {})
                key = (int(match["module"]), _ranks(tensors.note("group")))
                modules.setdefault(key, {}).setdefault(int(match["rank"]), []).append(tensors)
    if not by_attempt:
        available = ", ".join(map(str, sorted(steps)[:10]))
        hint = f"saved steps: {available}" if steps else "run the job with --save-gradients"
        raise RunNotFound(f"{path} has no saved gradients of step {step} ({hint}).")
    return [
        replace(_module(step, module, group, files), attempt=number, attempts=len(by_attempt))
        for number, modules in enumerate(by_attempt.values())
        for (module, group), files in sorted(modules.items())
    ]


def _age(file: Path) -> tuple[int, str]:
    return file.stat().st_mtime_ns, file.name


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in text.split(",") if rank.isdecimal())


def _module(
    step: int, module: int, group: tuple[int, ...], by_rank: Mapping[int, list[CapturedTensors]]
) -> SavedGradients:
    names: dict[str, tuple[str, tuple[int, ...]]] = {}
    for files in by_rank.values():
        for file in files:
            for key, dtype, shape in file.entries():
                names.setdefault(key.partition("/")[2], (_DTYPES.get(dtype, dtype), tuple(shape)))
    missing = tuple(rank for rank in group if rank not in by_rank)
    size = len(by_rank) + len(missing)
    parameters = tuple(_parameter(name, *kind, by_rank, size) for name, kind in names.items())
    return SavedGradients(step, module, tuple(sorted(by_rank)), parameters, missing)


def _parameter(
    name: str, dtype: str, shape: tuple[int, ...], by_rank: Mapping[int, list[CapturedTensors]], size: int
) -> SavedParameter:
    raw = {
        part: {
            rank: data
            for rank, files in by_rank.items()
            if (data := b"".join(file.read(f"{part}/{name}") for file in files))
        }
        for part in ("local", "reduced", "before", "after")
    }
    stages = {part: {rank: _stage(data, dtype) for rank, data in rows.items()} for part, rows in raw.items()}
    return SavedParameter(
        name=name,
        dtype=dtype,
        shape=shape,
        local=stages["local"],
        reduced=stages["reduced"],
        before=stages["before"],
        after=stages["after"],
        reduced_equal=len(set(raw["reduced"].values())) <= 1,
        off_mean=_deviation_from_mean(raw["local"], raw["reduced"], size, dtype),
    )


def _numbers(data: bytes, dtype: str, most: int | None = None) -> Iterable[Any]:
    size = element_size(dtype)
    end = len(data) if most is None else min(len(data), most * size)
    return (value(data[offset : offset + size], dtype) for offset in range(0, end, size))


def _stage(data: bytes, dtype: str) -> SavedStage:
    numbers = [x for x in _numbers(data, dtype, MOST_ELEMENTS) if isinstance(x, (int, float))]
    norm = math.hypot(*numbers) if all(map(math.isfinite, numbers)) else math.nan
    return SavedStage(norm, tuple(_numbers(data, dtype, SHOWN)))


def _deviation_from_mean(
    local: Mapping[int, bytes], reduced: Mapping[int, bytes], ranks: int, dtype: str
) -> float | None:
    """The largest deviation of any rank. None if a rank's tensor is missing or truncated, or cannot be added."""
    if len(local) < ranks or not reduced or dtype not in ("float64", "float32", "float16", "bfloat16"):
        return None
    length = len(next(iter(local.values())))
    if length % element_size(dtype) or any(
        len(data) != length for data in (*local.values(), *reduced.values())
    ):
        return None
    worst = 0.0
    for result in set(reduced.values()):
        columns = [_numbers(data, dtype, MOST_ELEMENTS) for data in (*local.values(), result)]
        for *row, reduced_value in zip(*columns, strict=True):
            if not all(map(math.isfinite, (*row, reduced_value))):
                return None
            # Divide each term: the sum of very large numbers may overflow.
            worst = max(worst, abs(math.fsum(x / ranks for x in row) - reduced_value))
    return worst
