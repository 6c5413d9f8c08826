"""Jobs that hang are ended and explained; jobs that are merely slow are left alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import FAULTS, JOBS
from tests.helpers.watched_run import RunWatched, WatchedRun, records_in

pytestmark = pytest.mark.slow

HANGS = JOBS / "hangs.py"
# Short, so that the tests are; `hangs.LONG` is three times as long.
OPTIONS = ("--hang-timeout", "3")
SLOW = (
    "slow_first_step",
    "slow_evaluation",
    "sleeping_loader",
    "waits_for_a_process",
    "waits_for_a_thread",
    "stopped",
    "writes_for_long",
    "idle_without_ddp",
)


def hung(ddpcheck: RunWatched, job: str) -> tuple[WatchedRun, dict[str, Any]]:
    done = ddpcheck(sys.executable, HANGS, job, options=OPTIONS)
    assert done.status == 10, str(done)
    assert done.report["verdict"] == "findings"
    assert done.codes("error", "warning") == ["DDP603"], str(done)
    return done, dict(done.finding("DDP603"))


def standing(finding: dict[str, Any], rank: int) -> dict[str, Any]:
    [found] = [each for each in finding["evidence"]["standings"] if rank in each["ranks"]]
    return dict(found)


@pytest.mark.parametrize(
    ("script", "cause", "step", "stage", "ranks", "waits_in"),
    [
        (
            "early_stop_on_some_ranks.py:2",
            "early stop on some ranks: rank 1 left the training loop after step 5",
            6,
            "reduced",
            [1],
            ["the AllReduce of a backward", "barrier"],
        ),
        (
            "evaluation_on_rank_0_only.py:2",
            "evaluation through the wrapper on rank 0 only",
            4,
            "buffers",
            [0],
            ["the broadcast of buffers in DDP's forward", "barrier"],
        ),
        (
            "variants/barrier_on_some_ranks.py:3",
            "a collective that only some ranks reach",
            3,
            "reduced",
            [2],
            ["barrier", "barrier", "the AllReduce of a backward"],
        ),
    ],
)
def test_a_hang_and_its_cause(
    ddpcheck: RunWatched,
    script: str,
    cause: str,
    step: int,
    stage: str,
    ranks: list[int],
    waits_in: list[str],
) -> None:
    done, finding = hung(ddpcheck, str(FAULTS / script))
    assert finding["cause"].startswith(cause)
    assert (finding["step"], finding["stage"], finding["ranks"]) == (step, stage, ranks)
    assert [standing(finding, rank)["waits_in"] for rank in range(len(waits_in))] == waits_in
    for rank in range(len(waits_in)):
        stack = standing(finding, rank)["stack"]
        assert any(Path(script.partition(":")[0]).name in call for call in stack)
        # What ddpcheck itself put between the calls is nobody's business.
        assert not any("/ddpcheck/agent/" in call for call in stack)
    assert "where they stand" in done.stderr
    assert done.report["attempts"][0]["ranks"][0]["status"] == "stopped"


def test_a_rank_that_closed_its_group(ddpcheck: RunWatched) -> None:
    _, finding = hung(ddpcheck, "left_the_group")
    assert finding["ranks"] == [1]
    assert "rank 1 left the training loop after step 3" in finding["cause"]
    assert standing(finding, 1)["left"]


def test_a_lock_that_is_never_given_back(ddpcheck: RunWatched) -> None:
    _, finding = hung(ddpcheck, "lock_never_given_back")
    assert finding["ranks"] == [1]
    assert "rank 1 never reaches the collective that the others wait in" in finding["cause"]
    assert standing(finding, 1)["stack"][0].endswith("in lock_never_given_back")


def test_native_code_that_holds_the_interpreter(ddpcheck: RunWatched) -> None:
    _, finding = hung(ddpcheck, "native_code_holds_the_interpreter")
    assert finding["ranks"] == [1]
    assert standing(finding, 1)["stack"] == []


def test_slow_jobs_are_left_alone(ddpcheck: RunWatched) -> None:
    """All at once: each is a job of its own in the same run."""
    done = ddpcheck(sys.executable, HANGS, *SLOW, options=OPTIONS)
    assert done.status == 0, str(done)
    assert done.codes("error", "warning") == [], str(done)
    assert len(done.report["attempts"]) == len(SLOW)
    # They were looked at, so that it says something that they were left alone.
    notes = [record for path in done.folder.glob("node-*.jsonl") for record in records_in(path)]
    assert len({note["session"] for note in notes if note["kind"] == "slow"}) >= len(SLOW) - 2
    assert not [note for note in notes if note["kind"] in ("hang", "stop")]


def test_a_torchrun_job(ddpcheck: RunWatched) -> None:
    script = FAULTS / "early_stop_on_some_ranks.py"
    done = ddpcheck("torchrun", "--nproc-per-node", "2", script, options=("--hang-timeout", "5"))
    assert done.status == 10, str(done)
    assert done.codes("error", "warning") == ["DDP603"]
    assert done.finding("DDP603")["ranks"] == [1]


def test_switched_off_there_is_no_thread_and_no_question(ddpcheck: RunWatched, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import json, threading, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(json.dumps([thread.name for thread in threading.enumerate()]))\n"
    )
    for options, listens in (((), True), (("--hang-timeout", "0"), False)):
        out = tmp_path / f"run-{listens}"
        done = ddpcheck("torchrun", "--nproc-per-node", "1", job, options=options, out=out)
        assert done.status == 0, str(done)
        assert ("ddpcheck-standing" in json.loads(done.stdout)) == listens
