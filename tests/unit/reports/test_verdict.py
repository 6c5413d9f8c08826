"""The verdict in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Check, Report, Verdict
from ddpcheck.analysis.timing.model import Straggler
from ddpcheck.reports.verdict import verdict_sentence
from tests.helpers.sample_measurements import measurements
from tests.helpers.sample_reports import stored, with_parts

AGREE = Check("parameters after each step", 480, "agree")
DIFFER = Check("parameters after each step", 480, "differ")
SKIPPED = Check("parameters after each step", 0, "not checked")
DIVERGED = Finding(
    "DDP201", Severity.ERROR, "Parameters diverged", "", step=3, parameter="layers.3.weight", ranks=(2,)
)
AT_WRAPPING = Finding("DDP103", Severity.ERROR, "Parameters are in another order", "", ranks=(0, 1))
DIED = Finding("DDP602", Severity.ERROR, "A rank died", "", ranks=(1,))
MISSING = Finding("DDP601", Severity.ERROR, "No rank reported", "")
WARNING = Finding("DDP999", Severity.WARNING, "NaN somewhere", "")
NOTE = Finding("DDP102", Severity.NOTE, "Parameters differed before the broadcast", "")


def sentence(
    verdict: Verdict, findings: tuple[Finding, ...] = (), check: Check = AGREE, **fields: Any
) -> str:
    plain: dict[str, Any] = {"world_size": 4, "steps": 120, "exit_code": 0, "run": {}}
    return verdict_sentence(
        Report(verdict, command=(), findings=findings, attempts=(), checks=(check,), **{**plain, **fields})
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (sentence(Verdict.OK), "Replicas agree: 4 ranks, 120 steps"),
        (sentence(Verdict.OK, (NOTE,)), "Replicas agree: 4 ranks, 120 steps"),
        (
            sentence(Verdict.OK, run={"parameters": 1, "every": 10}, steps=1),
            "Replicas agree: 4 ranks, 1 step, 1 parameter compared after every 10 steps",
        ),
        (
            sentence(Verdict.OK, check=SKIPPED, world_size=1),
            "No findings, but nothing could be compared across ranks: 1 rank, 120 steps",
        ),
        (
            sentence(Verdict.FINDINGS, (NOTE, DIED, DIVERGED), DIFFER),
            "Replicas diverge at step 3 in layers.3.weight (DDP201)",
        ),
        (
            sentence(Verdict.FINDINGS, (AT_WRAPPING,), DIFFER),
            "Replicas diverge at wrapping (DDP103)",
        ),
        (sentence(Verdict.FINDINGS, (WARNING,)), "NaN somewhere (DDP999); replicas agree"),
        (
            sentence(Verdict.FINDINGS, (DIED, WARNING), SKIPPED),
            "A rank died (rank 1, DDP602), and 1 more finding",
        ),
        (
            sentence(Verdict.FAILED, exit_code=3),
            "The command failed with status 3 (4 ranks, 120 steps); replicas agree in all recorded steps",
        ),
        (
            sentence(Verdict.FAILED, (DIED,), exit_code=-9),
            "The command was ended by SIGKILL (4 ranks, 120 steps): a rank died",
        ),
        (
            sentence(Verdict.FAILED, (DIVERGED,), DIFFER, exit_code=143),
            "Replicas diverge at step 3 in layers.3.weight (DDP201); the command was ended by SIGTERM",
        ),
        (
            sentence(Verdict.INCOMPLETE, (MISSING,), SKIPPED),
            "Not enough was recorded to compare the replicas: no rank reported",
        ),
    ],
)
def test_sentence(text: str, expected: str) -> None:
    assert text == expected


def test_a_straggler_is_named_with_its_cost() -> None:
    report = with_parts(stored("1-sound"), {"time": measurements(late=2)["time"]})
    [table] = report.time
    late = Straggler((2,), 19_500, 0.3, "data", 25_000, 5_500, {}, 97)
    finding = Finding("DDP402", Severity.WARNING, "A straggler", "", stage="data", ranks=(2,))
    report = replace(
        report, verdict=Verdict.FINDINGS, time=(replace(table, straggler=late),), findings=(finding,)
    )
    assert verdict_sentence(report) == "Rank 2 is a straggler: it costs 19.5 ms per step"
