"""How ranks ended: deaths, consequences and requested stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from signal import SIGABRT, SIGKILL, SIGTERM

import pytest

from ddpcheck.analysis.report import RankStatus
from ddpcheck.records.kinds.rank import FaultRecord, RankHeader
from tests.helpers.run_builder import RunBuilder


@pytest.fixture
def build(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path, 3).wrap().train(4)


def statuses(build: RunBuilder) -> list[str]:
    (attempt,) = build.report().attempts
    return [row.status.value for row in attempt.ranks]


def test_all_finished(build: RunBuilder) -> None:
    assert statuses(build.end()) == ["finished"] * 3


def test_a_crash_while_python_shuts_down(build: RunBuilder) -> None:
    for records in build.records.values():
        assert isinstance(records[0], RankHeader)
        records[0] = replace(records[0], backend="gloo")
    build.end().exited(0, 2000.1, 0).exited(1, 2000.2, SIGABRT).exited(2, 2000.3, SIGTERM)
    assert statuses(build) == ["finished", "died", "finished"]
    finding = build.only("DDP602")
    assert finding.ranks == (1,)
    assert "SIGABRT after the end of training" in finding.message
    assert "outlives destroy_process_group" in finding.cause
    assert "gc.collect()" in finding.fix


def test_a_crash_at_exit_that_follows_from_an_error_elsewhere(build: RunBuilder) -> None:
    build.end([0, 1]).exited(1, 2000.2, SIGABRT).end([2], error="ValueError: no such file")
    assert build.only("DDP602").ranks == (2,)


def test_the_first_to_exit_died_and_the_others_were_stopped(build: RunBuilder) -> None:
    build.exited(1, 100.0).exited(0, 100.5).exited(2, 130.0)
    assert statuses(build) == ["stopped", "died", "stopped"]


def test_ranks_that_were_killed_together_all_died(build: RunBuilder) -> None:
    build.exited(1, 100.0, SIGKILL).exited(0, 100.01, SIGKILL).exited(2, 130.0, SIGTERM)
    assert statuses(build) == ["died", "died", "stopped"]


def test_without_signals_only_the_order_counts(build: RunBuilder) -> None:
    build.exited(1, 100.0).exited(0, 100.01).exited(2, 130.0)
    assert statuses(build) == ["stopped", "died", "stopped"]


def test_of_two_simultaneous_exits_the_killed_one_died(build: RunBuilder) -> None:
    build.exited(0, 100.0).exited(1, 100.0002, SIGKILL).exited(2, 100.01, SIGTERM)
    assert statuses(build) == ["stopped", "died", "stopped"]


def test_a_rank_that_exited_long_before_the_others_were_killed_died(build: RunBuilder) -> None:
    build.exited(0, 100.0).exited(1, 130.0, SIGKILL).exited(2, 130.0, SIGKILL)
    assert statuses(build) == ["died", "stopped", "stopped"]


def test_a_killed_rank_may_exit_after_its_peers(build: RunBuilder) -> None:
    build.exited(0, 100.0, SIGTERM).exited(2, 100.1, SIGTERM).exited(1, 100.5, SIGKILL)
    assert statuses(build) == ["stopped", "died", "stopped"]


def test_peers_may_raise_before_a_killed_rank_has_exited(build: RunBuilder) -> None:
    build.end([0], time=99.0, reason="raised", error="RuntimeError: Connection closed by peer")
    build.exited(1, 100.0, SIGKILL).exited(2, 100.2, SIGTERM)
    assert statuses(build) == ["raised", "died", "stopped"]


@pytest.mark.parametrize(
    "complaint",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:4711: Connection reset by peer",
        "DistNetworkError: failed to recv, got 0 bytes",
        "DistNetworkError: sendBytes failed on Socket: Broken pipe",
        "DistBackendError: NCCL error: remote process exited or there was a network error. ncclRemoteError",
    ],
)
def test_a_rank_gone_after_its_peers_lost_the_connection_died(build: RunBuilder, complaint: str) -> None:
    """It died before the launcher observed it, so its signal is unknown."""
    build.end([0, 1], time=99.0, reason="raised", error=complaint)
    build.exited(2, 99.4)
    assert statuses(build) == ["raised", "raised", "died"]


def test_a_rank_gone_after_an_unrelated_exception_was_stopped(build: RunBuilder) -> None:
    build.end([0], time=99.0, reason="raised", error="ValueError: x")
    build.end([1], time=99.1, reason="raised", error="RuntimeError: Connection closed by peer")
    build.exited(2, 99.4)
    assert statuses(build) == ["raised", "raised", "stopped"]


@pytest.mark.parametrize(("found_gone", "status"), [(True, "died"), (False, "stopped")])
def test_an_unobserved_exit_and_others_without_a_reason(
    build: RunBuilder, found_gone: bool, status: str
) -> None:
    """As in forked ranks, whose launcher keeps their exceptions. If its exit was observed, the order decides."""
    build.end([0, 1], time=99.0, reason="raised", error="exit status 1")
    build.exited(2, 99.4, found_gone=found_gone)
    assert statuses(build) == ["raised", "raised", status]


def test_of_several_unobserved_exits_none_is_the_first(build: RunBuilder) -> None:
    build.exited(0, 99.42, found_gone=True).exited(1, 99.4, found_gone=True).exited(2, 99.3, SIGTERM)
    assert statuses(build) == ["died", "died", "stopped"]


def test_an_observed_kill_explains_unobserved_exits(build: RunBuilder) -> None:
    build.exited(0, 99.42, found_gone=True).exited(1, 99.4, SIGKILL).exited(2, 99.3, SIGTERM)
    assert statuses(build) == ["stopped", "died", "stopped"]


def test_an_unobserved_exit_after_a_reported_reason(build: RunBuilder) -> None:
    build.end([0], time=99.0, reason="raised", error="ValueError: x")
    build.end([1], time=99.0, reason="raised", error="exit status 1")
    build.exited(2, 99.4, found_gone=True)
    assert statuses(build) == ["raised", "raised", "stopped"]


def test_a_rank_killed_long_after_an_error_is_a_consequence(build: RunBuilder) -> None:
    build.end([0], time=90.0, reason="raised", error="ValueError: x")
    build.exited(1, 100.0, SIGKILL).exited(2, 100.0, SIGKILL)
    assert statuses(build) == ["raised", "stopped", "stopped"]


def test_all_ranks_received_a_stop_signal_of_unknown_origin(build: RunBuilder) -> None:
    build.exited(0, 100.0, SIGTERM).exited(1, 100.01, SIGTERM).exited(2, 105.0, SIGTERM)
    assert statuses(build) == ["died", "died", "stopped"]


def test_a_rank_that_raised_and_those_stopped_because_of_it(build: RunBuilder) -> None:
    build.end([2], time=100.0, reason="raised", error="ValueError: x", where="train.py:9")
    build.exited(2, 100.2).exited(0, 101.0).exited(1, 101.0)
    assert statuses(build) == ["stopped", "stopped", "raised"]
    row = build.report().attempts[0].ranks[2]
    assert row.detail == "ValueError: x (train.py:9)"


def test_a_rank_killed_before_the_others_raised(build: RunBuilder) -> None:
    build.exited(0, 100.0)
    build.end([1, 2], time=101.0, reason="raised", error="RuntimeError: Connection closed by peer")
    assert statuses(build) == ["died", "raised", "raised"]


def test_without_a_launcher_an_unobserved_exit_is_a_death(build: RunBuilder) -> None:
    assert statuses(build.end([0, 1])) == ["finished", "finished", "died"]


def test_an_exit_after_an_error_elsewhere_is_not_a_death(build: RunBuilder) -> None:
    build.end([0], reason="raised", error="ValueError: x")
    assert statuses(build) == ["raised", "stopped", "stopped"]


def test_while_the_command_runs_ranks_are_running(build: RunBuilder) -> None:
    del build.description["ended"]
    assert statuses(build) == ["running"] * 3


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_the_user_stopped_the_job(build: RunBuilder, signal: str) -> None:
    build.notes.append({"kind": "signal", "signal": signal, "time": 99.0})
    build.end([0], time=99.5, reason="raised", error="KeyboardInterrupt: ")
    build.exited(1, 99.6).exited(2, 99.6)
    assert statuses(build) == ["stopped"] * 3


def test_errors_after_the_user_stopped_the_job_are_its_consequences(build: RunBuilder) -> None:
    build.notes.append({"kind": "signal", "signal": "SIGINT", "time": 99.0})
    build.end([0], time=99.5, reason="raised", error="KeyboardInterrupt: ")
    build.end([1, 2], time=99.6, reason="raised", error="RuntimeError: Connection closed by peer")
    assert statuses(build) == ["stopped"] * 3


def test_an_error_before_the_user_stopped_the_job_is_an_error(build: RunBuilder) -> None:
    build.end([1], time=98.0, reason="raised", error="ValueError: x")
    build.notes.append({"kind": "signal", "signal": "SIGINT", "time": 99.0})
    build.exited(0, 99.5).exited(2, 99.5)
    assert statuses(build) == ["stopped", "raised", "stopped"]


def test_other_signals_do_not_stop_the_job(build: RunBuilder) -> None:
    build.notes.append({"kind": "signal", "signal": "SIGUSR1", "time": 99.0})
    build.exited(0, 100.0).exited(1, 101.0).exited(2, 101.0)
    assert statuses(build) == ["died", "stopped", "stopped"]


def test_fail_fast_stopped_the_job(build: RunBuilder) -> None:
    build.notes.append({"kind": "stop", "time": 99.0})
    build.exited(0, 99.5).exited(1, 99.6).exited(2, 99.7)
    assert statuses(build) == ["stopped"] * 3


def test_os_exit_is_an_orderly_end_with_its_status(build: RunBuilder) -> None:
    build.end([0, 1]).end([2], reason="raised", error="exit status 3")
    assert statuses(build) == ["finished", "finished", "raised"]


def test_a_rank_that_failed_to_record_its_exit_did_not_die(build: RunBuilder) -> None:
    build.end([0, 1])
    build.add(2, FaultRecord("exit", "close", "ValueError: x", ""))
    assert statuses(build) == ["finished"] * 3


def test_a_rank_that_never_reported_is_missing(build: RunBuilder) -> None:
    del build.records[1]
    assert statuses(build.end([0, 2])) == ["finished", "missing", "finished"]


def test_ranks_of_other_nodes_are_not_missing_here(build: RunBuilder) -> None:
    """Two nodes without shared storage: each folder holds its own ranks."""
    for rank in (0, 1):
        header = build.records[rank][0]
        assert isinstance(header, RankHeader)
        environment = {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        build.records[rank][0] = replace(header, environment=environment, world_size=4)
    del build.records[2]
    assert statuses(build.end([0, 1])) == ["finished", "finished"]


def test_a_row_shows_the_last_step_of_the_rank(build: RunBuilder) -> None:
    row = build.end(dropped=7).report().attempts[0].ranks[1]
    assert (row.rank, row.host, row.pid, row.local_rank) == (1, "node0", 101, 1)
    assert (row.steps, row.last_step, row.last_stage) == (4, 3, "params")
    assert row.status is RankStatus.FINISHED
    assert row.detail == "7 records lost: the disk was too slow"
