"""Compares the parameters that two runs start from, to the bit: rounding has not begun yet."""

from __future__ import annotations

from ddpcheck.diff.events import DiffEvent, Key, Timeline
from ddpcheck.diff.model import DiffSource, FirstDifference
from ddpcheck.diff.record_diff import DiffLocation, RecordDiff, compare
from ddpcheck.diff.run_input import RunInput
from ddpcheck.records.kinds.digests import DigestRecord, Stage


def compare_starts(a: RunInput, b: RunInput, modules: int) -> tuple[list[FirstDifference], int]:
    """What the first rank of each run held after wrapping: partings, and how many comparisons were made."""
    starts = [_starts(side, modules) for side in (a, b)]
    partings: list[FirstDifference] = []
    compared = 0
    for key, moment in starts[0].items():
        other = starts[1].get(key)
        for outcome in compare(moment, other, DiffLocation(a.first_rank)) if other is not None else ():
            compared += 1
            if outcome.differ:
                partings.append(_parting(moment, outcome, a.first_rank))
    return partings, compared


def _parting(moment: DiffEvent, outcome: RecordDiff, rank: int) -> FirstDifference:
    names = outcome.names or ()
    return FirstDifference(
        step=-1,
        stage=DiffSource.INIT,
        module=moment.module,
        parameter=names[0] if names else None,
        differing=len(names),
        tensors=len(moment.names),
        ranks=(rank,),
        message="",
        values=(outcome.values or {}).get(names[0], ()) if names else outcome.said,
    )


def _starts(side: RunInput, modules: int) -> dict[Key, DiffEvent]:
    found: dict[Key, DiffEvent] = {}
    for moment in Timeline(side.records(side.first_rank)):
        record = moment.record
        if isinstance(record, DigestRecord) and record.stage == Stage.INIT_AFTER.value:
            found[moment.key] = moment
        if len({start.module for start in found.values()}) == modules and moment.step >= 0:
            break
    return found
