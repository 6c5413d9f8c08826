"""Bitwise comparison of the initial parameters of two runs."""

from __future__ import annotations

from ddpcheck.diff.events import DiffEvent, Key, Timeline
from ddpcheck.diff.model import DiffSource, FirstDifference
from ddpcheck.diff.record_diff import ComparedRank, RecordDiff, compare
from ddpcheck.diff.run_input import RunInput
from ddpcheck.records.kinds.digests import DigestRecord, Stage


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
