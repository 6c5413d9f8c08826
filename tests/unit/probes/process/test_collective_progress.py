"""Progress of process groups, from the JSON of torch's flight recorder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddpcheck import torch_compat
from ddpcheck.probes.process import collective_progress
from ddpcheck.probes.process.collective_progress import MAX_RECENT, group_progress, parse_trace, progress_mark


def entry(
    number: int, state: str, group: tuple[str, str] = ("0", "default_pg"), **fields: Any
) -> dict[str, Any]:
    """An entry as ProcessGroupNCCL writes it: torch/csrc/distributed/c10d/FlightRecorder, version 2.10."""
    return {
        "collective_seq_id": number,
        "duration_ms": 0.21,
        "input_dtypes": ["Float"],
        "input_sizes": [[1024, 4]],
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[1024, 4]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": list(group),
        "profiling_name": "nccl:all_reduce",
        "record_id": number - 1,
        "retired": state == "completed",
        "state": state,
        "time_created_ns": 1795002259395118769,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 600000,
    } | fields


def trace(*entries: dict[str, Any], completed: int = 1, enqueued: int = 2) -> bytes:
    return json.dumps(
        {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
            "pg_status": {
                "0": {
                    "last_enqueued_collective": str(enqueued),
                    "last_started_collective": str(enqueued),
                    "last_completed_collective": str(completed),
                }
            },
            "entries": list(entries),
        }
    ).encode()


def test_a_trace_of_nccl() -> None:
    [(name, progress)] = parse_trace(trace(entry(1, "completed"), entry(2, "started"))).items()
    assert (name, progress.enqueued, progress.completed) == ("0", 2, 1)
    assert progress.recent[-1] == [2, "all_reduce", [[1024, 4]], "started"]


def test_no_collective_has_completed() -> None:
    assert parse_trace(trace(entry(1, "started"), completed=-1))["0"].completed == 0


def test_sends_and_receives_are_left_out() -> None:
    sent = entry(3, "started", is_p2p=True, profiling_name="nccl:send 0->1")
    assert len(parse_trace(trace(entry(2, "completed"), sent))["0"].recent) == 1


def test_only_the_last_collectives_are_kept() -> None:
    rows = [entry(number, "completed") for number in range(1, 100)]
    recent = parse_trace(trace(*rows, completed=99, enqueued=99))["0"].recent
    assert [row[0] for row in recent] == list(range(100 - MAX_RECENT, 100))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"entries": [1], "pg_status": {"0": 3}}'])
def test_a_trace_of_another_form(text: bytes) -> None:
    assert parse_trace(text) == {}


def test_the_recorder_adds_to_the_counters_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = {
        torch_compat.NCCL_FLIGHT_RECORDER: lambda collectives, active: trace(entry(2, "started")),
        torch_compat.FLIGHT_RECORDER: lambda collectives, active: b"{}",
    }
    monkeypatch.setattr(torch_compat, "lookup", dumps.get)
    monkeypatch.setattr(collective_progress, "collectives_issued", lambda: {"0": 2, "7": 5})
    groups = group_progress()
    assert (groups["0"].enqueued, groups["0"].completed) == (2, 1)
    assert (groups["7"].enqueued, groups["7"].completed) == (5, None)
    before = progress_mark()
    monkeypatch.setitem(
        dumps, torch_compat.NCCL_FLIGHT_RECORDER, lambda collectives, active: trace(completed=2)
    )
    assert progress_mark() != before
