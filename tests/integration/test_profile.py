"""`ddpcheck run --profile` on real jobs: what it reports, and that it does not change the jobs."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.node_notes import NodeNotes
from ddpcheck.analysis.overlap.build import overlap_of
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.rules.performance.ddp401 import find
from tests.helpers.commands import BIN, CommandResult
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import WatchedRun, run_to_end, run_watched

CASES = ("exposed", "own_profiler", "short", "hidden")
JOB = JOBS / "profile_cases.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    folder = tmp_path_factory.mktemp("plain")
    return run_to_end(prepared(JOB, folder, ",".join(CASES)), folder, {})


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """One run; each case is an attempt."""
    folder = tmp_path_factory.mktemp("watched")
    return run_watched(prepared(JOB, folder, ",".join(CASES)), folder, options=["--profile"])


@pytest.fixture(scope="module")
def seen(watched: WatchedRun) -> dict[str, Overlap]:
    run = RunReader(watched.folder)
    run.finish()
    findings = [overlap_of(attempt, run.path) for attempt in run.ordered()]
    return {case: each for case, each in zip(CASES, findings, strict=True) if each is not None}


def test_the_job_is_the_same(plain: CommandResult, watched: WatchedRun) -> None:
    assert (plain.status, watched.status) == (0, 0), str(watched)
    assert sorted(plain.stdout.splitlines()) == sorted(watched.stdout.splitlines())
    assert len(plain.stdout.splitlines()) == 2 * len(CASES)
    # Neither messages of the profiler itself, nor its warning about truncated spans.
    assert "USDT" not in watched.stderr
    assert "collection.cpp" not in watched.stderr
    assert "DDP605" not in watched.codes(), str(watched)


def test_traces_are_named_as_torch_tb_profiler_expects(watched: WatchedRun) -> None:
    names = watched.files("traces/*")
    assert len(names) == 2 * 3  # not of the job that profiles by itself
    assert all(re.fullmatch(r".+_\d+_rank[01]\.\d+\.pt\.trace\.json\.gz", name) for name in names)


def test_exposed_transfers_are_found_and_nothing_else(watched: WatchedRun, seen: dict[str, Overlap]) -> None:
    overlap = seen["exposed"]
    assert [step.step for step in overlap.steps] == [5, 6, 7]
    # On a busy machine there is no finding, but the numbers are the same.
    wanted = [] if overlap.machine_too_busy else ["DDP401"]
    assert watched.codes("error", "warning") == wanted, str(watched)
    assert sum(each.bytes or 0 for each in overlap.buckets) == 3 * 4 * 8_000_000
    idle = replace(overlap, ranks=tuple(replace(rank, held_up_ns=0) for rank in overlap.ranks))
    [finding] = find(RuleContext(Attempt("a"), 0, Path(), NodeNotes(), (), 0, overlap=idle))
    assert finding.evidence["exposed_share"] >= 0.2
    assert finding.evidence["bytes_a_step"] == 4 * 8_000_000


def test_overlap_of_each_bucket(watched: WatchedRun, seen: dict[str, Overlap]) -> None:
    overlap = seen["hidden"]
    assert (overlap.source, overlap.first_step, overlap.end_step, overlap.unmatched) == ("ddpcheck", 5, 8, 0)
    assert [(each.step, each.bucket) for each in overlap.buckets] == [
        (s, b) for s in (5, 6, 7) for b in (0, 1)
    ]
    first, last = overlap.buckets[0], overlap.buckets[1]
    assert (first.bytes, last.bytes) == (4 * (512 * 512 + 512), 4 * (512 * 16 + 512))
    # Rank 0's first bucket takes 80 ms, until rank 1 arrives, while the rest of its backward takes 150 ms.
    parts = [each.ranks[0] for each in overlap.buckets if each.bucket == 0]
    assert [each.last_rank for each in overlap.buckets if each.bucket == 0] == [1, 1, 1]
    hidden, exposed = sum(part.hidden_ns for part in parts), sum(part.exposed_ns for part in parts)
    assert hidden > exposed
    assert hidden > 3 * 40_000_000
    for rank in overlap.ranks:
        assert rank.comm_ns == rank.overlap_ns + rank.exposed_ns
        assert rank.exposed_ns == (rank.exposed_transfer_ns or 0) + (rank.exposed_wait_ns or 0)
    assert watched.report["overlap"]["ranks"][0]["comm_ns"] == overlap.ranks[0].comm_ns


def test_when_gradients_were_ready(watched: WatchedRun) -> None:
    ready = [each for each in watched.records(0, CASES.index("hidden")) if each["kind"] == "ready"]
    assert [each["step"] for each in ready] == [5, 6, 7]
    for each in ready:
        # The two of the second layer, then a pause of 150 ms, then the two of the first layer.
        assert [index // 2 for index in each["order"]] == [1, 1, 0, 0]
        assert each["after_us"][2] > 150_000
        assert each["limits"] == [1 << 20, 25 << 20]


def test_a_job_shorter_than_the_window_keeps_whole_steps(seen: dict[str, Overlap]) -> None:
    assert [step.step for step in seen["short"].steps] == [5, 6]


def test_the_programs_own_profile_is_used(watched: WatchedRun, seen: dict[str, Overlap]) -> None:
    overlap = seen["own_profiler"]
    assert (overlap.source, len(overlap.ranks), overlap.matched) == ("user", 2, 3)
    assert [step.step for step in overlap.steps] == [6, 7, 8]
    assert len(overlap.left_out) == 1  # ddpcheck did not profile that job
    assert all("/mine/" in rank.file for rank in overlap.ranks)


def test_one_timeline_of_all_ranks(watched: WatchedRun, tmp_path: Path) -> None:
    out = tmp_path / "all.json.gz"
    done = run_to_end([BIN / "ddpcheck", "report", watched.folder, "--trace", out], tmp_path, {})
    assert done.status == 0, str(done)
    document = json.loads(gzip.decompress(out.read_bytes()))
    assert {event["pid"] for event in document["traceEvents"]} == {0, 1}
    lanes = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {"steps", "compute", "bucket 0", "bucket 1"} <= lanes
    assert set(document["ddpcheck"]["clocks"]) == {"0", "1"}
