"""Compute intervals: short gaps are closed, and very many ranks are left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddpcheck.analysis.overlap.build import MOST_RANKS, computing
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.reader import load
from tests.helpers.trace_builder import all_reduce, described, kernel, step, write


def test_pieces_count_from_the_origin_and_only_pauses_that_show_are_kept(tmp_path: Path) -> None:
    for rank in range(2):
        events = [
            step(3, 0, 2000),
            *kernel("gemm", 100, 700, launched=50),
            # A pause of one microsecond in a step of more than a thousand, and one of three hundred.
            *kernel("relu", 701, 900, launched=51),
            *kernel("gemm", 1200, 1600 + rank, launched=52),
            *all_reduce(500, 1800, launched=60, **described(1000)),
        ]
        write(tmp_path / f"rank{rank}.json", events, rank=rank)
    traces = load([tmp_path]).traces
    result = analyse(traces)
    origin = result.origin_ns // 1000
    for rank, pieces in computing(traces, result).items():
        absolute = [(start // 1000 + origin, end // 1000 + origin) for start, end in pieces]
        assert absolute == [(100, 900), (1200, 1600 + rank)]
    assert computing([replace(traces[0], compute=())], result) == {0: ()}
    assert computing([traces[0]] * (MOST_RANKS + 1), result) == {}
