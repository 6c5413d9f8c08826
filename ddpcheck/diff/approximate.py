"""Comparison within rounding error, for runs that cannot be bitwise equal, such as on another number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ddpcheck.diff.model import FOLLOWING_STEPS, ORDER, DifferenceGrowth, DiffSource, FirstDifference, Value
from ddpcheck.diff.record_diff import (
    ComparedRank,
    DiffEvent,
    Key,
    RecordDiff,
    Timeline,
    approximate_norm,
    compare,
)
from ddpcheck.diff.run_input import RunInput, RunStep, RunSummary, run_steps
from ddpcheck.records.codecs import Packed
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.modules import ModuleRecord


def compare_initial_parameters(a: RunInput, b: RunInput, modules: int) -> tuple[list[FirstDifference], int]:
    """Compare the first rank of each run after wrapping. Returns divergences and the number of comparisons."""
    starts = [_starts(run, modules) for run in (a, b)]
    divergences: list[FirstDifference] = []
    compared = 0
    for key, event in starts[0].items():
        other = starts[1].get(key)
        for outcome in compare(event, other, ComparedRank(a.first_rank)) if other is not None else ():
            compared += 1
            if outcome.differ:
                divergences.append(_divergence(event, outcome, a.first_rank))
    return divergences, compared


def _divergence(event: DiffEvent, outcome: RecordDiff, rank: int) -> FirstDifference:
    names = outcome.names or ()
    return FirstDifference(
        step=-1,
        stage=DiffSource.INIT,
        module=event.module,
        parameter=names[0] if names else None,
        differing=len(names),
        tensors=len(event.names),
        ranks=(rank,),
        message="",
        values=(outcome.values or {}).get(names[0], ()) if names else outcome.values_without_name,
    )


def _starts(run: RunInput, modules: int) -> dict[Key, DiffEvent]:
    events: dict[Key, DiffEvent] = {}
    for event in Timeline(run.records(run.first_rank)):
        record = event.record
        if isinstance(record, DigestRecord) and record.stage == Stage.INIT_AFTER.value:
            events[event.key] = event
        if len({start.module for start in events.values()}) == modules and event.step >= 0:
            break
    return events


# Unit roundoff of the formats in which gradients are computed.
_ROUNDOFF = {
    "float64": 2.0**-53,
    "complex128": 2.0**-53,
    "float32": 2.0**-24,
    "complex64": 2.0**-24,
    "float16": 2.0**-11,
    "complex32": 2.0**-11,
    "bfloat16": 2.0**-8,
}
# Rounding errors that a gradient may accumulate in one step. Sums and depth need some dozens. The rest is for units
# at a threshold, where one rounding switches a ReLU and the gradient jumps, and for autocast to bfloat16, which is
# not recorded: for float32 this is one rounding of bfloat16. docs/diff.md lists the values of measured jobs.
_ROUNDINGS = 2.0**16
# Records hold sketches in steps of 2**-26 norms, whatever the dtype.
_RESOLUTION = 2.0**-20
# Upper bound of the tolerance, for runs of any length.
LARGEST = 0.1
# A difference that exceeds the previous one by this factor is sudden; it did not grow.
SUDDEN = 30.0
# Precision of a ratio of two gradients that only float32 rounded.
EXACTLY = 1e-4
_MOST_VALUES = 64


class Tolerance:
    """The relative difference that is allowed at a step."""

    def __init__(self, fixed: float | None, dtypes: Iterable[str], half: bool) -> None:
        """`fixed` is the user's tolerance; `half`: a GradScaler is used, so gradients are computed in fp16."""
        self._fixed = fixed
        roundoffs = [_ROUNDOFF.get(dtype, 2.0**-8) for dtype in dtypes] + [2.0**-11] * half
        # Tolerance added by each step.
        self._per_step = max(_RESOLUTION, _ROUNDINGS * max(roundoffs, default=2.0**-24))

    @property
    def roughly(self) -> float:
        """Tolerance for the ratio of two gradients, independent of the user's."""
        return min(LARGEST, self._per_step)

    def at(self, step: int) -> float:
        """Grows with the step, because every step adds rounding errors."""
        if self._fixed is not None:
            return self._fixed
        return min(LARGEST, self._per_step * (step + 1))


class Ratio(NamedTuple):
    """B / A, and the quantity of the job that it equals, if any."""

    value: float
    meaning: str

    def __str__(self) -> str:
        number = f"{self.value:.1f}" if float(self.value).is_integer() else f"{self.value:.6g}"
        return number + (f" (= {self.meaning})" if self.meaning else "")


def common_ratio(pairs: Sequence[tuple[Packed, Packed]], slack: float) -> float | None:
    """The common factor between all gradients of B and A within `slack`; None if there is none."""
    known = [(a, b) for a, b in pairs if a.known and b.known]
    squares = math.fsum(a.value**2 for a, _ in known)
    if not squares or len(known) < len(pairs):
        return None
    ratio = math.fsum(a.value * b.value for a, b in known) / squares
    if not ratio:
        return None
    for a, b in known:
        allowed = slack * max(abs(ratio) * a.norm, b.norm) + abs(ratio) * a.error + b.error
        fits = b.norm_low <= abs(ratio) * a.norm * (1 + slack) and abs(ratio) * a.norm_low <= b.norm * (
            1 + slack
        )
        if abs(b.value - ratio * a.value) > allowed or not fits:
            return None
    return ratio


def explain_ratio(ratio: float, quantities: Mapping[str, float], slack: float) -> Ratio:
    """`ratio` with the quantity of the job that it, or its inverse, equals; else rounded to a small integer."""
    size = abs(ratio)
    for name, quantity in quantities.items():
        if quantity <= 1:
            continue
        if _equal(size, quantity, slack):
            return Ratio(math.copysign(quantity, ratio), name)
        if _equal(size, 1 / quantity, slack):
            return Ratio(math.copysign(1 / quantity, ratio), f"1 / {name}")
    for integer in range(1 if ratio < 0 else 2, 65):
        if _equal(size, integer, slack):
            return Ratio(math.copysign(integer, ratio), "")
        if _equal(size, 1 / integer, slack):
            return Ratio(math.copysign(1 / integer, ratio), "")
    return Ratio(ratio, "")


def ratio_of(a: object, b: object) -> float | None:
    """b / a, if both are finite and not zero."""
    if isinstance(a, bool) or isinstance(b, bool):
        return None
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)) or not a or not b:
        return None
    return b / a if math.isfinite(a) and math.isfinite(b) else None


def _equal(a: float, b: float, slack: float) -> bool:
    return abs(a - b) <= slack * b


@dataclass
class RoundingResult:
    """All divergences in order, and the relative difference of the gradients at each step."""

    divergences: list[FirstDifference] = field(default_factory=list)
    growth: list[DifferenceGrowth] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    common: int = -1


def compare_within_rounding(
    a: RunInput, b: RunInput, summaries: tuple[RunSummary, RunSummary], rtol: float | None
) -> RoundingResult:
    """Compare module by module, in the order of wrapping."""
    result = RoundingResult()
    if a.algorithms() == b.algorithms():
        result.divergences, compared = compare_initial_parameters(a, b, len(summaries[0].modules))
        result.compared[DiffSource.INIT.value] = compared
    half = summaries[0].scaled or summaries[1].scaled
    for one, other in zip(summaries[0].modules.values(), summaries[1].modules.values(), strict=True):
        dtypes = {str(row[1]) for row in (*one.parameters, *other.parameters)}
        comparison = _ModuleComparison(one, other, Tolerance(rtol, dtypes, half))
        comparison.compare(run_steps(a, one), run_steps(b, other))
        result.divergences += comparison.divergences
        result.growth += comparison.growth
        result.compared.update(comparison.compared)
        result.common = max(result.common, comparison.common)
    result.divergences.sort(
        key=lambda divergence: (divergence.step, ORDER[divergence.stage], divergence.module)
    )
    return result


class _ModuleComparison:
    """Comparison of one module in both runs."""

    def __init__(self, a: ModuleRecord, b: ModuleRecord, tolerance: Tolerance) -> None:
        self.divergences: list[FirstDifference] = []
        self.growth: list[DifferenceGrowth] = []
        self.compared: Counter[str] = Counter()
        self.common = -1
        self._module = a.module
        self._names = [str(row[0]) for row in a.parameters]
        self._groups = (a.group, b.group)
        self._tolerance = tolerance
        # The last step in which each stage was equal.
        self._agreed: dict[DiffSource, int] = {}

    def compare(self, a: Iterator[RunStep], b: Iterator[RunStep]) -> None:
        for one, other in _paired(a, b):
            self.common = one.step
            first = min((divergence.step for divergence in self.divergences), default=None)
            reported = first is None or one.step <= first + FOLLOWING_STEPS
            for where, divergence in (
                (DiffSource.REWRITTEN, self._rewritten(one, other)),
                (DiffSource.REDUCED, self._gradients(one, other)),
                (DiffSource.HYPER, self._hyper(one, other)),
            ):
                if divergence is not None and reported:
                    self.divergences.append(replace(divergence, agreed_until=self._agreed.get(where)))
                elif first is None:
                    self._agreed[where] = one.step

    def _rewritten(self, a: RunStep, b: RunStep) -> FirstDifference | None:
        wrote = [any(rank.rewritten for rank in step.ranks.values()) for step in (a, b)]
        if wrote[0] == wrote[1]:
            return None
        which = "A" if wrote[0] else "B"
        text = f"parameters were written before this step in run {which} only"
        return self._divergence(a, DiffSource.REWRITTEN, text)

    def _gradients(self, a: RunStep, b: RunStep) -> FirstDifference | None:
        names = [name for name in self._names if name in a.reduced and name in b.reduced]
        if not names:
            return None
        self.compared[DiffSource.REDUCED.value] += 1
        distances = {name: _distance(a, b, name) for name in names}
        size = math.hypot(*(max(a.size(name), b.size(name)) for name in names))
        relative = math.hypot(*distances.values()) / size if size else 0.0
        before = self.growth[-1] if self.growth else None
        allowed = self._tolerance.at(a.step)
        self.growth.append(DifferenceGrowth(a.step, self._module, relative, allowed))
        if relative <= allowed:
            return None
        off = [name for name in names if distances[name] > allowed * size / math.sqrt(len(names))]
        off.sort(key=lambda name: -distances[name])
        return self._gradient_divergence(a, b, off or names[:1], len(names), relative, before)

    def _gradient_divergence(
        self,
        a: RunStep,
        b: RunStep,
        off: list[str],
        count: int,
        relative: float,
        before: DifferenceGrowth | None,
    ) -> FirstDifference:
        ratio = self._ratio(a, b, off)
        sudden = before is None or relative > SUDDEN * before.relative
        worst = off[0]
        values = [
            Value(
                "reduced norm, about", approximate_norm(a.reduced[worst]), approximate_norm(b.reduced[worst])
            ),
            Value("reduced sketch", a.reduced[worst].value, b.reduced[worst].value),
        ]
        ranks = sorted(a.local.get(worst, {}).keys() | b.local.get(worst, {}).keys())
        for rank in ranks:
            norms = [_norm(step, worst, rank) for step in (a, b)]
            values.append(Value("local norm, about", norms[0], norms[1], rank))
        if ratio is not None:
            text = f"gradient norm ratio {ratio} in {len(off)} of {count} parameters"
        elif math.isinf(relative):
            text = "gradients are not finite in one run only"
        else:
            text = f"gradients differ by {relative:.2g} of their size"
            if before is not None and not sudden:
                text += f", after {before.relative:.2g} at step {before.step}"
            else:
                text += ", suddenly"
        return replace(
            self._divergence(a, DiffSource.REDUCED, text),
            parameter=worst,
            differing=len(off),
            tensors=count,
            values=tuple(values[:_MOST_VALUES]),
            ratio=None if ratio is None else ratio.value,
            sudden=sudden,
        )

    def _ratio(self, a: RunStep, b: RunStep, off: list[str]) -> Ratio | None:
        # With few parameters any ratio may be a coincidence: report only known quantities and integers.
        few = len(off) < 3
        slack = EXACTLY if few else max(EXACTLY, self._tolerance.roughly)
        ratio = common_ratio([(a.reduced[name], b.reduced[name]) for name in off], slack)
        if ratio is None:
            return None
        explained = explain_ratio(ratio, self._quantities(a, b), slack)
        simple = explained.meaning or explained.value.is_integer() or (1 / explained.value).is_integer()
        return explained if simple or not few else None

    def _quantities(self, a: RunStep, b: RunStep) -> dict[str, float]:
        """Quantities of the two jobs by which a loss may be multiplied or divided."""
        sizes = [len(group) for group in self._groups]
        rows = [step.rows() for step in (a, b)]
        forwards = [max((rank.forwards for rank in step.ranks.values()), default=0) for step in (a, b)]
        quantities: dict[str, float] = {}
        if sizes[0] != sizes[1]:
            larger, smaller = max(sizes), min(sizes)
            quantities["world size" if smaller == 1 else "ratio of the world sizes"] = larger / smaller
        if all(rows) and rows[0] != rows[1]:
            quantities["ratio of the global batches"] = max(rows) / min(rows)
        if all(forwards) and forwards[0] != forwards[1]:
            quantities["ratio of the forwards per step"] = max(forwards) / min(forwards)
        shares = [total / size for total, size in zip(rows, sizes, strict=True)]
        for name, both in (
            ("world size", sizes),
            ("forwards per step", forwards),
            ("global batch", rows),
            ("batch of a rank", shares),
        ):
            if both[0] == both[1]:
                quantities[name] = both[0]
            else:
                quantities |= {f"{name} of run {which}": size for which, size in zip("AB", both, strict=True)}
        return quantities

    def _hyper(self, a: RunStep, b: RunStep) -> FirstDifference | None:
        sides = [step.ranks[min(step.ranks)].hyper for step in (a, b)]
        both = sorted(sides[0].keys() & sides[1].keys())
        self.compared[DiffSource.HYPER.value] += bool(both)
        values = [
            Value(name, value, sides[1][optimizer][name])
            for optimizer in both
            for name, value in sides[0][optimizer].items()
            if name in sides[1][optimizer] and value != sides[1][optimizer][name]
        ]
        if not values:
            return None
        text = ", ".join(self._changed(value, a, b) for value in values[:3])
        return replace(self._divergence(a, DiffSource.HYPER, text), values=tuple(values[:_MOST_VALUES]))

    def _changed(self, value: Value, a: RunStep, b: RunStep) -> str:
        text = f"{value.what} is {value.a} in run A and {value.b} in run B"
        ratio = ratio_of(value.a, value.b)
        explained = explain_ratio(ratio, self._quantities(a, b), 1e-6) if ratio is not None else None
        return f"{text}, ratio {explained}" if explained is not None and explained.meaning else text

    def _divergence(self, step: RunStep, where: DiffSource, text: str) -> FirstDifference:
        ranks = tuple(sorted({rank for group in self._groups for rank in group}))
        return FirstDifference(step.step, where, self._module, None, 0, len(self._names), ranks, text)


def _norm(step: RunStep, name: str, rank: int) -> float | None:
    """None if the run does not have the rank."""
    sketches = step.local.get(name, {})
    return approximate_norm(sketches[rank]) if rank in sketches else None


def _distance(a: RunStep, b: RunStep, name: str) -> float:
    """Lower bound of the difference of two sketches; infinite if only one is finite."""
    one, other = a.reduced[name], b.reduced[name]
    if not one.known or not other.known:
        return 0.0 if one.known == other.known else math.inf
    return max(0.0, abs(one.value - other.value) - one.error - other.error)


def _paired(a: Iterator[RunStep], b: Iterator[RunStep]) -> Iterator[tuple[RunStep, RunStep]]:
    """Pairs of equal steps."""
    one, other = next(a, None), next(b, None)
    while one is not None and other is not None:
        if one.step == other.step:
            yield one, other
            one, other = next(a, None), next(b, None)
        elif one.step < other.step:
            one = next(a, None)
        else:
            other = next(b, None)
