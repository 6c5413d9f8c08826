"""One timeline of all ranks: clocks are corrected, and viewers accept the file."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.errors import UserError
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.collectives import on_one_clock
from ddpcheck.traces.merged import write_merged
from ddpcheck.traces.reader import load
from tests.helpers.trace_builder import Event, all_reduce, described, kernel, step, write

RANKS = 4


def job(rank: int, offset_us: float = 0.0) -> list[Event]:
    """Five steps in which the last rank arrives late and all ends scatter by a few microseconds."""
    scatter = random.Random(rank)
    events: list[Event] = []
    for number in range(5):
        begin = number * 1000.0
        events.append(step(number, begin, begin + 900))
        events += kernel("gemm", begin + 50, begin + 300, launched=begin + 10)
        arrives = begin + 200 + 100 * (rank == RANKS - 1)
        ends = begin + 400 + scatter.randint(0, 4)
        events += all_reduce(arrives, ends, launched=begin + 20, **described(1000, size=RANKS))
    return [{**event, "ts": event["ts"] + offset_us} for event in events]


def traces(tmp_path: Path, offset_us: float = 0.0) -> list[Path]:
    return [
        write(tmp_path / f"rank{rank}.json", job(rank, offset_us if rank == 1 else 0), rank, RANKS)
        for rank in range(RANKS)
    ]


def test_clocks_that_agree_are_not_corrected(tmp_path: Path) -> None:
    result = analyse(load(traces(tmp_path)).traces)
    clocks = [rank.clock for rank in result.ranks]
    assert all(clock and not clock.corrected and abs(clock.offset_ns) < 5_000 for clock in clocks)
    assert [rank.wait_ns for rank in result.ranks] == [500_000, 500_000, 500_000, 0]


@pytest.mark.parametrize("offset_us", [5_000.0, -5_000.0, 10.0**9])
def test_an_offset_is_taken_out(tmp_path: Path, offset_us: float) -> None:
    loaded = load(traces(tmp_path, offset_us))
    result = analyse(loaded.traces)
    clock = result.ranks[1].clock
    assert clock
    assert clock.corrected
    assert abs(clock.offset_ns - offset_us * 1000) < 50_000
    assert [rank.rank for rank in result.ranks if rank.clock and rank.clock.corrected] == [1]
    # The results without an offset are reproduced.
    assert [rank.last_arrivals for rank in result.ranks] == [0, 0, 0, 5]
    assert abs((result.ranks[1].wait_ns or 0) - 500_000) < 50_000
    aligned = on_one_clock(loaded.traces, {rank.rank: rank.clock for rank in result.ranks})
    for number in range(5):
        ends = [trace.collectives[number].end for trace in aligned]
        assert max(ends) - min(ends) < 50_000


def test_scatter_is_not_an_offset(tmp_path: Path) -> None:
    # Random ends say nothing about clocks.
    scatter = random.Random(0)
    files = []
    for rank in range(2):
        events = [e for n in range(9) for e in all_reduce(n * 1e4, n * 1e4 + 500 + scatter.randint(0, 4000))]
        files.append(write(tmp_path / f"rank{rank}.json", events, rank))
    result = analyse(load(files).traces)
    assert not any(rank.clock and rank.clock.corrected for rank in result.ranks)


def merged(tmp_path: Path, name: str = "all.json", offset_us: float = 0.0) -> dict[str, Any]:
    loaded = load(traces(tmp_path, offset_us))
    out = tmp_path / name
    write_merged(loaded.traces, analyse(loaded.traces), out)
    data = gzip.decompress(out.read_bytes()) if name.endswith(".gz") else out.read_bytes()
    document: dict[str, Any] = json.loads(data)
    return document


def check_rules(events: list[dict[str, Any]]) -> None:
    """Requirements of chrome://tracing and Perfetto."""
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f")
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(event)
        elif event["ph"] in ("s", "f"):
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    for lane in lanes.values():
        _check_nesting(lane)
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for end in ends.values():
            around = [
                each
                for each in lanes[end["pid"], end["tid"]]
                if each["ts"] <= end["ts"] <= each["ts"] + each["dur"]
            ]
            assert around, f"an arrow ends nowhere: {end}"
        # Perfetto turns an arrow round if the slice it leads to began before the one it comes from.
        began = [_innermost(lanes[end["pid"], end["tid"]], end["ts"])["ts"] for end in (ends["s"], ends["f"])]
        assert began[0] <= began[1]


def _innermost(lane: list[dict[str, Any]], time: float) -> dict[str, Any]:
    """The last to begin of those that are open, as viewers have it: what ends at this very time may be gone."""
    return max((each for each in lane if each["ts"] <= time), key=lambda each: (each["ts"], -each["dur"]))


def _check_nesting(lane: list[dict[str, Any]]) -> None:
    """Slices of a lane lie inside each other or apart, to the nanosecond."""
    in_ns = sorted((round(e["ts"] * 1000), -round((e["ts"] + e["dur"]) * 1000)) for e in lane)
    open_ends: list[int] = []
    for start, minus_end in in_ns:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or -minus_end <= open_ends[-1]
        open_ends.append(-minus_end)


@pytest.mark.parametrize("name", ["all.json", "all.json.gz"])
def test_the_file(tmp_path: Path, name: str) -> None:
    document = merged(tmp_path, name)
    events = document["traceEvents"]
    check_rules(events)
    assert {event["pid"] for event in events} == set(range(RANKS))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {name for (pid, _), name in names.items() if pid == 0} == {
        "steps",
        "compute",
        "communication, stream 20",
        "bucket 0",
    }
    # Perfetto puts the thread on top whose id is that of its process.
    assert {name for (pid, tid), name in names.items() if pid == tid} == {"steps"}
    assert sum(name == "steps" for name in names.values()) == RANKS
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert sum(event["name"] == "step 3" for event in slices) == 1
    assert sum(event["name"] == "ready" for event in slices) == 5
    assert sum(event["name"] == "reduction" for event in slices) == 5
    assert sum(event["name"] == "waits for rank 3" for event in slices) == 5
    assert sum(event["name"] == "transfer" for event in slices) == 5


def test_arrows_point_from_the_late_to_the_waiting_rank(tmp_path: Path) -> None:
    arrows = [event for event in merged(tmp_path)["traceEvents"] if event["ph"] in ("s", "f")]
    assert len(arrows) == 2 * 5 * (RANKS - 1)
    assert {event["pid"] for event in arrows if event["ph"] == "s"} == {RANKS - 1}
    assert {event["pid"] for event in arrows if event["ph"] == "f"} == {0, 1, 2}


def test_offset_and_residual_are_reported(tmp_path: Path) -> None:
    document = merged(tmp_path, offset_us=5_000)
    clock = document["ddpcheck"]["clocks"]["1"]
    assert abs(clock["offset_ns"] - 5_000_000) < 50_000
    assert clock["residual_ns"] < 5_000
    check_rules(document["traceEvents"])
    ends = defaultdict(list)
    for event in document["traceEvents"]:
        if event["name"] == "all_reduce, bucket 0":
            ends[event["pid"]].append(event["ts"] + event["dur"])
    for number in range(5):
        at = [each[number] for each in ends.values()]
        assert max(at) - min(at) < 50


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    loaded = load(traces(tmp_path))
    with pytest.raises(UserError, match="cannot be written"):
        write_merged(loaded.traces, analyse(loaded.traces), tmp_path / "nowhere" / "all.json")
