"""Collects how each rank computes its loss, and finds where ranks weight the same loss differently."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.records.kinds.state import LossFormRecord, LossSettingsRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# A difference that ends earlier may come from ranks that change their loss one after the other.
_FEWEST_STEPS = 4
_Record = TypeVar("_Record", LossFormRecord, LossSettingsRecord)


@dataclass(frozen=True)
class LossDifference:
    """Ranks that compute the same functions, with another reduction or another factor."""

    optimizer: int
    step: int
    # The term, and by rank its reduction and its factor.
    function: str
    reductions: Mapping[int, str]
    factors: Mapping[int, float]
    where: Mapping[int, str]

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks with equal losses, the largest group first."""
        texts = {rank: f"{self.reductions[rank]} {factor:.6g}" for rank, factor in self.factors.items()}
        return [ranks for _, ranks in groups_of(texts)]


@dataclass(frozen=True)
class LossSettingDifference:
    """Ranks that compute the same functions, with another argument."""

    optimizer: int
    step: int
    function: str
    setting: str
    # By rank.
    values: Mapping[int, Any]
    where: Mapping[int, str]

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks with equal values, the largest group first."""
        return [ranks for _, ranks in groups_of({rank: repr(value) for rank, value in self.values.items()})]


class LossFormCollector(Collector):
    """A rank writes a bounded number of records."""

    def __init__(self, attempt: Attempt) -> None:
        # By optimizer and rank.
        self._forms: dict[int, dict[int, list[LossFormRecord]]] = {}
        self._settings: dict[int, dict[int, list[LossSettingsRecord]]] = {}

    @collects(LossFormRecord)
    def add(self, rank: RankData, record: LossFormRecord) -> None:
        self._forms.setdefault(record.optimizer, {}).setdefault(rank.number, []).append(record)

    @collects(LossSettingsRecord)
    def add_settings(self, rank: RankData, record: LossSettingsRecord) -> None:
        self._settings.setdefault(record.optimizer, {}).setdefault(rank.number, []).append(record)

    def setting_differences(self) -> list[LossSettingDifference]:
        """The first one of each optimizer."""
        differences = (
            _first_setting(optimizer, by_rank) for optimizer, by_rank in sorted(self._settings.items())
        )
        return [difference for difference in differences if difference is not None]

    def weights_per_sample(self, counts: Mapping[int, int]) -> dict[int, float]:
        """By rank, the weight of a sample in a loss of one mean or sum over `counts`; only of ranks that are known."""
        factors = {}
        for by_rank in self._forms.values():
            for rank, records in by_rank.items():
                last = records[-1]
                if rank in counts and not last.last and last.reductions in (["mean"], ["sum"]):
                    factors[rank] = last.factors[0] / (counts[rank] if last.reductions == ["mean"] else 1)
        return factors

    def differences(self) -> list[LossDifference]:
        """The first one of each optimizer."""
        differences = (
            _first_difference(optimizer, by_rank) for optimizer, by_rank in sorted(self._forms.items())
        )
        return [difference for difference in differences if difference is not None]


def _first_difference(optimizer: int, by_rank: Mapping[int, list[LossFormRecord]]) -> LossDifference | None:
    for step, forms in _comparable(by_rank):
        for term, function in enumerate(next(iter(forms.values())).functions):
            difference = LossDifference(
                optimizer,
                step,
                function,
                {rank: form.reductions[term] for rank, form in forms.items()},
                {rank: form.factors[term] for rank, form in forms.items()},
                {rank: form.where for rank, form in forms.items()},
            )
            if len(difference.groups()) > 1:
                return difference
    return None


def _first_setting(
    optimizer: int, by_rank: Mapping[int, list[LossSettingsRecord]]
) -> LossSettingDifference | None:
    for step, forms in _comparable(by_rank):
        for term, function in enumerate(next(iter(forms.values())).functions):
            settings = {rank: form.settings[term] for rank, form in forms.items()}
            # What could not be read on some rank is not compared.
            for name in dict.fromkeys(name for values in settings.values() for name in values):
                if not all(name in values for values in settings.values()):
                    continue
                difference = LossSettingDifference(
                    optimizer,
                    step,
                    function,
                    name,
                    {rank: values[name] for rank, values in settings.items()},
                    {rank: form.where for rank, form in forms.items()},
                )
                if len(difference.groups()) > 1:
                    return difference
    return None


def _comparable(by_rank: Mapping[int, list[_Record]]) -> Iterator[tuple[int, dict[int, _Record]]]:
    """Steps, and the forms of ranks that compute the same functions from there on."""
    steps: list[int] = sorted({record.step for records in by_rank.values() for record in records})
    for step, following in zip(steps, [*steps[1:], math.inf], strict=True):
        if following - step < _FEWEST_STEPS:
            continue
        forms = {rank: form for rank, records in sorted(by_rank.items()) if (form := _at(records, step))}
        if len(forms) >= 2 and len({tuple(form.functions) for form in forms.values()}) == 1:
            yield step, forms


def _at(records: list[_Record], step: int) -> _Record | None:
    """The form at a step; None if it was not the same in several steps, or is not known."""
    before = [record for record in records if record.step <= step]
    if not before or not before[-1].functions or (before[-1].last and before[-1].step < step):
        return None
    return before[-1]
