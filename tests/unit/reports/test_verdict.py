"""The verdict in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Check, Report, Verdict
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.reports.verdict import verdict_sentence
from tests.helpers.sample_reports import stored

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


WRAPPED = Check("parameters after wrapping", 1, "agree")
GAP = Coverage(
    False, "not_compared", trained=12, compared=6, not_compared={"no_module": 6}, compared_steps=120
)
NOT_COMPARED = Finding(
    "DDP606",
    Severity.ERROR,
    "Trained parameters were not compared",
    "6 of 12 trained parameters were not compared across ranks: they are in no DDP module. More.",
)
PROBE_LOST = Finding("DDP605", Severity.WARNING, "ddpcheck disabled one of its probes", "")
SHARDED = Finding(
    "DDP206", Severity.ERROR, "Optimizers differ across ranks", "", step=3, evidence={"replicas_agree": True}
)


def sentence(
    verdict: Verdict,
    findings: tuple[Finding, ...] = (),
    check: Check = AGREE,
    hyper: str = "agree",
    **fields: Any,
) -> str:
    plain: dict[str, Any] = {"world_size": 4, "steps": 120, "exit_code": 0, "run": {}}
    checks = (check, Check("optimizer hyperparameters, scale and step counts", check.compared, hyper))
    return verdict_sentence(
        Report(verdict, command=(), findings=findings, attempts=(), checks=checks, **{**plain, **fields})
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
            "One rank, nothing to compare: 1 rank, 120 steps",
        ),
        (
            sentence(Verdict.OK, check=SKIPPED, steps=0),
            "No findings, and nothing was trained that could be compared across ranks: 4 ranks, 0 steps",
        ),
        (
            sentence(Verdict.OK, check=WRAPPED, steps=0, coverage=Coverage(True)),
            "Replicas agree after wrapping, and no training step was seen: 4 ranks, 0 steps",
        ),
        (
            sentence(
                Verdict.OK,
                run={"parameters": 6},
                coverage=Coverage(True, not_compared={"ignored": 2}, compared_steps=120),
            ),
            "Replicas agree: 4 ranks, 120 steps, 6 parameters compared after every step; not compared: 2 ignored by "
            "DDP on request",
        ),
        (
            sentence(Verdict.OK, (NOTE,), check=AGREE, hyper="differ"),
            "Replicas agree: 4 ranks, 120 steps",
        ),
        (
            sentence(Verdict.INCOMPLETE, (WARNING, NOT_COMPARED), coverage=GAP),
            "6 of 12 trained parameters were not compared across ranks: they are in no DDP module (4 ranks, 120 steps)",
        ),
        (
            sentence(Verdict.INCOMPLETE, (PROBE_LOST,), coverage=GAP),
            "Not enough was recorded to compare the replicas: ddpcheck disabled one of its probes",
        ),
        (
            sentence(Verdict.FINDINGS, (WARNING,), coverage=GAP),
            "NaN somewhere (DDP999)",
        ),
        (
            sentence(Verdict.FINDINGS, (SHARDED,)),
            "Optimizers differ across ranks (DDP206); replicas agree",
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


def test_the_headline_of_a_rule_opens_the_verdict() -> None:
    text = "Rank 2 is a straggler: it costs 19.5 ms per step. Data loading takes 25 ms."
    finding = Finding("DDP402", Severity.WARNING, "A straggler", text, stage="data", ranks=(2,))
    report = replace(stored("1-sound"), verdict=Verdict.FINDINGS, findings=(finding,))
    assert verdict_sentence(report) == "Rank 2 is a straggler: it costs 19.5 ms per step"
