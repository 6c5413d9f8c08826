"""The sentence at the head of a report."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Check, Report, Verdict
from ddpcheck.reports.verdict import verdict_sentence

AGREE = Check("parameters after each step", 480, "agree")
DIFFER = Check("parameters after each step", 480, "differ")
SKIPPED = Check("parameters after each step", 0, "not checked")
PARTED = Finding("DDP201", Severity.ERROR, "Parameters diverged", "", step=3, ranks=(2,))
AT_WRAPPING = Finding("DDP103", Severity.ERROR, "Parameters stand in another order", "", ranks=(0, 1))
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
    ("said", "expected"),
    [
        (sentence(Verdict.OK), "Replicas agree: 4 ranks, 120 steps"),
        (sentence(Verdict.OK, (NOTE,)), "Replicas agree: 4 ranks, 120 steps"),
        (
            sentence(Verdict.OK, run={"parameters": 1, "every": 10}, steps=1),
            "Replicas agree: 4 ranks, 1 step, 1 parameter checked after every 10 steps",
        ),
        (
            sentence(Verdict.OK, check=SKIPPED, world_size=1),
            "Nothing wrong was found, but nothing could be compared across ranks: 1 rank, 120 steps",
        ),
        (
            sentence(Verdict.FINDINGS, (NOTE, DIED, PARTED), DIFFER),
            "Replicas part at step 3: parameters diverged (rank 2)",
        ),
        (
            sentence(Verdict.FINDINGS, (AT_WRAPPING,), DIFFER),
            "Replicas part at wrapping: parameters stand in another order (ranks 0-1)",
        ),
        (sentence(Verdict.FINDINGS, (WARNING,)), "Replicas agree, but NaN somewhere"),
        (
            sentence(Verdict.FINDINGS, (DIED, WARNING), SKIPPED),
            "Something is wrong: a rank died (rank 1), and 1 more finding",
        ),
        (
            sentence(Verdict.FAILED, exit_code=3),
            "The command failed with status 3, 4 ranks, 120 steps; "
            "the replicas agreed as far as they were recorded",
        ),
        (
            sentence(Verdict.FAILED, (DIED,), exit_code=-9),
            "The command was ended by SIGKILL, 4 ranks, 120 steps: a rank died",
        ),
        (
            sentence(Verdict.FAILED, (PARTED,), DIFFER, exit_code=143),
            "Replicas part at step 3: parameters diverged (rank 2); the command was ended by SIGTERM",
        ),
        (
            sentence(Verdict.INCOMPLETE, (MISSING,), SKIPPED),
            "Too little was recorded to say whether the replicas agree: no rank reported",
        ),
    ],
)
def test_sentence(said: str, expected: str) -> None:
    assert said == expected
