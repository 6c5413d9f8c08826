"""Verdicts on corpus jobs: each point alone makes a miss, and a job that was not watched proves nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.header import NOTHING, Header
from tests.corpus.jobs import Job, Outcome, batches, jobs_of
from tests.corpus.verdict import judge

FAULT = Header(
    path=Path("examples/faults/bypass.py"),
    title="",
    expect="DDP202",
    ranks=(2,),
    cause="Wrapper bypassed",
    stage="applied",
    step=2,
    outliers=(0, 1),
    parameter="net.0.*",
)
SOUND = Header(path=Path("examples/healthy/plain.py"), title="", expect=NOTHING, ranks=(2,))


def finding(**changes: Any) -> dict[str, Any]:
    return {
        "code": "DDP202",
        "severity": "error",
        "message": "Gradients were applied unreduced.",
        "cause": "wrapper bypassed",
        "stage": "applied",
        "step": 2,
        "ranks": [0, 1],
        "parameter": "net.0.weight",
        **changes,
    }


def outcome(header: Header, *findings: dict[str, Any], **changes: Any) -> Outcome:
    done = Outcome(
        Job(header, 2), exits=(0, 0), status=10, findings=findings, reported=("finished", "finished")
    )
    return replace(done, **changes)


def test_a_fault_found_as_expected() -> None:
    verdict = judge(outcome(FAULT, finding(), finding(code="DDP102", severity="note")))
    assert verdict.passed
    assert (verdict.code, verdict.cause, verdict.step, verdict.ranks) == (True, True, True, True)
    assert verdict.found == ("DDP202",)


@pytest.mark.parametrize(
    ("change", "point", "miss"),
    [
        ({"cause": "no_sync open"}, "cause", "cause: expected 'Wrapper bypassed', found 'no_sync open'"),
        ({"step": 3}, "step", "step: expected 2, found 3"),
        ({"step": None}, "step", "step: expected 2, found -1"),
        ({"ranks": [1]}, "ranks", "ranks: expected [0, 1], found [1]"),
        ({"stage": "params"}, "", "stage: expected 'applied', found 'params'"),
        ({"parameter": "net.1.weight"}, "", "parameter: expected 'net.0.*', found 'net.1.weight'"),
        ({"parameter": None}, "", "parameter: expected 'net.0.*', found None"),
    ],
)
def test_one_point_is_wrong(change: dict[str, Any], point: str, miss: str) -> None:
    verdict = judge(outcome(FAULT, finding(**change)))
    assert verdict.misses == (miss,)
    wrong = [name for name in ("code", "cause", "step", "ranks") if not getattr(verdict, name)]
    assert wrong == ([point] if point else [])


def test_a_cause_in_the_message_counts() -> None:
    assert judge(outcome(FAULT, finding(cause="", message="the WRAPPER bypassed"))).passed


@pytest.mark.parametrize(
    ("found", "miss"),
    [
        ([], "expected DDP202, found nothing"),
        ([finding(severity="note")], "expected DDP202, found nothing"),
        ([finding(code="DDP201")], "expected DDP202, found DDP201"),
        ([finding(), finding()], "expected DDP202, found DDP202 DDP202"),
        (
            [finding(), finding(code="DDP301", severity="warning")],
            "expected DDP202, found DDP202 DDP301",
        ),
        ([finding(), finding(code="DDP605", severity="note")], "expected DDP202, found DDP202 DDP605"),
    ],
)
def test_other_findings_than_expected(found: list[dict[str, Any]], miss: str) -> None:
    verdict = judge(outcome(FAULT, *found))
    assert verdict.misses == (miss,)
    assert not verdict.code


def test_a_fault_that_gives_a_note() -> None:
    noted = replace(FAULT, note=True)
    assert judge(outcome(noted, finding(severity="note"))).passed
    assert judge(outcome(noted)).misses == ("expected DDP202, found nothing",)
    assert judge(outcome(noted, finding())).misses == ("severity: expected 'note', found 'error'",)
    also = finding(code="DDP301", severity="warning")
    assert not judge(outcome(noted, finding(severity="note"), also)).passed
    # What is to be a warning must not come as a note, even where notes of that code count.
    own = replace(FAULT, expect="DDP605")
    assert judge(outcome(own, finding(code="DDP605", severity="note"))).misses == (
        "severity: expected 'warning or error', found 'note'",
    )


def test_ranks_that_nobody_watched_are_what_some_faults_are_about() -> None:
    nobody = replace(FAULT, expect="DDP601")
    assert judge(outcome(nobody, finding(code="DDP601"), reported=())).passed


def test_what_is_expected_besides_must_be_there() -> None:
    both = replace(FAULT, also=("DDP602",))
    assert judge(outcome(both, finding(), finding(code="DDP602"))).passed
    assert judge(outcome(both, finding())).misses == ("expected DDP202 DDP602, found DDP202",)


def test_a_sound_job() -> None:
    assert judge(outcome(SOUND, finding(severity="note"), status=0)).passed
    assert judge(outcome(SOUND, finding())).misses == ("DDP202: Gradients were applied unreduced.",)


@pytest.mark.parametrize(
    ("change", "miss"),
    [
        ({"reported": ()}, "no rank reported to ddpcheck"),
        ({"reported": ("finished",)}, "1 ranks reported"),
        ({"reported": ("finished", "died")}, "ranks ended as finished, died"),
        (
            {"exits": (0, 1), "stderr": ("", "x\nboom\n")},
            "the job failed: exit statuses [0, 1] (boom)",
        ),
        ({"stopped": (1,)}, "the job failed: exit statuses [0, 0]"),
        ({"status": 3}, "the command ended with status 3"),
        ({"trouble": "ddpcheck left no report.json"}, "ddpcheck left no report.json"),
    ],
)
def test_a_job_that_did_not_go_well(change: dict[str, Any], miss: str) -> None:
    assert judge(outcome(SOUND, **change)).misses == (miss,)


def test_a_job_that_is_to_fail() -> None:
    fails = replace(FAULT, fails=True)
    assert judge(outcome(fails, finding(), exits=(0, -9), status=1)).passed
    assert judge(outcome(fails, finding())).misses == ("the job did not fail",)


def test_a_job_that_is_to_hang() -> None:
    hangs = replace(FAULT, hangs=True)
    assert judge(outcome(hangs, finding(), exits=(), status=10)).passed
    assert judge(outcome(hangs, finding(), exits=(), status=0)).misses == (
        "ddpcheck run ended with status 0",
    )
    still_there = "the job was still there when the corpus stopped it"
    assert judge(outcome(hangs, finding(), exits=(-15, -15), stopped=(0, 1), status=10)).misses == (
        still_there,
    )
    assert judge(outcome(hangs, finding(), exits=(), status=None)).misses == (still_there,)


def test_jobs_of_a_family_and_their_batches() -> None:
    family = replace(SOUND, ranks=(1, 2), cases=("a", "b"))
    jobs = [*jobs_of(family), *jobs_of(replace(FAULT, launcher="torchrun"))]
    assert [job.name for job in jobs] == [
        "healthy/plain a x1",
        "healthy/plain a x2",
        "healthy/plain b x1",
        "healthy/plain b x2",
        "faults/bypass x2",
    ]
    assert [[job.name for job in batch] for batch in batches(jobs, 3)] == [
        ["faults/bypass x2"],
        ["healthy/plain a x1", "healthy/plain b x1"],
        ["healthy/plain a x2", "healthy/plain b x2"],
    ]


def test_options_failures_and_hangs_need_a_command_of_their_own_only_when_watched() -> None:
    for header in (replace(FAULT, fails=True), replace(FAULT, hangs=True), replace(FAULT, options=("-q",))):
        [job] = jobs_of(header)
        assert job.alone()
        assert not job.alone(watched=False)


def test_stacks_of_ranks_that_hung_are_among_the_misses() -> None:
    hung = outcome(FAULT, finding(), exits=(-15, -15), stopped=(0, 1), stacks=("line 42 in run", ""))
    [miss] = judge(hung).misses
    assert "line 42 in run" in miss
    assert "rank 1" not in miss
