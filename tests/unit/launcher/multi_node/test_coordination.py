"""Launchers that share a run folder: which have ended, which one reports, and waiting."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.launcher.multi_node import coordination
from ddpcheck.launcher.multi_node.coordination import (
    LauncherLogs,
    NodeEnd,
    all_launchers,
    is_reporter,
    is_shared,
    log_done,
    other_launchers,
    wait_for_peers,
    wait_for_report,
)
from ddpcheck.records.node_log import NodeLog
from tests.helpers.run_builder import RunBuilder


def node(folder: Path, host: str, pid: int, **done: object) -> None:
    log = NodeLog(folder, host)
    log.write("node", host=host, pid=pid)
    if done:
        log.write("node_done", host=host, pid=pid, **done)
    log.close()


def test_launchers_are_identified_by_host_and_process(tmp_path: Path) -> None:
    node(tmp_path, "a", 1, status=0, stopped="")
    node(tmp_path, "b", 1, status=3, stopped="hang")
    node(tmp_path, "b", 2)
    (tmp_path / "node-c.jsonl").write_text('{"kind":"node","host":\n[]\n')
    assert all_launchers(tmp_path) == {("a", 1): NodeEnd(0), ("b", 1): NodeEnd(3, "hang"), ("b", 2): None}


def test_a_single_launcher_has_no_peers(tmp_path: Path) -> None:
    log = NodeLog(tmp_path)
    log.write_node(1)
    log.close()
    log_done(tmp_path, 0, "")
    assert list(all_launchers(tmp_path).values()) == [NodeEnd(0)]
    assert other_launchers(tmp_path) == {}


def test_the_launcher_of_rank_0_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunBuilder(tmp_path, 2).wrap().train(1).end().save()
    run = RunReader(tmp_path)
    run.poll()
    header = run.ordered()[-1].ranks[0].header
    assert not is_reporter(run, created_run=True, own_pids={header.pid})  # another host
    monkeypatch.setattr(coordination.os, "uname", lambda: type("Name", (), {"nodename": header.host}))
    assert is_reporter(run, created_run=False, own_pids={header.pid})
    assert not is_reporter(run, created_run=True, own_pids={header.pid + 1})


def test_without_ranks_the_launcher_that_created_the_run_reports(tmp_path: Path) -> None:
    assert is_reporter(RunReader(tmp_path), created_run=True, own_pids=set())
    assert not is_reporter(RunReader(tmp_path), created_run=False, own_pids=set())


def test_wait_for_peers_ends_when_all_have_ended(tmp_path: Path) -> None:
    node(tmp_path, "a", 1)
    assert wait_for_peers(tmp_path, 0.3) == ["a"]
    timer = threading.Timer(0.3, lambda: node(tmp_path, "a", 1, status=0))
    timer.start()
    started = time.monotonic()
    assert wait_for_peers(tmp_path, 20.0) == []
    assert time.monotonic() - started < 10
    timer.join()


def test_wait_for_report_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_REPORT_SECONDS", 0.0)
    assert wait_for_report(tmp_path, 0.1) is None
    (tmp_path / "report.json").write_text(json.dumps({"findings": []}))
    assert wait_for_report(tmp_path, 0.1) == {"findings": []}
    assert os.path.exists(tmp_path / "report.json")


def test_wait_for_report_continues_while_the_heartbeat_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(coordination, "HEARTBEAT_SECONDS", 0.05)
    report = tmp_path / "report.json"

    def report_slowly() -> None:
        with coordination.reporting_heartbeat(tmp_path):
            time.sleep(4)
            report.write_text("{}")

    thread = threading.Thread(target=report_slowly)
    thread.start()
    while not (tmp_path / coordination.HEARTBEAT_FILE).exists():
        time.sleep(0.01)
    assert wait_for_report(tmp_path, 2) == {}
    thread.join()
    assert not (tmp_path / coordination.HEARTBEAT_FILE).exists()


def test_an_unchanged_heartbeat_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_REPORT_SECONDS", 0.0)
    (tmp_path / coordination.HEARTBEAT_FILE).write_text("7\n")
    assert not coordination.claim_reporting(tmp_path)
    assert wait_for_report(tmp_path, 0.2) is None
    # Its owner has ended: one of the waiting launchers takes over.
    assert coordination.claim_reporting(tmp_path)
    assert not coordination.claim_reporting(tmp_path)


def test_logs_are_read_incrementally(tmp_path: Path) -> None:
    logs = LauncherLogs(tmp_path)
    node(tmp_path, "a", 1)
    assert logs.all() == {("a", 1): None}
    with (tmp_path / "node-a.jsonl").open("a") as file:
        file.write('{"kind":"node_done","host":"a","pid":1,')
    assert logs.all() == {("a", 1): None}
    with (tmp_path / "node-a.jsonl").open("a") as file:
        file.write('"status":0}\n')
    assert logs.all() == {("a", 1): NodeEnd(0)}


def test_is_shared_with_another_launcher(tmp_path: Path) -> None:
    assert not is_shared(tmp_path)
    log = NodeLog(tmp_path)
    log.write_node(1)
    assert not is_shared(tmp_path)
    log.write("node", host=log.host, pid=os.getpid() + 1)
    assert is_shared(tmp_path)
    log.close()


def test_is_shared_with_a_log_of_another_host(tmp_path: Path) -> None:
    node(tmp_path, "another", 1)
    assert is_shared(tmp_path)
