"""Traces on the terminal and as JSON: summary, layout and keys."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from ddpcheck.formatting import optional_size_text, rate_text, time_text
from ddpcheck.reports.json_report import trace_to_json
from ddpcheck.reports.terminal.charts import overlap_bar
from ddpcheck.reports.terminal.trace import render
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.model import Shares, TraceResult
from ddpcheck.traces.reader import load
from tests.helpers.paths import ROOT
from tests.helpers.trace_builder import all_reduce, described, kernel, write
from tests.unit.traces.test_merged import RANKS, traces


def result_of(tmp_path: Path, offset_us: float = 0.0) -> TraceResult:
    return analyse(load(traces(tmp_path, offset_us)).traces)


def alone(tmp_path: Path) -> TraceResult:
    events = [*all_reduce(100, 300, **described(1000, size=8)), *kernel("gemm", 150, 250)]
    return analyse(load([write(tmp_path / "rank0.json", events, 0, world_size=8)]).traces)


def rendered(result: TraceResult, width: int = 80, terminal: bool = False, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    render(result, console, **options)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_first_sentence_of_one_rank(tmp_path: Path) -> None:
    text = rendered(alone(tmp_path))
    assert text.startswith(
        "200 us of communication, 50.0 % hidden behind compute; 100 us exposed in 200 us.\n"
    )
    assert "Rank 0 of 8 given: bandwidths include waiting" in text
    assert "waited" not in text


def test_several_ranks(tmp_path: Path) -> None:
    text = " ".join(rendered(result_of(tmp_path)).split())
    assert "Rank 3 arrived last most often: in 5 of 5 collectives." in text
    assert "In 5 collectives a rank waited 375 us (mean) for the last rank to arrive" in text
    assert "DDP's buckets (medians)" in text
    assert "Clocks differed" not in text


def test_clocks(tmp_path: Path) -> None:
    text = " ".join(rendered(result_of(tmp_path, offset_us=5_000)).split())
    assert "Clock offsets were corrected by the ends of collectives: rank 1 by 5.0 ms (scatter" in text


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits(tmp_path: Path, width: int) -> None:
    for result in (alone(tmp_path), result_of(tmp_path, offset_us=5_000)):
        text = rendered(result, width, left_out=["x" * 200], merged=Path("/a/very/long/path" * 6))
        assert all(cell_len(line) <= width for line in text.splitlines())
        assert all(line == line.rstrip() for line in text.splitlines())


def test_colour_only_on_a_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in rendered(alone(tmp_path))
    assert "\x1b" in rendered(alone(tmp_path), terminal=True)


def test_bars_share_one_scale_and_lose_nothing() -> None:
    shares = Shares(
        span_ns=100, comm_ns=40, compute_ns=30, overlap_ns=10, exposed_ns=30, copy_ns=10, idle_ns=30
    )
    assert overlap_bar(shares, 100, 20).plain == "####==!!!!!!cc......"
    assert overlap_bar(shares, 200, 20).plain == "##=!!!c..."
    assert overlap_bar(shares, 0, 20).plain == ""


def test_units() -> None:
    assert [time_text(ns) for ns in (0, 900, 261_000, 46_876_493, 1_500_000_000, None)] == [
        "0 us",
        "1 us",
        "261 us",
        "46.9 ms",
        "1.50 s",
        "",
    ]
    assert [optional_size_text(size) for size in (424, 212_480, 8_196_000, None)] == [
        "424 B",
        "212.5 kB",
        "8.2 MB",
        "",
    ]
    assert [rate_text(rate) for rate in (32.09, 0.055, None)] == ["32.1 GB/s", "55 MB/s", ""]


def test_json(tmp_path: Path) -> None:
    document = json.loads(trace_to_json(result_of(tmp_path), ["x is no trace"]))
    assert document["schema"] == 1
    assert [rank["rank"] for rank in document["ranks"]] == list(range(RANKS))
    assert document["transfer_ns"] == sum(each["transfer_ns"] for each in document["collectives"])
    assert document["left_out"] == ["x is no trace"]
    first = document["ranks"][0]
    assert first["file"].endswith("rank0.json")
    assert first["exposed_ns"] == first["comm_ns"] - first["overlap_ns"]
    assert (first["wait_ns"], first["last_arrivals"]) == (500_000, 0)
    assert first["steps"][4]["step"] == 4
    collective = document["collectives"][0]
    assert (collective["kind"], collective["bytes"], collective["bucket"]) == ("all_reduce", 4000, 0)
    assert len(collective["parts"]) == RANKS


def test_the_document_is_described() -> None:
    page = (ROOT / "docs" / "trace.md").read_text()
    events = [*all_reduce(0, 10, **described(8)), *kernel("gemm", 5, 7)]
    keys = set()
    for holder in _objects(_document(events)):
        keys |= holder.keys()
    assert not [key for key in sorted(keys) if f"`{key}`" not in page]


def _document(events: list[dict[str, object]]) -> dict[str, object]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = [write(Path(folder) / f"rank{rank}.json", events, rank) for rank in range(2)]
        document: dict[str, object] = json.loads(trace_to_json(analyse(load(files).traces)))
    return document


def _objects(value: object) -> list[dict[str, object]]:
    if isinstance(value, dict):
        return [value, *(item for each in value.values() for item in _objects(each))]
    if isinstance(value, list):
        return [item for each in value for item in _objects(each)]
    return []
