"""Progress of process groups, from the JSON of torch's flight recorder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import torch_compat
from ddpcheck.analysis.hang.collectives import ConflictKind, find_conflict
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


SAMPLES = Path(__file__).parent


def test_a_stored_trace_of_nccl() -> None:
    """Not recorded with NCCL: the trace of gloo, with states, times and counters as ProcessGroupNCCL writes them."""
    groups = parse_trace((SAMPLES / "flight_recorder_nccl.json").read_bytes())
    assert {name: (each.enqueued, each.completed) for name, each in groups.items()} == {
        "0": (5, 4),
        "1": (1, 1),
    }
    assert [row[0] for row in groups["0"].recent] == [1, 2, 3, 4, 5]
    assert groups["0"].recent[-1] == [5, "all_reduce", [[1024, 4]], "started"]
    # Sends have numbers of their own.
    assert [row[1] for row in groups["1"].recent] == ["all_reduce"]


def test_the_rank_that_is_missing_in_a_stored_trace() -> None:
    """Rank 1 never enqueued the fifth collective: its trace ends before it."""
    document = json.loads((SAMPLES / "flight_recorder_nccl.json").read_bytes())
    behind = json.loads((SAMPLES / "flight_recorder_nccl.json").read_bytes())
    behind["entries"].pop()
    behind["pg_status"]["0"].update(last_enqueued_collective="4", last_started_collective="4")
    ranks = {
        0: parse_trace(json.dumps(document)),
        1: parse_trace(json.dumps(behind)),
        2: parse_trace(json.dumps(document)),
    }
    conflict = find_conflict(ranks)
    assert conflict is not None
    assert (conflict.kind, conflict.number, conflict.ranks) == (ConflictKind.MISSING, 5, (1,))
    assert conflict.cause.startswith(
        "rank 1 did not enqueue collective 5 of process group 0 (all_reduce of 1024x4)"
    )


def test_a_stored_trace_of_gloo() -> None:
    """As this machine recorded it, with rank 0 in a collective that rank 1 had not reached."""
    groups = parse_trace((SAMPLES / "flight_recorder_gloo.json").read_bytes())
    assert groups["0"].enqueued == 5
    assert [row[1] for row in groups["0"].recent] == ["all_reduce"] * 3 + ["barrier", "all_reduce"]


def test_collectives_that_completed_out_of_order() -> None:
    """gloo leaves the state at "scheduled"; the number of the last one in time stays below the last one enqueued."""
    done = [entry(number, "scheduled", retired=True) for number in (1, 2, 3, 4)]
    assert parse_trace(trace(*done, completed=3, enqueued=4))["0"].completed == 4
    pending = [*done[:1], entry(2, "scheduled", retired=False), *done[2:]]
    assert parse_trace(trace(*pending, completed=4, enqueued=4))["0"].completed == 1
    # The recorder is behind the counters: only these are known.
    assert parse_trace(trace(*done, completed=3, enqueued=5))["0"].completed == 3


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


def test_only_completed_collectives_are_progress_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that enqueues more and more behind one that cannot complete makes no progress."""
    state = {"issued": {"0": 2}, "trace": trace(enqueued=2, completed=1)}
    monkeypatch.setattr(
        torch_compat,
        "lookup",
        {torch_compat.NCCL_FLIGHT_RECORDER: lambda collectives, active: state["trace"]}.get,
    )
    monkeypatch.setattr(collective_progress, "collectives_issued", lambda: state["issued"])
    before = progress_mark()
    state.update(issued={"0": 9}, trace=trace(enqueued=9, completed=1))
    assert progress_mark() == before
    state.update(trace=trace(enqueued=9, completed=2))
    assert progress_mark() != before
    # A second group that the recorder does not have: what it enqueues counts.
    state.update(issued={"0": 9, "1": 1})
    with_another = progress_mark()
    state.update(issued={"0": 9, "1": 2})
    assert progress_mark() != with_another


def test_without_a_recorder_enqueued_collectives_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"0": 1}
    monkeypatch.setattr(torch_compat, "lookup", {}.get)
    monkeypatch.setattr(collective_progress, "collectives_issued", lambda: dict(counts))
    before = progress_mark()
    counts["0"] = 2
    assert progress_mark() != before
