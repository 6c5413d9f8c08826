"""Flaws of torch at the end of a job are distinguished from failures of the job before it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.corpus.exit_flaw import ABORTED, Frame, main_stacks, was_torch_s_own
from tests.corpus.header import Header
from tests.corpus.jobs import Job, Outcome, ask_for_stacks, failed_by_torch

SCRIPT = """import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()

main()
"""
# As torch 2.13 left it when a worker of gloo outlived the interpreter.
AT_EXIT = """terminate called without an active exception
Fatal Python error: Aborted

Thread 0x00007f92407ecb80 (most recent call first):
  <no Python frame>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
# As the same says of a process that waits in its script, here with a thread of ddpcheck's beside it.
STANDING = """Fatal Python error: Aborted

Thread 0x00007f1111111111 (most recent call first):
  File "/x/ddpcheck/agent/writer.py", line 99 in _take
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2222222222 (most recent call first):
{frames}

Extension modules: torch._C (total: 1)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def standing(*frames: tuple[str, int]) -> str:
    lines = [f'  File "/any/where/{file}", line {line} in f' for file, line in frames]
    return STANDING.format(frames="\n".join(lines))


def test_an_abort_as_the_interpreter_goes_down(script: Path) -> None:
    assert was_torch_s_own(script, ["Warning: x\n" + AT_EXIT], stopped=False)


def test_an_abort_that_says_nothing_of_the_kind(script: Path) -> None:
    assert not was_torch_s_own(script, [AT_EXIT.replace(ABORTED, "what(): broken")], stopped=False)
    assert not was_torch_s_own(script, [ABORTED], stopped=False)


def test_an_abort_in_mid_training(script: Path) -> None:
    assert not was_torch_s_own(script, [ABORTED, standing(("job.py", 5), ("job.py", 8))], stopped=False)


@pytest.mark.parametrize(
    ("frames", "at_end"),
    [
        ([], True),
        # As `main` returns, its DDP module goes.
        ([("job.py", 6), ("job.py", 8)], True),
        ([("job.py", 8)], True),
        # Still inside the call that leaves the group, or before it.
        ([("distributed_c10d.py", 2184), ("job.py", 6), ("job.py", 8)], False),
        ([("job.py", 5), ("job.py", 8)], False),
        ([("reducer.py", 9)], False),
    ],
)
def test_where_a_job_stands_that_never_ends(
    script: Path, frames: list[tuple[str, int]], at_end: bool
) -> None:
    assert was_torch_s_own(script, [standing(*frames)], stopped=True) is at_end


def test_every_rank_must_stand_there(script: Path) -> None:
    elsewhere = standing(("distributed_c10d.py", 100), ("job.py", 5))
    assert not was_torch_s_own(script, [AT_EXIT, elsewhere], stopped=True)
    assert was_torch_s_own(script, [AT_EXIT + standing(("resource_tracker.py", 3))], stopped=True)
    assert not was_torch_s_own(script, ["no stack at all"], stopped=True)


def test_a_script_that_keeps_its_group(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("main()\n")
    assert not was_torch_s_own(path, [standing(("job.py", 1))], stopped=True)


def test_the_main_thread_is_the_one_that_counts() -> None:
    assert list(main_stacks(standing(("a.py", 3)) + AT_EXIT)) == [[Frame("/any/where/a.py", 3)], []]


def test_only_jobs_that_should_have_ended_well_are_run_again(script: Path) -> None:
    header = Header(path=script, title="", expect="DDP202", ranks=(2,), launcher="torchrun")
    aborted = Outcome(Job(header, 2), status=1, stderr=(AT_EXIT,))
    assert failed_by_torch(aborted)
    assert failed_by_torch(replace(aborted, status=None, stopped=(0, 1)))
    assert not failed_by_torch(replace(aborted, status=10))
    for change in ({"launcher": "fork"}, {"hangs": True}, {"fails": True}):
        other = replace(header, **change)  # type: ignore[arg-type]
        assert not failed_by_torch(replace(aborted, job=Job(other, 2)))


WAITING = "import sys, time; print(1, flush=True); time.sleep(300)"
LAUNCHER = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", sys.argv[1]]) for _ in range(3)]
for rank in ranks:
    rank.wait()
    for other in ranks:
        other.kill()
"""


def test_all_ranks_say_where_they_stand_though_their_launcher_would_end_them() -> None:
    command: Sequence[str] = [sys.executable, "-c", LAUNCHER, WAITING]
    around = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", around, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(0.2)
        ask_for_stacks(process.pid)
        _, stderr = process.communicate(timeout=200)
    assert list(main_stacks(stderr)) == [[Frame("<string>", 1)]] * 3
