"""Evidence of a disagreement, and the elements in which two tensors differ."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.analysis.evidence import differing_elements, element_size, unravel_index, value
from ddpcheck.records.kinds.digests import Stage
from tests.helpers.run_builder import RunBuilder


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_values_match_torch(dtype: str) -> None:
    tensor = torch.tensor([0, 1, 3]).to(getattr(torch, dtype))
    data = bytes(tensor.view(torch.uint8).tolist())
    size = element_size(dtype)
    assert size == tensor.element_size()
    assert [value(data[at : at + size], dtype) for at in range(0, len(data), size)] == tensor.tolist()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_text(dtype: str) -> None:
    tensor = torch.tensor([1.5 - 2j], dtype=getattr(torch, dtype))
    data = bytes(torch.view_as_real(tensor).view(torch.uint8).flatten().tolist())
    assert (value(data, dtype), element_size(dtype)) == ("(1.5-2j)", tensor.element_size())


def test_unsupported_dtypes_are_hexadecimal() -> None:
    assert value(b"\x12", "float8_e4m3fn") == "0x12"
    assert value(b"\x34\x12", "uint16") == "0x1234"
    assert math.isnan(value(b"\x00\x00\xc0\x7f", "float32"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.sampled_from([1, 2, 4, 8]))
def test_differing_elements_are_found(pairs: list[tuple[int, int]], size: int) -> None:
    one = b"".join(a.to_bytes(size, "little") for a, _ in pairs)
    two = b"".join(b.to_bytes(size, "little") for _, b in pairs)
    expected = [index for index, (a, b) in enumerate(pairs) if a != b]
    assert differing_elements(one, two, size, 3) == (len(expected), expected[:3])


def test_differing_elements_far_apart() -> None:
    one = bytearray(4 * 100_000)
    two = bytearray(one)
    two[4 * 99_999] = 1
    two[4 * 8191 + 3] = 1
    assert differing_elements(bytes(one), bytes(two), 4, 5) == (2, [8191, 99_999])


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_an_index_matches_torch(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    index = data.draw(st.integers(0, total - 1))
    tensor = torch.arange(total).view(shape)
    assert tensor[tuple(unravel_index(index, shape))].item() == index


NAME = "body.bias"


def diverged(folder: Path, world_size: int = 2, outlier_rank: int = 1) -> RunBuilder:
    build = RunBuilder(folder, world_size).wrap().optimizer().train(3)
    return build.step(3, outliers={outlier_rank: [NAME]})


def elements(build: RunBuilder) -> dict[str, Any]:
    evidence: dict[str, Any] = dict(build.end().only("DDP201").evidence)
    assert evidence["parameters"] == {"count": 1, "of": 3, "names": [NAME]}
    values: dict[str, Any] = evidence.get("elements", {})
    return values


def test_groups_name_the_ranks_and_their_digests(tmp_path: Path) -> None:
    groups = diverged(tmp_path, 4, outlier_rank=2).end().only("DDP201").evidence["groups"]
    assert [group["ranks"] for group in groups] == [[0, 1, 3], [2]]
    assert len({group["digest"] for group in groups}) == 2


def test_without_captures_or_details_there_are_no_elements(tmp_path: Path) -> None:
    assert elements(diverged(tmp_path)) == {}


def test_elements_from_captures_of_that_step(tmp_path: Path) -> None:
    build = diverged(tmp_path)
    for rank in (0, 1):
        values = torch.tensor([1.0, 2.0, 3.0, 4.0])
        values[1:3] += rank
        build.capture(rank, 3, {NAME: values})
    evidence = elements(build)
    assert (evidence["parameter"], evidence["differing"], evidence["of"], evidence["step"]) == (NAME, 2, 4, 3)
    assert evidence["exact"] is True
    assert evidence["values"] == [
        {"index": [1], "by_rank": {"0": 2.0, "1": 3.0}},
        {"index": [2], "by_rank": {"0": 3.0, "1": 4.0}},
    ]


def test_a_capture_of_one_group_only_shows_nothing(tmp_path: Path) -> None:
    build = diverged(tmp_path, 4, outlier_rank=2)
    for rank in (0, 1):
        build.capture(rank, 3, {NAME: torch.zeros(4)})
    assert elements(build) == {}


def samples(build: RunBuilder) -> RunBuilder:
    build.detail(0, 3, [], {NAME: struct.pack("<4f", 1, 2, 3, 4)})
    return build.detail(1, 3, [NAME], {NAME: struct.pack("<4f", 1, 2, 9, 4)})


def test_elements_from_samples(tmp_path: Path) -> None:
    evidence = elements(samples(diverged(tmp_path)))
    assert (evidence["step"], evidence["exact"], evidence["differing"]) == (3, False, 1)
    assert evidence["values"] == [{"index": [2], "by_rank": {"0": 3.0, "1": 9.0}}]


def test_later_captures_give_the_count_and_samples_the_values(tmp_path: Path) -> None:
    build = samples(diverged(tmp_path)).step(4, outliers={1: [NAME]}).step(5, outliers={1: [NAME]})
    for rank in (0, 1):
        build.capture(rank, 5, {NAME: torch.full((4,), float(rank))})
    evidence = elements(build)
    assert (evidence["step"], evidence["counted_at_step"], evidence["differing"]) == (3, 5, 4)
    assert evidence["values"] == [{"index": [2], "by_rank": {"0": 3.0, "1": 9.0}}]


def test_captures_of_a_later_step_are_better_than_nothing(tmp_path: Path) -> None:
    build = diverged(tmp_path).step(4, outliers={1: [NAME]})
    for rank in (0, 1):
        build.capture(rank, 4, {NAME: torch.full((4,), float(rank))})
    evidence = elements(build)
    assert (evidence["step"], evidence["differing"]) == (4, 4)


def test_ranks_that_kept_different_steps_are_not_compared(tmp_path: Path) -> None:
    build = diverged(tmp_path).step(4, outliers={1: [NAME]})
    build.capture(0, 3, {NAME: torch.zeros(4)}).capture(1, 4, {NAME: torch.ones(4)})
    assert elements(build) == {}


def test_captures_of_different_optimizers_are_not_compared(tmp_path: Path) -> None:
    build = diverged(tmp_path)
    build.capture(0, 3, {NAME: torch.zeros(4)}, optimizer=0)
    build.capture(1, 3, {NAME: torch.ones(4)}, optimizer=1)
    assert elements(build) == {}


@pytest.mark.parametrize("damage", ["missing", "torn", "empty"])
def test_a_damaged_capture_is_ignored(tmp_path: Path, damage: str) -> None:
    build = diverged(tmp_path)
    for rank in (0, 1):
        build.capture(rank, 3, {NAME: torch.full((4,), float(rank))})
    (path,) = tmp_path.glob("captures/rank-1-*")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20] if damage == "torn" else b"")
    assert elements(build) == {}


def test_a_truncated_capture_reports_a_minimum(tmp_path: Path) -> None:
    build = diverged(tmp_path, 4, outlier_rank=2)
    for rank, size in ((0, 4), (2, 2), (3, 1)):
        build.capture(rank, 3, {NAME: torch.full((size,), float(rank == 2))})
    evidence = elements(build)
    assert (evidence["exact"], evidence["differing"], evidence["of"]) == (False, 2, 4)
    assert evidence["values"] == [
        {"index": [0], "by_rank": {"0": 0.0, "2": 1.0, "3": 0.0}},
        {"index": [1], "by_rank": {"0": 0.0, "2": 1.0}},
    ]


def test_many_ranks_are_represented_by_a_few_of_each_group(tmp_path: Path) -> None:
    build = diverged(tmp_path, 20, outlier_rank=19)
    for rank in range(20):
        build.capture(rank, 3, {NAME: torch.full((4,), float(rank == 19))})
    shown = elements(build)["values"][0]["by_rank"]
    assert len(shown) == 8
    assert shown["19"] == 1.0


def test_names_and_values_are_limited(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2)
    names = [f"layer{number}.weight" for number in range(50)]
    build.wrap(names).snapshot(Stage.PARAMS, 0, names, outliers={1: names}, optimizer=0)
    evidence = build.end().only("DDP201").evidence["parameters"]
    assert (evidence["count"], evidence["of"], len(evidence["names"])) == (50, 50, 10)
