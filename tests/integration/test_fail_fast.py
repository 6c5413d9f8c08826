"""`--fail-fast` stops a job where its ranks diverge; `--fail-on` sets the severity that fails a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, WatchedRun, run_watched

pytestmark = pytest.mark.slow

FORKED = JOBS / "forked.py"
LONG = ("--steps", "200", "--pause", "0.02")
DIVERGES_AT = 30


def steps_of(done: WatchedRun, rank: int) -> list[dict[str, Any]]:
    return [r for r in done.records(rank) if r["kind"] == "digest" and r["stage"] == "params"]


def first_divergence(done: WatchedRun) -> int:
    """By the records: the first step at which applied gradients or parameters differ."""
    roots = [
        {(r["step"], r.get("stage", "applied")): r["root"] for r in done.records(rank) if _is_compared(r)}
        for rank in (0, 1)
    ]
    return min(at for at in roots[0].keys() & roots[1].keys() if roots[0][at] != roots[1][at])[0]


def _is_compared(record: dict[str, Any]) -> bool:
    """Not digests of buffers, which are numbered by synchronisation, nor those before wrapping, which may differ."""
    digest = record["kind"] == "digest" and record["stage"] in ("rewritten", "params")
    return digest or record["kind"] == "applied"


def processes_with(mark: str) -> list[str]:
    """Processes that have this word in their command line."""
    results = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            results += [folder.name] if mark.encode() in words else []
    return results


@pytest.mark.parametrize(("fault", "fail_on"), [("--diverge-at", "never"), ("--alone-from", "error")])
def test_a_diverging_job_is_stopped_within_a_step(
    ddpcheck: RunWatched, tmp_path: Path, fault: str, fail_on: str
) -> None:
    """A write on one rank, or training without the wrapper, where ranks no longer wait for each other.

    The status says that ddpcheck stopped the job, whatever `--fail-on` is.
    """
    job = prepared(FORKED, *LONG, "--mark", tmp_path, fault, DIVERGES_AT)
    done = ddpcheck(*job, options=["--fail-fast", "--fail-on", fail_on])
    assert done.status == 10, str(done)
    assert done.report["verdict"] == "findings"
    assert "DDP602" not in done.codes()
    assert "error" in {finding["severity"] for finding in done.report["findings"]}
    assert first_divergence(done) == DIVERGES_AT
    # A rank that is ahead learns of the divergence when the others reach that step, and a rank that knows of it waits.
    # With steps of equal length, no rank gets further than the next step.
    assert max(record["step"] for rank in (0, 1) for record in steps_of(done, rank)) <= DIVERGES_AT + 1
    assert done.report["steps"] <= DIVERGES_AT + 2
    assert processes_with(str(tmp_path)) == []
    [attempt] = done.report["attempts"]
    assert [row["pid"] for row in attempt["ranks"] if Path("/proc", str(row["pid"])).exists()] == []


def test_a_healthy_job_is_not_stopped(ddpcheck: RunWatched, unwatched: Run) -> None:
    alone = unwatched(*prepared(FORKED, "--steps", "60"))
    done = ddpcheck(*prepared(FORKED, "--steps", "60"), options=["--fail-fast"])
    assert (done.status, done.stdout) == (0, alone.stdout), str(done)
    assert done.report["verdict"] == "ok"
    assert done.codes() == []


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """A job that diverges, without --fail-fast."""
    job = prepared(FORKED, "--steps", "40", "--diverge-at", "10")
    return run_watched(job, tmp_path_factory.mktemp("diverged"))


def test_without_fail_fast_a_diverging_job_runs_to_its_end(diverged: WatchedRun) -> None:
    assert diverged.status == 10, str(diverged)
    assert diverged.report["steps"] == 40
    assert diverged.report["verdict"] == "findings"


# Writes the records of an earlier run again, without torch.
REPLAY = """
import glob, json, os, shutil, sys
for file in glob.glob(sys.argv[1] + "/rank-*.jsonl"):
    shutil.copy(file, json.loads(os.environ["DDPCHECK_CONFIG"])["run_dir"])
"""


@pytest.mark.parametrize(("fail_on", "status"), [("error", 10), ("warning", 10), ("never", 0)])
def test_fail_on_sets_the_status_but_not_the_verdict(
    ddpcheck: RunWatched, diverged: WatchedRun, fail_on: str, status: int
) -> None:
    done = ddpcheck(sys.executable, "-c", REPLAY, diverged.folder, options=["--fail-on", fail_on])
    assert done.status == status, str(done)
    assert done.report["verdict"] == "findings"
    assert done.codes("error") == diverged.codes("error")
