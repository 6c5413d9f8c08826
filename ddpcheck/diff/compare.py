"""From two run folders to a finished comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddpcheck.diff.approximate import RoundingResult, compare_within_rounding
from ddpcheck.diff.causes import cause_of, of_the_split
from ddpcheck.diff.environment_diff import suspects
from ddpcheck.diff.exact import compare_exactly
from ddpcheck.diff.model import (
    AFTERMATH,
    Comparison,
    DifferenceGrowth,
    DiffSource,
    DiffVerdict,
    FirstDifference,
    Method,
    RunSide,
)
from ddpcheck.diff.run_input import RunInput, RunSummary, check_models, outline, read_side
from ddpcheck.diff.run_steps import run_steps
from ddpcheck.errors import NotComparable
from ddpcheck.formatting import name_ranks

# A run of many thousands of steps is drawn by so many of them.
MOST_GROWTH = 200
_MOST_THEN = 20


def compare_runs(
    path_a: Path,
    path_b: Path,
    rtol: float | None = None,
    attempts: tuple[int | None, int | None] = (None, None),
) -> Comparison:
    """To the bit where that can be asked for, else, or where `rtol` is given, within rounding."""
    a, b = read_side("A", path_a, attempts[0]), read_side("B", path_b, attempts[1])
    outlines = outline(a), outline(b)
    check_models(*outlines)
    notes = _settings(a, b)
    why_not = _why_not_exact(a, b, outlines)
    if rtol is None and not why_not:
        return _exact(a, b, outlines, notes)
    if why_not:
        notes.append(why_not)
    return _rounding(a, b, outlines, rtol, notes)


def _exact(a: RunInput, b: RunInput, outlines: tuple[RunSummary, RunSummary], notes: list[str]) -> Comparison:
    result = compare_exactly(a, b)
    _need_common(result.compared, result.common, a, b)
    growth: list[DifferenceGrowth] = []
    if result.partings and result.partings[0].step >= 0 and _same_sketches(a, b):
        within = compare_within_rounding(a, b, outlines, None)
        growth = within.growth
        notes += _how_large(within)
        result.partings = _with_ratios(result.partings, within.partings)
    notes += _silent(a, b)
    return _comparison(Method.EXACT, a, b, outlines, result.partings, dict(result.compared), growth, notes)


def _with_ratios(partings: list[FirstDifference], within: list[FirstDifference]) -> list[FirstDifference]:
    """What the sizes of the gradients say, beside the bits."""
    told = {(one.module, one.step): one for one in within if one.stage is DiffSource.REDUCED}
    more = []
    for one in partings:
        size = told.get((one.module, one.step))
        wanted = one.stage is DiffSource.REDUCED or (one.stage is DiffSource.LOCAL and one is partings[0])
        if size is not None and wanted:
            one = replace(one, message=size.message, ratio=size.ratio, sudden=size.sudden)
        more.append(one)
    return more


def _silent(a: RunInput, b: RunInput) -> list[str]:
    """Ranks of which only one run has records, as after a kill before wrapping."""
    missing = [(side.label, sorted(set(range(side.world_size)) - side.headers.keys())) for side in (a, b)]
    return [f"Run {label} holds no records of {name_ranks(ranks)}." for label, ranks in missing if ranks]


def _rounding(
    a: RunInput, b: RunInput, outlines: tuple[RunSummary, RunSummary], rtol: float | None, notes: list[str]
) -> Comparison:
    if not _same_sketches(a, b):
        raise NotComparable(
            f"run A was recorded by ddpcheck {a.recorded_by} and run B by {b.recorded_by}: "
            "their sketches may differ, and digests need the same number of ranks and the same hash"
        )
    missing = [side.label for side, found in zip((a, b), outlines, strict=True) if not found.sketched]
    if missing:
        raise NotComparable(
            f"run {missing[0]} holds no sketches of gradients (was it made with --gradients off, or did it not come "
            "to a backward?), and digests alone cannot tell rounding from a difference"
        )
    result = compare_within_rounding(a, b, outlines, rtol)
    _need_common(result.compared, result.common, a, b)
    return _comparison(
        Method.ROUNDING, a, b, outlines, result.partings, dict(result.compared), result.growth, notes
    )


def _comparison(
    method: Method,
    a: RunInput,
    b: RunInput,
    outlines: tuple[RunSummary, RunSummary],
    partings: list[FirstDifference],
    compared: Mapping[str, int],
    growth: list[DifferenceGrowth],
    notes: list[str],
) -> Comparison:
    first = partings[0] if partings else None
    then = _news(partings)
    split = [] if first is None else of_the_split(outlines, _shares(a, b, outlines, max(0, first.step)))
    sides = [_run_side(side, found) for side, found in zip((a, b), outlines, strict=True)]
    if sides[0].steps != sides[1].steps:
        shorter = min(sides[0].steps, sides[1].steps)
        notes = [
            *notes,
            f"Run A took {sides[0].steps} steps and run B {sides[1].steps}: the first {shorter} were compared.",
        ]
    return Comparison(
        verdict=DiffVerdict.AGREE if first is None else DiffVerdict.PARTED,
        method=method,
        a=sides[0],
        b=sides[1],
        first=first,
        cause="" if first is None else cause_of(method, first, compared),
        then=tuple(then[:_MOST_THEN]),
        suspects=() if first is None else (*split, *suspects(a, b, outlines)),
        compared=dict(compared),
        growth=tuple(_thinned(growth)),
        notes=tuple(notes),
    )


def _news(partings: list[FirstDifference]) -> list[FirstDifference]:
    """What followed from the first parting: each stage where it was first touched, in the next few steps."""
    if not partings:
        return []
    first: dict[tuple[int, DiffSource], FirstDifference] = {}
    for parting in partings:
        if parting.step <= partings[0].step + AFTERMATH:
            first.setdefault((parting.module, parting.stage), parting)
    return list(first.values())[1:]


def _shares(
    a: RunInput, b: RunInput, outlines: tuple[RunSummary, RunSummary], step: int
) -> tuple[list[int], list[int]]:
    """How many rows each rank trained on in that step."""
    found: list[list[int]] = []
    for side, described in zip((a, b), outlines, strict=True):
        module = next(iter(described.modules.values()))
        taken = next((one for one in run_steps(side, module) if one.step >= step), None)
        found.append([taken.ranks[rank].rows for rank in sorted(taken.ranks)] if taken is not None else [])
    return found[0], found[1]


def _run_side(side: RunInput, found: RunSummary) -> RunSide:
    command = side.description.get("command")
    return RunSide(
        path=str(side.folder),
        attempt=side.attempt,
        world_size=side.world_size,
        steps=found.steps,
        torch=side.header().torch,
        device=side.header().device,
        command=tuple(map(str, command)) if isinstance(command, list) else (),
    )


def _why_not_exact(a: RunInput, b: RunInput, outlines: tuple[RunSummary, RunSummary]) -> str:
    if a.world_size != b.world_size:
        return (
            f"Run A has {a.world_size} and run B {b.world_size} ranks, so no two numbers need be equal to the bit: "
            "gradients were compared within rounding."
        )
    if {header.algorithm for header in a.headers.values()} != {h.algorithm for h in b.headers.values()}:
        return (
            "The runs hash tensors in different ways (xxhash is installed for one only, or devices differ): gradients "
            "were compared within rounding. DDPCHECK_HASH=multilinear makes digests comparable."
        )
    groups = [[module.group for module in found.modules.values()] for found in outlines]
    if groups[0] != groups[1]:
        return "The process groups are not the same in both runs: gradients were compared within rounding."
    return ""


def _settings(a: RunInput, b: RunInput) -> list[str]:
    every = [side.setting("every", 1) for side in (a, b)]
    if every[0] == every[1]:
        return []
    return [
        f"Run A was looked at every {every[0]} and run B every {every[1]} steps (--every): "
        "only steps that both looked at were compared."
    ]


def _same_sketches(a: RunInput, b: RunInput) -> bool:
    return a.recorded_by == b.recorded_by


def _need_common(compared: Mapping[str, int], common: int, a: RunInput, b: RunInput) -> None:
    if common >= 0 or compared:
        return
    every = [side.setting("every", 1) for side in (a, b)]
    why = f" (--every {every[0]} and {every[1]})" if every[0] != every[1] else ""
    raise NotComparable(
        f"the runs have no step in common that both looked at{why}: there is nothing to compare"
    )


def _how_large(within: RoundingResult) -> list[str]:
    """A difference in the bits may be no more than rounding: how far the gradients are apart tells."""
    if not within.growth:
        return []
    beyond = next((one for one in within.growth if one.beyond), None)
    if beyond is not None:
        return [
            f"Reduced gradients are further apart than rounding explains from step {beyond.step} on "
            f"({beyond.relative:.2g} of their size, {beyond.tolerance:.2g} allowed)."
        ]
    worst = max(within.growth, key=lambda one: one.relative)
    return [
        f"Reduced gradients stay as close as rounding keeps them: {worst.relative:.2g} of their size at most, "
        f"at step {worst.step}, where {worst.tolerance:.2g} is allowed."
    ]


def _thinned(growth: list[DifferenceGrowth]) -> list[DifferenceGrowth]:
    if len(growth) <= MOST_GROWTH:
        return growth
    stride = -(-len(growth) // MOST_GROWTH)
    return [*growth[:-1:stride], growth[-1]]
