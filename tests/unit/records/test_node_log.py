"""Records of the launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddpcheck.records import node_log
from ddpcheck.records.node_log import NodeLog


def test_records(tmp_path: Path) -> None:
    log = NodeLog(tmp_path, host="node/1 a")
    assert not log.path.exists()
    log.write_node(command_pid=7)
    log.write("signal", signal="SIGINT", forwarded=False)
    log.close()
    log.write("rank_exit", rank=0, pid=9, path=Path("x"))
    log.close()
    assert log.path.name == "node-node_1_a.jsonl"
    assert log.path.stat().st_mode & 0o777 == 0o600
    node, signal, rank_exit = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert (node["kind"], node["schema"], node["host"], node["command_pid"]) == ("node", 1, "node/1 a", 7)
    assert (signal["kind"], signal["forwarded"]) == ("signal", False)
    assert signal["time"] >= node["time"]
    assert rank_exit["path"] == "x"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_loses_only_the_record(tmp_path: Path) -> None:
    log = NodeLog(tmp_path, host="h")
    log.path.symlink_to("/dev/full")
    os_fchmod, os.fchmod = os.fchmod, lambda *_: None
    try:
        log.write("signal")
    finally:
        os.fchmod = os_fchmod
    log.close()
    assert log.lost == 1


def test_missing_folder(tmp_path: Path) -> None:
    log = NodeLog(tmp_path / "none")
    log.write("signal")
    log.close()
    assert log.lost == 1
    # Kept for the report of this launcher.
    assert [json.loads(line)["kind"] for line in log.unwritten] == ["signal"]


def test_records_kept_in_memory_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "MAX_UNWRITTEN", 3)
    log = NodeLog(tmp_path / "none")
    for number in range(5):
        log.write("signal", number=number)
    assert log.lost == 5
    assert [json.loads(line)["number"] for line in log.unwritten] == [0, 1, 2]
