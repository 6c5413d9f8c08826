"""DDP401: exposed communication, and similar runs that are correct."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.node_notes import NodeNotes
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.rules.performance.ddp401 import find
from ddpcheck.rules.rule import rules
from tests.helpers.overlap_builder import overlap


def findings_of(profiled: Overlap | None) -> list[Finding]:
    return find(RuleContext(Attempt("a"), 0, Path(), NodeNotes(), (), 0, overlap=profiled))


def reason(profiled: Overlap | None) -> str:
    [rule] = [rule for rule in rules() if rule.code == "DDP401"]
    return rule.withheld(RuleContext(Attempt("a"), 0, Path(), NodeNotes(), (), 0, overlap=profiled))


def test_a_quarter_of_the_step() -> None:
    [finding] = findings_of(overlap())
    assert (finding.code, finding.severity, finding.step) == ("DDP401", Severity.WARNING, 5)
    assert "25.0 ms of a 100.0 ms step (25%)" in finding.message
    assert "takes another 5.0 ms" in finding.message
    assert finding.evidence["exposed_share"] == 0.25
    assert finding.evidence["bytes_a_step"] == 2 * (4 << 20)


def test_enough_compute_that_comes_too_early() -> None:
    [finding] = findings_of(overlap(compute_ms=180))
    assert "start too late" in finding.cause


def test_more_to_transfer_than_to_compute() -> None:
    [finding] = findings_of(overlap(compute_ms=60))
    assert "longer than the compute" in finding.cause


@pytest.mark.parametrize(
    "profiled",
    [
        None,
        # Too few steps.
        overlap((40, 40)),
        # Too little of the step.
        overlap((19, 19, 19)),
        # One step without it: not the rule of this job.
        overlap((60, 60, 5)),
        # Noise of a busy machine: a short transfer that was held up twice.
        overlap((60, 40, 4), took_ms=30),
        # Too short to matter.
        overlap((4, 4, 4), took_ms=8),
        # Nothing could be read, or one rank alone.
        replace(overlap(), ranks=(), steps=()),
    ],
)
def test_silent(profiled: Overlap | None) -> None:
    assert findings_of(profiled) == []


def test_a_machine_that_is_too_busy_is_inconclusive() -> None:
    profiled = overlap()
    busy = tuple(replace(rank, held_up_ns=20_000_000) for rank in profiled.ranks)
    assert findings_of(replace(profiled, ranks=busy)) == []
    assert "oversubscribed" in reason(replace(profiled, ranks=busy))
    assert "2 profiled steps" in reason(replace(profiled, steps=profiled.steps[:2]))
    assert reason(profiled) == reason(None) == ""
    a_little = tuple(replace(rank, held_up_ns=15_000_000) for rank in profiled.ranks)
    assert len(findings_of(replace(profiled, ranks=a_little))) == 1


def test_waiting_for_a_late_rank_is_not_transfer() -> None:
    profiled = overlap((2, 2, 2))
    waits = tuple(replace(step, exposed_wait_ns=60_000_000) for step in profiled.steps)
    assert findings_of(replace(profiled, steps=waits)) == []
