"""From events to figures, on small traces computed by hand."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from ddpcheck.errors import TraceIsTimeline, TraceUnreadable, TraceWithoutCommunication
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.merged import write_merged
from ddpcheck.traces.model import TraceResult
from ddpcheck.traces.rank_trace import RankTrace
from ddpcheck.traces.reader import LoadedTraces, load
from tests.helpers.trace_builder import (
    BACKWARD_THREAD,
    Event,
    all_reduce,
    described,
    kernel,
    span,
    step,
    write,
)


def only(path: Path) -> RankTrace:
    (trace,) = load([path]).traces
    return trace


def result_of(tmp_path: Path, *ranks: list[Event]) -> TraceResult:
    files = [write(tmp_path / f"{number}.json", events, number) for number, events in enumerate(ranks)]
    return analyse(load(files).traces)


def test_shares(tmp_path: Path) -> None:
    events = [
        *all_reduce(100, 200),
        *all_reduce(150, 250),
        *kernel("gemm", 180, 220),
        *kernel("gemm", 300, 310),
        span("gpu_memcpy", "Memcpy HtoD", 240, 280),
        span("gpu_user_annotation", "nccl:all_reduce", 0, 1000),
    ]
    (rank,) = result_of(tmp_path, events).ranks
    shares = rank.shares
    assert (shares.comm_ns, shares.compute_ns) == (150_000, 50_000)
    assert (shares.overlap_ns, shares.exposed_ns, shares.overlap_pct) == (40_000, 110_000, 26.667)
    # 210 us from the first to the last, of which 160 communicate or compute and 30 only copy.
    assert (shares.span_ns, shares.copy_ns, shares.idle_ns) == (210_000, 30_000, 20_000)
    assert (rank.wait_ns, rank.last_arrivals, rank.clock) == (None, None, None)


def test_work_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    events = [
        step(4, 0, 100),
        step(5, 100, 200),
        *kernel("gemm", 150, 160, launched=50),
        *all_reduce(155, 175, launched=60),
        *kernel("gemm", 240, 250, launched=150),
        # Launched before the recording began: of no step.
        *all_reduce(10, 20),
    ]
    (rank,) = result_of(tmp_path, events).ranks
    first, second = rank.steps
    assert (first.step, first.shares.comm_ns, first.shares.overlap_ns) == (4, 20_000, 5_000)
    assert first.start_ns == 150_000
    assert (second.step, second.shares.comm_ns, second.shares.compute_ns) == (5, 0, 10_000)
    assert rank.shares.comm_ns == 30_000


def test_without_marks_the_file_is_one_step(tmp_path: Path) -> None:
    (rank,) = result_of(tmp_path, all_reduce(0, 10)).ranks
    (only_step,) = rank.steps
    assert (only_step.step, only_step.shares) == (None, rank.shares)


def backward(start: float, end: float) -> Event:
    name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    return span("cpu_op", name, start, end, tid=BACKWARD_THREAD)


def launched(start: float, end: float, at: float, tid: int) -> list[Event]:
    """An all_reduce with everything around its launch, on one thread."""
    correlation = round(start * 1000)
    args = described(1000)
    return [
        span("kernel", "ncclDevKernel_Generic(x)", start, end, tid=20, stream=20, correlation=correlation),
        span("cuda_runtime", "cudaLaunchKernel", at + 3, at + 4, tid=tid, correlation=correlation),
        span("cpu_op", "c10d::allreduce_", at, at + 8, tid=tid),
        span("cpu_op", "record_param_comms", at + 1, at + 7, tid=tid, **args),
        span("user_annotation", "nccl:all_reduce", at + 2, at + 6, tid=tid),
    ]


def test_buckets_are_what_the_backward_started(tmp_path: Path) -> None:
    events = [
        step(1, 0, 500),
        backward(90, 120),
        backward(190, 220),
        *launched(110, 150, at=100, tid=BACKWARD_THREAD),
        *launched(210, 280, at=200, tid=BACKWARD_THREAD),
        # The user's own, of a loss: no bucket.
        *launched(400, 410, at=390, tid=1),
        *kernel("gemm", 130, 220, launched=20),
    ]
    result = result_of(tmp_path, events)
    assert [each.bucket for each in result.collectives] == [0, 1, None]
    assert {each.kind for each in result.collectives} == {"all_reduce"}
    assert {(each.bytes, each.dtype, each.group) for each in result.collectives} == {(4000, "Float", "0")}
    (part,) = result.collectives[0].parts
    assert (part.ready_ns, part.start_ns, part.end_ns) == (100_000, 110_000, 150_000)
    assert (part.hidden_ns, part.exposed_ns) == (20_000, 20_000)
    assert [(each.bucket, each.bytes, each.queued_ns) for each in result.buckets] == [
        (0, 4000, 10_000),
        (1, 4000, 10_000),
    ]


def test_bandwidth(tmp_path: Path) -> None:
    events = all_reduce(0, 100, **described(1_000_000, size=4))
    (collective,) = result_of(tmp_path, events).collectives
    assert (collective.algbw_gbps, collective.busbw_gbps) == (40.0, 60.0)


@pytest.mark.parametrize(
    ("args", "elements", "size"),
    [
        ({"In msg nelems": 10, "dtype": "BFloat16"}, 10, 20),
        ({"In msg size": 10, "dtype": "Double"}, 10, 80),
        ({"Input Dims": [[5, 2]], "Input type": ["float"]}, 10, 40),
        ({"Input Dims": [[5], [5], []], "Input type": ["long int", "long int", ""]}, 10, 80),
        ({"In msg nelems": 10, "dtype": "Float8_e4m3fn"}, 10, 10),
        ({"In msg nelems": 10, "dtype": "Quaternion"}, 10, None),
        ({"Input Dims": "much", "Input type": ["float"]}, None, None),
        ({}, None, None),
    ],
)
def test_messages(tmp_path: Path, args: dict[str, object], elements: int | None, size: int | None) -> None:
    (collective,) = result_of(tmp_path, all_reduce(0, 100, **args)).collectives
    assert (collective.elements, collective.bytes) == (elements, size)


def test_waiting_and_the_last_rank(tmp_path: Path) -> None:
    result = result_of(
        tmp_path,
        [*all_reduce(0, 100), *all_reduce(250, 300), *all_reduce(400, 410)],
        [*all_reduce(90, 100), *all_reduce(200, 300), *all_reduce(400, 411)],
        [*all_reduce(40, 101), *all_reduce(290, 300), *all_reduce(399, 410)],
    )
    assert [rank.wait_ns for rank in result.ranks] == [130_000, 90_000, 51_000]
    # Two came together at the last one: no rank waited for one of them only.
    assert [rank.last_arrivals for rank in result.ranks] == [0, 1, 1]
    assert result.transfer_ns == 30_000
    assert [each.skew_ns for each in result.collectives] == [90_000, 90_000, 1_000]
    assert [each.last_rank for each in result.collectives] == [1, 2, None]
    assert result.headline.most_often_last is None
    assert (result.matched, result.unmatched) == (3, 0)


def test_sequence_numbers_match_what_order_cannot(tmp_path: Path) -> None:
    arguments = [described(8, Seq=number) for number in range(3)]
    result = result_of(
        tmp_path,
        [*all_reduce(0, 10, **arguments[0]), *all_reduce(20, 30, **arguments[1])],
        [*all_reduce(25, 30, **arguments[1]), *all_reduce(40, 50, **arguments[2])],
    )
    assert (result.matched, result.unmatched) == (1, 2)
    assert [rank.wait_ns for rank in result.ranks] == [5_000, 0]


def test_groups_are_separate(tmp_path: Path) -> None:
    one, other = described(8, group="1"), described(8, group="2")
    result = result_of(
        tmp_path,
        [*all_reduce(0, 10, **one), *all_reduce(20, 30, **other)],
        [*all_reduce(1, 10, **other), *all_reduce(25, 30, **one)],
    )
    assert {each.group: each.skew_ns for each in result.collectives} == {"1": 25_000, "2": 19_000}


def test_unequal_counts_are_not_guessed(tmp_path: Path) -> None:
    result = result_of(tmp_path, all_reduce(0, 10), [*all_reduce(0, 10), *all_reduce(20, 30)])
    assert (result.matched, result.unmatched, result.transfer_ns) == (0, 3, None)
    assert [rank.wait_ns for rank in result.ranks] == [None, None]


def gloo(name: str, start: float, end: float, tid: int) -> Event:
    return span("user_annotation", name, start, end, tid=tid)


def test_spans_of_gloo(tmp_path: Path) -> None:
    events = [
        gloo("gloo:all_reduce", 110, 200, tid=31),
        gloo("gloo:all_reduce", 150, 260, tid=32),
        span("cpu_op", "aten::mm", 50, 120),
        span("cpu_op", "aten::copy_", 60, 70),
        span("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 130, 145),
        span("cpu_op", "c10d::allreduce_", 100, 105, tid=2),
        # Inside a collective's call the thread does not compute.
        span("cpu_op", "c10d::allreduce_", 132, 142),
        # What gloo's own threads run belongs to the communication.
        span("cpu_op", "aten::add", 155, 165, tid=32),
    ]
    result = result_of(tmp_path, events)
    (rank,) = result.ranks
    assert rank.source == "spans of gloo"
    assert (rank.shares.comm_ns, rank.shares.compute_ns, rank.shares.overlap_ns) == (150_000, 75_000, 15_000)
    assert [each.parts[0].ready_ns for each in result.collectives] == [50_000, 82_000]


def test_absolute_and_base_times_agree(tmp_path: Path) -> None:
    base = 1_700_000_000_000_000_000
    absolute = [{**event, "ts": event["ts"] + base // 1000} for event in all_reduce(7, 10)]
    files = [
        write(tmp_path / "0.json", absolute, 0),
        write(tmp_path / "1.json", all_reduce(2, 10), 1, baseTimeNanoseconds=base),
    ]
    assert [rank.wait_ns for rank in analyse(load(files).traces).ranks] == [0, 5_000]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.json", 3), ("worker12_step_7.json", 12), ("host_r5.pt.trace.json", 5), ("whatever.json", 0)],
)
def test_rank_from_the_name(tmp_path: Path, name: str, rank: int) -> None:
    assert only(write(tmp_path / name, all_reduce(0, 1))).rank == rank


def test_rank_from_the_trace_itself(tmp_path: Path) -> None:
    assert only(write(tmp_path / "rank3.json", all_reduce(0, 1), rank=6)).rank == 6
    marked = [*all_reduce(0, 1), span("cpu_op", "record_param_comms", 0, 1, Rank=4)]
    assert only(write(tmp_path / "rank3.json", marked)).rank == 4


def test_names_without_a_rank_are_numbered(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.json", all_reduce(0, 1)) for name in ("b", "a", "c")]
    loaded = load(files)
    assert [(trace.rank, Path(trace.file).name) for trace in loaded.traces] == [
        (0, "a.json"),
        (1, "b.json"),
        (2, "c.json"),
    ]


def test_one_rank_twice(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.json", all_reduce(0, 1), rank=1) for name in "ab"]
    with pytest.raises(TraceUnreadable, match="are both of rank 1"):
        load(files)


def packed(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "traces"
    folder.mkdir()
    write(folder / "rank0.json", all_reduce(0, 10), 0)
    plain = write(tmp_path / "plain", all_reduce(5, 10), 1)
    (folder / "rank1.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    paths = [folder]
    for ending, mode in ((".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz")):
        paths.append(tmp_path / f"all{ending}")
        with tarfile.open(paths[-1], mode) as archive:  # type: ignore[call-overload]
            archive.add(folder, "traces")
    return paths


def test_folders_and_archives(tmp_path: Path) -> None:
    results = [analyse(load([path]).traces) for path in packed(tmp_path)]
    assert [[rank.wait_ns for rank in result.ranks] for result in results] == [[5_000, 0]] * 4


def test_an_archive_that_is_cut_off(tmp_path: Path) -> None:
    for path in packed(tmp_path)[1:]:
        data = path.read_bytes()
        # The last 10 kB of a plain archive are padding.
        within = 3000 if path.suffix == ".tar" else len(data)
        for share in range(1, 10):
            cut = path.with_name(f"cut-{path.name}")
            cut.write_bytes(data[: within * share // 10])
            with pytest.raises(TraceUnreadable, match=r"cut off|not a complete tar archive|no trace in"):
                load([cut])


def test_a_folder_names_its_bad_files(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", all_reduce(0, 10), 0)
    (tmp_path / "rank1.json").write_text((tmp_path / "rank0.json").read_text()[:-40])
    (tmp_path / "settings.json").write_text(json.dumps({"lr": 0.1}))
    loaded: LoadedTraces = load([tmp_path])
    assert [trace.rank for trace in loaded.traces] == [0]
    assert [message.partition(" is ")[2].partition(":")[0] for message in loaded.left_out] == [
        "cut off",
        "JSON but not a trace",
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "contains no communication"),
        (kernel("gemm", 0, 1), "contains no communication"),
        ([span("user_annotation", "nccl:all_reduce", 0, 1)], "record the trace with ProfilerActivity.CUDA"),
    ],
)
def test_no_communication(tmp_path: Path, events: list[Event], message: str) -> None:
    with pytest.raises(TraceWithoutCommunication, match=message):
        load([write(tmp_path / "rank0.json", events)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("all.tar", b"no archive", "is not a complete tar archive"),
        ("rank0.json.gz", b"\x1f\x8b\x08\x00", "cut off"),
        (
            "trace.json",
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x", "ts": "soon"}]}',
            "invalid event",
        ),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceUnreadable, match=message):
        load([tmp_path / name])


def test_empty_input(tmp_path: Path) -> None:
    with pytest.raises(TraceUnreadable, match="there is no file"):
        load([tmp_path / "nowhere.json"])
    with pytest.raises(TraceUnreadable, match="there is no trace in the folder"):
        load([tmp_path])


def test_a_timeline_in_the_folder_is_skipped(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", all_reduce(0, 10), 0)
    loaded = load([tmp_path])
    write_merged(loaded.traces, analyse(loaded.traces), tmp_path / "all.json")
    again = load([tmp_path])
    assert (len(again.traces), again.left_out) == (1, ())
    with pytest.raises(TraceIsTimeline, match="pass the original traces instead"):
        load([tmp_path / "all.json"])


def test_pairs_are_not_compared(tmp_path: Path) -> None:
    args = {"Collective name": "send"}
    ranks = [kernel("ncclDevKernel_SendRecv(x)", start, 50, **args) for start in (0, 20)]
    result = result_of(tmp_path, *ranks)
    assert [each.kind for each in result.collectives] == ["send", "send"]
    assert (result.matched, result.unmatched) == (0, 2)


def test_events_without_a_name_or_an_end(tmp_path: Path) -> None:
    running = {**all_reduce(5, 10)[0], "dur": -1}
    nameless = {**all_reduce(5, 10)[0], "name": None}
    outlier = {**kernel("gemm", 0, 2)[0], "args": True}
    (rank,) = result_of(tmp_path, [*all_reduce(0, 2), running, nameless, outlier]).ranks
    assert (rank.collectives, rank.shares.comm_ns, rank.shares.overlap_ns) == (2, 2_000, 2_000)
