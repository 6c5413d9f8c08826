"""Evidence: differing tensors, elements and values, from the records of the ranks."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcheck.records.kinds.digests import Stage
from tests.helpers.run_builder import RunBuilder

NAME = "body.bias"


def diverged(folder: Path, world_size: int = 2, odd_rank: int = 1) -> RunBuilder:
    build = RunBuilder(folder, world_size).wrap().optimizer().train(3)
    return build.step(3, outliers={odd_rank: [NAME]})


def elements(build: RunBuilder) -> dict[str, Any]:
    evidence: dict[str, Any] = dict(build.end().only("DDP201").evidence)
    assert evidence["parameters"] == {"count": 1, "of": 3, "names": [NAME]}
    values: dict[str, Any] = evidence.get("elements", {})
    return values


def test_groups_name_the_ranks_and_their_digests(tmp_path: Path) -> None:
    groups = diverged(tmp_path, 4, odd_rank=2).end().only("DDP201").evidence["groups"]
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
    build = diverged(tmp_path, 4, odd_rank=2)
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
    build = diverged(tmp_path, 4, odd_rank=2)
    for rank, size in ((0, 4), (2, 2), (3, 1)):
        build.capture(rank, 3, {NAME: torch.full((size,), float(rank == 2))})
    evidence = elements(build)
    assert (evidence["exact"], evidence["differing"], evidence["of"]) == (False, 2, 4)
    assert evidence["values"] == [
        {"index": [0], "by_rank": {"0": 0.0, "2": 1.0, "3": 0.0}},
        {"index": [1], "by_rank": {"0": 0.0, "2": 1.0}},
    ]


def test_many_ranks_are_represented_by_a_few_of_each_group(tmp_path: Path) -> None:
    build = diverged(tmp_path, 20, odd_rank=19)
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
