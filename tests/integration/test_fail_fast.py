"""`--fail-fast` ends a job where its ranks part; `--fail-on` decides what a finding is worth."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, WatchedRun

pytestmark = pytest.mark.slow

FORKED = JOBS / "forked.py"
LONG = ("--steps", "200", "--pause", "0.02")
PARTING = 30


def steps_of(done: WatchedRun, rank: int) -> list[dict[str, Any]]:
    return [r for r in done.records(rank) if r["kind"] == "digest" and r["stage"] == "params"]


def first_parting(done: WatchedRun) -> int:
    """By the records themselves: the first step at which what is applied, or what comes of it, differs."""
    roots = [
        {(r["step"], r.get("stage", "applied")): r["root"] for r in done.records(rank) if _counts(r)}
        for rank in (0, 1)
    ]
    return min(at for at in roots[0].keys() & roots[1].keys() if roots[0][at] != roots[1][at])[0]


def _counts(record: dict[str, Any]) -> bool:
    """Buffers count synchronisations, and before wrapping ranks may differ."""
    digest = record["kind"] == "digest" and record["stage"] in ("rewritten", "params")
    return digest or record["kind"] == "applied"


def left_running(marker: str) -> list[str]:
    """Processes that still carry a word of the job's command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found += [folder.name] if marker.encode() in words else []
    return found


@pytest.mark.parametrize("how", ["--diverge-at", "--alone-from"])
def test_a_parting_job_is_stopped_within_a_step(ddpcheck: RunWatched, tmp_path: Path, how: str) -> None:
    """Written to on one rank, or trained without the wrapper: there ranks no longer wait for each other."""
    began = time.monotonic()
    job = (sys.executable, FORKED, *LONG, "--mark", tmp_path)
    done = ddpcheck(*job, how, PARTING, options=["--fail-fast"])
    assert done.status == 10, str(done)
    assert time.monotonic() - began < 60
    assert done.report["verdict"] == "findings"
    assert "DDP602" not in done.codes()
    assert "error" in {finding["severity"] for finding in done.report["findings"]}
    parting = first_parting(done)
    assert parting == PARTING
    # A rank that is ahead learns of it when the others arrive there, and every rank holds still once it
    # knows: with steps of one length on all ranks nobody gets further than the next.
    assert max(record["step"] for rank in (0, 1) for record in steps_of(done, rank)) <= parting + 1
    assert left_running(str(tmp_path)) == []


def test_a_healthy_job_is_left_alone(ddpcheck: RunWatched, unwatched: Run) -> None:
    alone = unwatched(sys.executable, FORKED, "--steps", "60")
    done = ddpcheck(sys.executable, FORKED, "--steps", "60", options=["--fail-fast"])
    assert (done.status, done.stdout) == (0, alone.stdout), str(done)
    assert done.report["verdict"] == "ok"
    assert done.codes() == []


def test_without_it_a_parting_job_runs_to_its_end(ddpcheck: RunWatched) -> None:
    done = ddpcheck(sys.executable, FORKED, "--steps", "40", "--diverge-at", "10")
    assert done.status == 10, str(done)
    assert done.report["steps"] == 40
    assert done.report["verdict"] == "findings"


@pytest.mark.parametrize(("fail_on", "status"), [("error", 10), ("warning", 10), ("never", 0)])
def test_what_a_finding_is_worth(ddpcheck: RunWatched, fail_on: str, status: int) -> None:
    done = ddpcheck(
        sys.executable, FORKED, "--steps", "10", "--diverge-at", "5", options=["--fail-on", fail_on]
    )
    assert done.status == status, str(done)
    # The verdict is about the job, whatever it is worth to whom.
    assert done.report["verdict"] == "findings"


def test_never_with_fail_fast_still_stops(ddpcheck: RunWatched, tmp_path: Path) -> None:
    options = ["--fail-fast", "--fail-on", "never"]
    job = (sys.executable, FORKED, *LONG, "--mark", tmp_path)
    done = ddpcheck(*job, "--diverge-at", PARTING, options=options)
    assert done.status == 10, str(done)
    assert done.report["steps"] <= PARTING + 2
    assert left_running(str(tmp_path)) == []
