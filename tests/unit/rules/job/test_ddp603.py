"""DDP603: ranks hang, where each one waits, and the likely mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.modules import ModuleRecord, OptimizerRecord
from ddpcheck.records.kinds.rank import StackRecord
from tests.helpers.run_builder import NAMES, RunBuilder
from tests.unit.analysis.hang.test_stacks import BACKWARD, BARRIER, BUFFERS, C10D, DDP, LOGGER, MAIN, USER

ALL_REDUCE = [[C10D, 3252, "all_reduce"], [LOGGER, 83, "wrapper"], USER, MAIN]
LOCKED = [["/home/me/train.py", 77, "main"], MAIN]
# The loop over epochs, and in it the one over batches.
EPOCHS, STEPS = ["/home/me/train.py", "main", 30, 50], ["/home/me/train.py", "main", 35, 44]
TIMED_OUT = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"
)


class Hung(RunBuilder):
    """A job that hangs after four steps."""

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        super().__init__(folder, world_size)
        self.states: dict[int, str] = {}
        self.silent: set[int] = set()
        self.details: dict[int, dict[str, Any]] = {}

    def with_stack(self, rank: int, frames: list[Any], state: str = "waits", **fields: Any) -> Hung:
        record = StackRecord(
            **{"look": 2, "time": 1.0, "frames": frames, "step": 4, "moment": "after_step", **fields}
        )
        self.add(rank, record)
        self.states[rank] = state
        return self

    def hang(self) -> Finding:
        ranks = {
            str(rank): {"state": state, "answered": rank not in self.silent, **self.details.get(rank, {})}
            for rank, state in self.states.items()
        }
        self.notes.append(
            {"kind": "hang", "time": 1.0, "session": self.session, "seconds": 300.4, "ranks": ranks}
        )
        self.notes.append({"kind": "stop", "time": 1.0, "reason": "hang"})
        self.description |= {"exit_code": 143, "stopped": "hang"}
        findings = [f for f in self.report().findings if f.severity.value != "note"]
        return next(f for f in findings if f.code == "DDP603")

    def timed_out(self, error: str = TIMED_OUT) -> list[Finding]:
        """The launcher saw no progress and did not stop the job; then rank 0 gave up."""
        rows = {
            str(rank): {"state": state, **self.details.get(rank, {})} for rank, state in self.states.items()
        }
        note = {"kind": "slow", "time": 2000.0, "session": self.session, "seconds": 300.4, "details": rows}
        self.notes.append(note)
        self.end([0], time=2100.0, error=error)
        self.exited(1, 2101.0, signal=15)
        self.description["exit_code"] = 1
        return [f for f in self.report().findings if f.severity.value != "note"]


TIMED_OUT = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"
)


@pytest.fixture
def job(tmp_path: Path) -> Hung:
    hung = Hung(tmp_path)
    hung.wrap().optimizer().train(4)
    return hung


def test_one_rank_left_the_loop_and_waits_elsewhere(job: Hung) -> None:
    job.with_stack(0, BACKWARD, moment="backward_begun", loops=[STEPS, EPOCHS])
    finding = job.with_stack(1, BARRIER, loops=[EPOCHS]).hang()
    assert (finding.severity.value, finding.step, finding.stage, finding.ranks) == (
        "error",
        4,
        "reduced",
        (1,),
    )
    assert finding.cause.startswith("early stop on some ranks: rank 1 left the training loop after step 3")
    assert finding.message == (
        "No rank made progress for 300 s, so ddpcheck stopped the job: rank 0 waits in the AllReduce of a backward "
        "in step 4 (/home/me/train.py:41); rank 1 waits in barrier after step 3 (/home/me/train.py:41)."
    )
    first = finding.evidence["standings"][0]
    assert (first["ranks"], first["step"], first["waits_in"]) == ([0], 4, "the AllReduce of a backward")
    assert first["stack"][-1] == "/home/me/train.py:60 in <module>"
    assert job.report().verdict.value == "findings"


def test_one_rank_closed_its_group(job: Hung) -> None:
    job.with_stack(0, BACKWARD, moment="backward_begun").with_stack(1, [USER], "left", left=True)
    finding = job.hang()
    assert finding.ranks == (1,)
    assert "early stop on some ranks" in finding.cause
    assert "rank 1 has ended after step 3" in finding.message


def test_one_rank_ended_while_the_other_waits_at_a_barrier(job: Hung) -> None:
    job.with_stack(0, BARRIER)
    job.states[1] = "left"
    job.end([1], time=0.5)
    finding = job.hang()
    assert (finding.ranks, finding.stage) == ((1,), None)
    assert "rank 1 ended after step 3 while rank 0 still waits" in finding.cause


def test_evaluation_through_the_wrapper(job: Hung) -> None:
    job.with_stack(0, BUFFERS).with_stack(1, BARRIER)
    finding = job.hang()
    assert (finding.step, finding.stage, finding.ranks) == (4, "buffers", (0,))
    assert finding.cause.startswith("evaluation through the wrapper on rank 0 only")
    assert "model.module" in finding.fix


def test_the_same_stack_in_a_training_forward_is_no_evaluation(job: Hung) -> None:
    job.with_stack(0, BUFFERS, moment="forward").with_stack(1, BARRIER)
    finding = job.hang()
    assert finding.ranks == (1,)
    assert "early stop" in finding.cause


def test_different_ignored_parameters(tmp_path: Path) -> None:
    job = Hung(tmp_path, 3)
    for rank in job.ranks:
        ignored = ["body.bias"] if rank == 2 else []
        names = [name for name in NAMES if name not in ignored]
        job.add(rank, ModuleRecord(0, "Net", [0, 1, 2], 0, job.rows(names), [], ignored))
        job.with_stack(rank, BARRIER if rank == 2 else BACKWARD, moment="backward_begun", step=0)
    finding = job.hang()
    assert (finding.ranks, finding.stage, finding.step) == ((2,), "reduced", 0)
    assert finding.cause == (
        "ranks have different ignored parameters: for example, body.bias is ignored on rank 2 only"
    )


def test_a_barrier_that_some_ranks_reach_in_the_middle_of_a_step(tmp_path: Path) -> None:
    job = Hung(tmp_path, 3)
    job.wrap().optimizer().train(4)
    job.with_stack(0, BARRIER, moment="buffers_synced").with_stack(1, BARRIER, moment="buffers_synced")
    finding = job.with_stack(2, BACKWARD, moment="backward_begun").hang()
    assert (finding.ranks, finding.stage) == ((2,), "reduced")
    assert "a collective that only some ranks reach" in finding.cause
    assert "ranks 0-1 wait in barrier in step 4" in finding.message
    assert [group["ranks"] for group in finding.evidence["standings"]] == [[0, 1], [2]]


def test_different_collectives_between_steps(job: Hung) -> None:
    finding = job.with_stack(0, BARRIER).with_stack(1, ALL_REDUCE).hang()
    assert finding.ranks == (0, 1)
    assert "a collective that only some ranks reach" in finding.cause


def test_a_rank_that_is_ahead_did_not_stop_early(job: Hung) -> None:
    finding = job.with_stack(0, BACKWARD, moment="backward_begun").with_stack(1, BARRIER, step=5).hang()
    assert "different steps" in finding.cause


def test_a_rank_that_is_blocked(job: Hung) -> None:
    finding = job.with_stack(0, BARRIER).with_stack(1, LOCKED, "still").hang()
    assert finding.ranks == (1,)
    assert "rank 1 never reaches the collective that the others wait in" in finding.cause
    assert "/home/me/train.py:77" in finding.cause


def test_a_rank_that_did_not_answer_has_no_stack(job: Hung) -> None:
    job.with_stack(0, BARRIER).with_stack(1, ALL_REDUCE, "still")
    job.silent.add(1)
    finding = job.hang()
    assert finding.ranks == (1,)
    assert "without a readable stack" in finding.message
    assert [g["stack"] for g in finding.evidence["standings"] if g["ranks"] == [1]] == [[]]


def test_all_ranks_at_the_same_line_after_different_collectives(tmp_path: Path) -> None:
    job = Hung(tmp_path, 3)
    job.wrap().optimizer().train(4)
    for rank in job.ranks:
        job.with_stack(rank, BARRIER, collectives={"0": 10 + (rank == 1)})
    finding = job.hang()
    assert finding.ranks == (1,)
    assert "rank 1: 11" in finding.cause


def test_a_job_that_was_only_slow_raises_nothing(job: Hung) -> None:
    job.with_stack(0, BACKWARD).with_stack(1, LOCKED)
    job.notes.append({"kind": "slow", "session": job.session, "seconds": 310.0, "ranks": {"1": "busy"}})
    assert job.end().findings() == []


def test_a_hang_of_another_attempt_is_not_this_ones(job: Hung) -> None:
    job.notes.append({"kind": "hang", "time": 1.0, "session": "other", "seconds": 300, "ranks": {}})
    assert job.end().findings() == []


def test_a_collective_of_its_own_in_the_training_loop(job: Hung) -> None:
    """No rank left the loop: one calls a barrier in it."""
    job.with_stack(0, BACKWARD, moment="backward_begun", loops=[STEPS, EPOCHS])
    finding = job.with_stack(1, BARRIER, loops=[STEPS, EPOCHS]).hang()
    assert finding.ranks == (1,)
    assert "a collective that only some ranks reach: rank 1 calls barrier" in finding.cause
    assert "left" not in finding.cause


def test_where_loops_are_not_known_both_are_possible(job: Hung) -> None:
    job.with_stack(0, BACKWARD, moment="backward_begun").with_stack(1, BARRIER)
    finding = job.hang()
    assert finding.ranks == (1,)
    assert "early stop on some ranks, or a collective that only they call" in finding.cause


def test_the_training_loop_is_the_one_with_the_step(job: Hung) -> None:
    """Rank 0 is in a loop over micro-batches, which rank 1 has left as in every step."""
    micro = ["/home/me/train.py", "main", 38, 41]
    for rank in job.ranks:
        job.add(rank, OptimizerRecord(0, "SGD", 0, [[0, 1, 2]], "/home/me/train.py:43"))
    job.with_stack(0, BACKWARD, moment="backward_begun", loops=[micro, STEPS, EPOCHS])
    finding = job.with_stack(1, BARRIER, loops=[STEPS, EPOCHS]).hang()
    assert "rank 1 calls barrier" in finding.cause


def test_a_lock_of_its_own_is_no_early_stop(job: Hung) -> None:
    job.with_stack(0, BACKWARD, moment="backward_begun", loops=[STEPS])
    finding = job.with_stack(1, LOCKED, "still", loops=[STEPS]).hang()
    assert finding.ranks == (1,)
    assert "blocked outside communication, at /home/me/train.py:77" in finding.cause


def test_a_file_lock_that_another_rank_holds(job: Hung) -> None:
    job.with_stack(0, BARRIER, loops=[STEPS]).with_stack(1, LOCKED, "locked", loops=[STEPS])
    job.details[1] = {
        "sleeps_in": "locks_lock_inode_wait",
        "lock_holder": 100,
        "lock_file": "/shared/cache.lock",
    }
    finding = job.hang()
    assert finding.ranks == (0,)
    assert "rank 1 waits for the lock of /shared/cache.lock, which rank 0 holds" in finding.cause
    assert "rank 1 waits for the lock of /shared/cache.lock in step 4" in finding.message


def test_a_worker_that_never_answers(job: Hung) -> None:
    job.with_stack(0, BACKWARD, moment="backward_begun")
    finding = job.with_stack(1, LOCKED, "loader", awaits=["loader", [777], []]).hang()
    assert finding.ranks == (1,)
    assert "a data-loader worker that never answers (process 777 of rank 1)" in finding.cause


def test_a_rank_that_polls_until_the_others_give_up(job: Hung) -> None:
    """The job was not stopped: the rank might have gone on. It is named, not the rank that raised the timeout."""
    job.with_stack(0, BARRIER).with_stack(1, LOCKED, "busy")
    job.details[1] = {"sleeps_in": "hrtimer_nanosleep"}
    [finding] = job.timed_out()
    assert (finding.code, finding.ranks, finding.severity.value) == ("DDP603", (1,), "error")
    assert "at /home/me/train.py:77, rank 1 sleeps between polls" in finding.cause
    assert "torch's own timeout ended the job" in finding.message


@pytest.mark.parametrize(
    ("error", "last_step"),
    [
        ("ValueError: x", 1600.0),  # not a timeout
        (TIMED_OUT, 1900.0),  # a step after the time without progress had begun
    ],
)
def test_a_time_without_progress_that_did_not_end_the_job(job: Hung, error: str, last_step: float) -> None:
    job.with_stack(0, BARRIER).with_stack(1, LOCKED, "busy")
    for rank, records in job.records.items():
        job.records[rank] = [
            replace(record, time=last_step) if isinstance(record, DigestRecord) else record
            for record in records
        ]
    assert [f.code for f in job.timed_out(error)] == ["DDP602"]


WRAPPING = [
    [C10D.replace("distributed_c10d", "utils"), 286, "_verify_param_shape_across_processes"],
    [DDP, 9, "__init__"],
]


def test_ddp_on_one_rank_only(tmp_path: Path) -> None:
    job = Hung(tmp_path)
    job.add(0, ModuleRecord(0, "Net", [0, 1], 0, job.rows(NAMES), []))
    finding = job.with_stack(0, [*WRAPPING, USER], step=0, moment="entering").with_stack(1, BARRIER).hang()
    assert finding.ranks == (0,)
    assert finding.cause.startswith("DDP is constructed on rank 0 only: rank 1 did not call its constructor")


def test_a_backward_around_the_wrapper_on_one_rank(job: Hung) -> None:
    """It stepped alone, and the others wait for it."""
    job.apply(4, last="unsynced", reason="wrapper_bypassed", ranks=[1])
    job.with_stack(0, BACKWARD, moment="backward_begun", loops=[STEPS])
    finding = job.with_stack(1, BARRIER, step=4, loops=[EPOCHS]).hang()
    assert (finding.ranks, finding.step) == ((1,), 4)
    assert "(wrapper bypassed)" in finding.cause


@pytest.mark.parametrize("processes", [[], [4711]])
def test_ranks_that_never_joined(tmp_path: Path, processes: list[int]) -> None:
    build = RunBuilder(tmp_path, 3)
    build.records.clear()
    build.notes.append(
        {
            "kind": "rendezvous",
            "time": 1.0,
            "seconds": 7.0,
            "world_size": 3,
            "waiting": [0, 1],
            "missing": [2],
            "processes": processes,
            "where": "/home/me/train.py:9",
            "stopped": not processes,
        }
    )
    (finding,) = build.findings()
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP603", "error", (2,))
    assert "rank 2 never joined" in finding.cause
    assert ("4711" in finding.message) is bool(processes)
    assert finding.evidence["waiting"] == [0, 1]
