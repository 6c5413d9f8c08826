"""Numbers from real GPU traces, to the nanosecond, and from a real profile of gloo."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.model import TraceResult
from ddpcheck.traces.reader import load
from tests.helpers.fork_server import prepared
from tests.helpers.paths import ROOT
from tests.helpers.watched_run import run_to_end

TRACES = Path(os.environ.get("DDPCHECK_TRACES", ROOT.parent / "shared" / "traces"))
A100 = "resnet50_ddp_a100_rank0of2.json.gz"
MI300X = "resnet_ddp_mi300x_rank0of8.json.gz"
DLRM = "dlrm_v100_8ranks.tar.gz"

needs_traces = pytest.mark.skipif(
    not (TRACES / DLRM).exists(), reason=f"the traces are not in {TRACES}; DDPCHECK_TRACES names their folder"
)


def of(name: str) -> TraceResult:
    return analyse(load([TRACES / name]).traces)


def figures(result: TraceResult) -> list[tuple[int, int, int, int, float]]:
    return [
        (each.comm_ns, each.compute_ns, each.overlap_ns, each.exposed_ns, each.overlap_pct)
        for each in (rank.shares for rank in result.ranks)
    ]


@needs_traces
def test_a100() -> None:
    result = of(A100)
    assert figures(result) == [(46_876_493, 115_655_847, 7_317_025, 39_559_468, 15.609)]
    kinds = [each.kind for each in result.collectives]
    assert (kinds.count("all_reduce"), kinds.count("broadcast"), len(kinds)) == (15, 6, 21)
    for step in (4, 5, 6):
        buckets = [each for each in result.collectives if each.step == step and each.bucket is not None]
        assert [each.bucket for each in buckets] == [0, 1, 2, 3, 4]
        assert sum(each.elements or 0 for each in buckets) == 25_557_032
    assert [step.step for step in result.ranks[0].steps] == [4, 5, 6]
    assert all(
        part.ready_ns and part.ready_ns < part.start_ns for e in result.collectives for part in e.parts
    )


@needs_traces
def test_mi300x() -> None:
    result = of(MI300X)
    assert figures(result) == [(71_516_523, 25_739_303, 15_891_299, 55_625_224, 22.220)]
    assert len(result.collectives) == 17
    # Kernels that began before the recording have no launch event, so their kind is unknown.
    assert [each.kind for each in result.collectives].count("unknown") == 5


DLRM_SHARES = [
    (5_798, 1_034, 261, 5_537, 4.502),
    (11_336, 1_246, 280, 11_056, 2.470),
    (3_492, 1_068, 275, 3_217, 7.875),
    (9_774, 1_240, 324, 9_450, 3.315),
    (6_587, 1_126, 37, 6_550, 0.562),
    (6_251, 1_041, 40, 6_211, 0.640),
    (3_558, 1_051, 269, 3_289, 7.560),
    (1_746, 1_059, 166, 1_580, 9.507),
]
DLRM_WAITS_US = [5_580, 11_125, 3_280, 9_571, 6_370, 6_041, 3_342, 1_534]


@needs_traces
def test_dlrm_on_eight_ranks() -> None:
    result = of(DLRM)
    assert [
        (c // 1000, k // 1000, o // 1000, e // 1000, p) for c, k, o, e, p in figures(result)
    ] == DLRM_SHARES
    assert [rank.wait_ns for rank in result.ranks] == [wait * 1000 for wait in DLRM_WAITS_US]
    assert [rank.last_arrivals for rank in result.ranks] == [0, 0, 0, 0, 1, 2, 0, 5]
    assert (result.transfer_ns, result.matched, result.unmatched) == (217_000, 8, 0)
    ends = [[part.end_ns for part in each.parts] for each in result.collectives]
    assert max(max(each) - min(each) for each in ends) == 7_000
    first = next(each for each in result.collectives if each.kind == "all_reduce")
    assert (first.elements, first.transfer_ns, first.bucket) == (394_241, 86_000, 0)
    assert not any(rank.clock and rank.clock.corrected for rank in result.ranks)


@needs_traces
def test_dlrm_with_one_clock_off_by_five_milliseconds(tmp_path: Path) -> None:
    with tarfile.open(TRACES / DLRM) as archive:
        for member in archive:
            if member.isfile():
                (tmp_path / Path(member.name).name).write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
    (late,) = tmp_path.glob("worker3_*")
    document = json.loads(late.read_text())
    for event in document["traceEvents"]:
        event["ts"] += 5_000
    late.write_text(json.dumps(document))
    result = analyse(load([tmp_path]).traces)
    clock = result.ranks[3].clock
    assert clock
    assert clock.corrected
    assert abs(clock.offset_ns - 5_000_000) < 50_000
    for each in result.collectives:
        ends = [part.end_ns for part in each.parts]
        assert max(ends) - min(ends) < 50_000
    assert [rank.last_arrivals for rank in result.ranks] == [0, 0, 0, 0, 1, 2, 0, 5]
    waits = [(rank.wait_ns or 0) // 1000 for rank in result.ranks]
    assert all(abs(wait - true) < 50 for wait, true in zip(waits, DLRM_WAITS_US, strict=True))


@needs_traces
def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "all.json.gz"
    command = [sys.executable, "-m", "ddpcheck", "trace", TRACES / DLRM, "--json", "--merged", out]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert [rank["wait_ns"] // 1000 for rank in document["ranks"]] == DLRM_WAITS_US
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(8))
    # One arrow from each of eight collectives to each of the seven waiting ranks.
    assert [sum(event["ph"] == phase for event in events) for phase in ("s", "f")] == [56, 56]


@pytest.fixture(scope="module")
def gloo_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    job = ROOT / "tests" / "jobs" / "profiled.py"
    done = run_to_end(prepared(job, folder), folder, {})
    assert done.status == 0, str(done)
    return folder


@pytest.mark.slow
def test_gloo(gloo_profile: Path) -> None:
    result = analyse(load([gloo_profile]).traces)
    assert [(rank.rank, rank.source, rank.collectives) for rank in result.ranks] == [
        (0, "spans of gloo", 6),
        (1, "spans of gloo", 6),
    ]
    assert [step.step for step in result.ranks[0].steps] == [2, 3]
    assert (result.matched, result.unmatched) == (6, 0)
    # Three buckets per step, sized by the recorded shapes: 512 x 512 weights and 512 biases.
    assert [(each.step, each.bucket, each.bytes) for each in result.collectives] == [
        (step, bucket, 4 * (512 * 512 + 512)) for step in (2, 3) for bucket in (0, 1, 2)
    ]
    # Rank 1 sleeps before each backward, so rank 0 waits for it at the first bucket of a step.
    firsts = [each for each in result.collectives if each.bucket == 0]
    assert [each.last_rank for each in firsts] == [1, 1]
    assert all((each.parts[0].wait_ns or 0) > 100_000_000 for each in firsts)
    for rank in result.ranks:
        _adds_up(rank.shares)
    parts = [part for each in result.collectives for part in each.parts]
    assert all(part.ready_ns is not None and part.ready_ns <= part.start_ns for part in parts)


def _adds_up(shares: Any) -> None:
    assert shares.comm_ns == shares.overlap_ns + shares.exposed_ns > 0
    assert shares.compute_ns >= shares.overlap_ns
    assert shares.span_ns == shares.compute_alone_ns + shares.comm_ns + shares.idle_ns
