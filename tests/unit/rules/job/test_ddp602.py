"""DDP602: a rank died, and its last step and stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.modules import ModuleRecord
from tests.helpers.run_builder import NAMES, RunBuilder


@pytest.fixture
def build(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path, 3).wrap().train(4)


def test_a_killed_rank_and_its_last_step(build: RunBuilder) -> None:
    build.exited(2, 100.0).exited(0, 101.0).exited(1, 101.0)
    finding = build.only("DDP602")
    assert (finding.ranks, finding.step, finding.stage) == ((2,), 3, "params")
    assert finding.message.startswith("Rank 2 ended without a message")
    assert "out of memory" in finding.cause


def test_a_rank_that_raised(build: RunBuilder) -> None:
    build.end([1], time=100.0, reason="raised", error="ValueError: bad batch", where="train.py:9")
    finding = build.exited(0, 101.0).exited(2, 101.0).only("DDP602")
    assert (finding.ranks, finding.cause) == ((1,), "ValueError: bad batch (train.py:9)")


def test_errors_caused_by_a_death_are_consequences(build: RunBuilder) -> None:
    build.exited(1, 100.0)
    build.end([0, 2], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    finding = build.only("DDP602")
    assert finding.ranks == (1,)
    assert "Ranks 0 and 2 failed as a consequence" in finding.message


def test_errors_caused_by_an_error_are_consequences(build: RunBuilder) -> None:
    build.end([2], time=100.0, reason="raised", error="ValueError: bad batch")
    build.end([0, 1], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    finding = build.only("DDP602")
    assert (finding.ranks, finding.cause) == ((2,), "ValueError: bad batch")


def test_a_rank_that_finished_early_closed_the_connections(build: RunBuilder) -> None:
    build.end([1], time=100.0)
    build.end([0, 2], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    finding = build.only("DDP602")
    # The rank that left is the outlier, not those that lost it.
    assert finding.ranks == (1,)
    assert "Rank 1 had ended before that, without an error" in finding.message
    assert finding.cause.startswith("early stop on some ranks: rank 1 ended")


@pytest.mark.parametrize(
    ("when", "error"), [(102.0, "RuntimeError: Connection closed by peer"), (100.0, "OSError: x")]
)
def test_a_rank_that_finished_is_not_the_cause_of_unrelated_errors(
    build: RunBuilder, when: float, error: str
) -> None:
    build.end([1], time=when)
    build.end([0, 2], time=101.0, reason="raised", error=error)
    finding = build.only("DDP602")
    assert "had ended" not in finding.message
    assert finding.cause == error


def test_the_same_error_on_all_ranks_is_one_finding(build: RunBuilder) -> None:
    build.end(time=100.0, reason="raised", error="ValueError: x", where="train.py:3")
    assert build.only("DDP602").ranks == (0, 1, 2)


def test_before_the_first_record(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2)
    build.end([0], reason="raised", error="ValueError: x")
    assert "before its first record" in build.only("DDP602").message


def test_while_wrapping(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    build.end([0], reason="raised", error="ValueError: x")
    finding = build.only("DDP602")
    assert "while wrapping" in finding.message
    assert finding.step is None


@pytest.mark.parametrize("how", ["signal", "stop"])
def test_an_interrupted_job_has_no_dead_rank(build: RunBuilder, how: str) -> None:
    build.notes.append({"kind": how, "signal": "SIGINT", "time": 99.0})
    build.end([0], time=99.1, reason="raised", error="KeyboardInterrupt: ")
    build.end([1], time=99.2, reason="raised", error="RuntimeError: Connection reset by peer")
    build.exited(2, 99.3)
    assert build.findings() == []


def test_all_finished(build: RunBuilder) -> None:
    assert build.end().findings() == []


def test_a_status_of_its_own_after_the_group_was_closed(build: RunBuilder) -> None:
    build.end(time=100.0, reason="raised", error="exit status 3", left=True)
    [finding] = build.findings("DDP602")
    assert finding.severity.value == "note"
    assert (finding.ranks, finding.cause) == ((0, 1, 2), "the program's own exit status: no rank died")


def test_a_status_of_its_own_while_the_others_train(build: RunBuilder) -> None:
    build.end([1], time=100.0, reason="raised", error="exit status 3", left=True)
    build.end([0, 2], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    finding = build.only("DDP602")
    assert finding.ranks == (1,)
    assert finding.cause.startswith("early stop on some ranks: rank 1 ended")


def test_a_status_of_its_own_with_an_open_group(build: RunBuilder) -> None:
    build.end([1], time=100.0, reason="raised", error="exit status 3")
    build.end([0, 2], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    finding = build.only("DDP602")
    assert (finding.ranks, finding.cause) == ((1,), "exit status 3")
    assert finding.message.startswith("Rank 1 ended with exit status 3")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: BARRIER",
        "RuntimeError: [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 12000 vs 12",
    ],
)
def test_a_mismatch_that_torch_found(build: RunBuilder, error: str) -> None:
    build.end(time=100.0, reason="raised", error=error)
    finding = build.only("DDP602")
    assert finding.cause.startswith("collective mismatch")
    assert "in the same order" in finding.fix


@pytest.mark.parametrize(("backend", "signal"), [("gloo", 6), ("gloo", 9), ("nccl", 6)])
def test_gloo_aborts_where_sizes_differ(build: RunBuilder, backend: str, signal: int) -> None:
    for rank, records in build.records.items():
        records[0] = replace(records[0], backend=backend)  # type: ignore[type-var]
        build.exited(rank, 100.0 + rank, signal=signal if rank == 1 else 15)
    finding = build.only("DDP602")
    assert finding.ranks == (1,)
    assert ("collective mismatch" in finding.cause) == (backend == "gloo" and signal == 6)


@pytest.mark.parametrize("stepped", [4, 6])
def test_a_rank_that_stepped_past_the_reduction_and_ended(build: RunBuilder, stepped: int) -> None:
    """The others wait for its part of the AllReduce of step 4, or have come past it."""
    build.apply(4, last="unsynced", reason="wrapper_bypassed", ranks=[1]).train(stepped - 4, first=4)
    build.end([1], time=100.0)
    build.end([0, 2], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    finding = next(finding for finding in build.findings() if finding.code == "DDP602")
    assert finding.ranks == (1,)
    assert ("stepped with gradients that DDP did not reduce, from step 4 on" in finding.cause) == (
        stepped == 4
    )


def test_ddp_on_one_rank_only(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2)
    build.add(0, ModuleRecord(0, "Net", [0, 1], 0, build.rows(NAMES), []))
    build.snapshot(Stage.INIT_BEFORE, -1, width=8, ranks=[0])
    build.end([1], time=100.0)
    build.end([0], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    finding = next(finding for finding in build.findings() if finding.code == "DDP602")
    assert finding.ranks == (0,)
    assert finding.cause.startswith("DDP is constructed on rank 0 only")
