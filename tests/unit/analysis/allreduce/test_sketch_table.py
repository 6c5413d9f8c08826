"""Columns of sketches summed at once equal the sum of single sketches."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest

from ddpcheck.analysis.allreduce.mean_check import SketchTable, check_parts, mean_check, parts_of
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import pack, unpack

COLUMNS = 7


def texts(ranks: int, seed: int = 0) -> dict[int, str]:
    draw = random.Random(seed)

    def sketch() -> Sketch:
        norm = draw.choice([0.0, draw.random(), 1e-30, 1e20])
        return Sketch(draw.gauss(0, 1) * norm, norm, 0, 16)

    return {rank: pack(sketch() for _ in range(COLUMNS)) for rank in range(ranks)}


@pytest.mark.parametrize("ranks", [1, 2, 33])
def test_a_column_is_the_sum_of_its_sketches(ranks: int) -> None:
    packed = texts(ranks)
    table = SketchTable(packed)
    assert len(table) == COLUMNS
    for column in range(COLUMNS):
        one_by_one = parts_of(unpack(text)[column] for text in packed.values())
        parts = table.parts(column)
        assert parts.norms == one_by_one.norms
        assert parts.value == pytest.approx(one_by_one.value, rel=1e-12)
        assert parts.error == pytest.approx(one_by_one.error, rel=1e-12)
        assert parts.known


def test_rows_come_back_and_have_norms() -> None:
    packed = texts(3)
    table = SketchTable(packed)
    for rank, text in packed.items():
        row = unpack(text)
        assert table.row(rank) == row
        square = math.fsum(one.norm * one.norm_low for one in row)
        assert table.square(rank) == pytest.approx(square, rel=1e-12)
    assert table.row(7) == []
    every = [table.square(rank) or 0.0 for rank in packed]
    assert table.square() == pytest.approx(sum(every), rel=1e-12)


def test_a_shorter_row_adds_nothing_beyond_its_end() -> None:
    whole, short = pack([Sketch(1.0, 1.0, 0, 1), Sketch(2.0, 2.0, 0, 1)]), pack([Sketch(1.0, 1.0, 0, 1)])
    table = SketchTable({0: whole, 1: short})
    assert table.at(1, 1) is None
    assert sum(count for _, count in table.parts(1).norms) == 1
    assert table.parts(1).value == pytest.approx(2.0, rel=1e-6)


def test_non_finite_values_are_reported() -> None:
    table = SketchTable({0: pack([Sketch(0.0, 1.0, 3, 9)]), 1: pack([Sketch(1.0, 1.0, 0, 9)])})
    assert not table.parts(0).known
    assert table.parts(0).nonfinite
    assert table.square(0) is None
    assert not table.all_known(0)
    assert table.all_known(1)


def test_a_damaged_text_is_rejected() -> None:
    with pytest.raises(ValueError, match="sketch"):
        SketchTable({0: "00000"})


def test_one_rank_left_out() -> None:
    packed = texts(9, seed=4)
    table = SketchTable(packed)
    for column in range(COLUMNS):
        left = unpack(packed[4])[column]
        others = parts_of(unpack(text)[column] for rank, text in packed.items() if rank != 4)
        parts = table.parts(column).without(left)
        assert parts.norms == others.norms
        assert parts.value == pytest.approx(others.value, rel=1e-6, abs=1e-6 * (left.norm or 1e-30))


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 40])
def test_partial_sums_are_those_of_one_rank_after_the_other(ranks: int) -> None:
    draw = random.Random(ranks)
    sketches = unpack(pack(Sketch(0.0, draw.choice([1.0, 2.0, draw.random()]), 0, 1) for _ in range(ranks)))
    norms = sorted((one.norm for one in sketches), reverse=True)
    # All partial sums of two or more ranks except the total.
    expected = sum(list(accumulate(norms))[1:-1])
    assert parts_of(sketches).partial == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_column_is_checked_like_its_sketches() -> None:
    packed = texts(12, seed=2)
    table = SketchTable(packed)
    for column in range(COLUMNS):
        local = {rank: unpack(text)[column] for rank, text in packed.items()}
        (reduced,) = unpack(pack([Sketch(sum(p.value for p in local.values()) / 12, 1e19, 0, 16)]))
        by_sketch = mean_check(local, reduced, "float32", 16, 12)
        by_column = check_parts(table.parts(column), reduced, "float32", 16, 12)
        assert by_column.error == pytest.approx(by_sketch.error, rel=1e-9, abs=1e-9)
        assert by_column.bound == pytest.approx(by_sketch.bound, rel=1e-9)
