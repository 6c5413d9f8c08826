"""DDP307: parts of samples that differ across ranks, with what is equal and what is drawn at random."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.records.kinds.data import LabelsRecord, LoaderRecord, SamplesRecord
from tests.helpers.run_builder import RunBuilder

LENGTH, EPOCHS = 60, 6
# What a rank sees of a part of a sample: by rank, epoch and index.
Part = Callable[[int, int, int], object]


def label(rank: int, epoch: int, index: int) -> int:
    return index % 5


def renamed(rank: int, epoch: int, index: int) -> int:
    return (index + rank) % 5


def content(rank: int, epoch: int, index: int) -> int:
    return index


def augmented(rank: int, epoch: int, index: int) -> tuple[int, int, int]:
    return rank, epoch, index


def own(rank: int, epoch: int, index: int) -> tuple[int, int]:
    return rank, index


def reordered(rank: int, epoch: int, index: int) -> int:
    return (index + 7 * rank) % LENGTH


def noisy(rank: int, epoch: int, index: int) -> int:
    return random.Random(f"{rank} {epoch} {index}").randrange(5)


def built(
    folder: Path, kinds: str, *parts: Part, replicas: int | None = 2, epochs: int = EPOCHS
) -> RunBuilder:
    run = RunBuilder(folder, 2).wrap().optimizer().train(4)
    for rank in run.ranks:
        run.add(rank, LoaderRecord(0, LENGTH, "DistributedSampler", replicas=replicas, share=rank))
    for epoch in range(epochs):
        order = list(range(LENGTH))
        random.Random(epoch).shuffle(order)
        for rank in run.ranks:
            indices = order[rank::2]
            digests = ["".join(digest(part(rank, epoch, index)) for part in parts) for index in indices]
            run.add(rank, SamplesRecord(0, epoch, 0, 4 * epoch, kinds, indices, digests))
    return run.end()


def digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=4).hexdigest()


@pytest.mark.parametrize(
    ("kinds", "parts", "severity", "cause"),
    [
        ("fi", (content, renamed), Severity.ERROR, "labels"),
        # Nothing but a renaming of the classes is seen where inputs are augmented.
        ("fi", (augmented, renamed), Severity.ERROR, "labels"),
        ("Ii", (own, label), Severity.WARNING, "table of its own"),
        ("fi", (own, label), Severity.NOTE, "in its own way"),
        ("f", (reordered,), Severity.WARNING, "another order"),
    ],
)
def test_differing_parts(
    tmp_path: Path, kinds: str, parts: tuple[Part, ...], severity: Severity, cause: str
) -> None:
    [finding] = built(tmp_path, kinds, *parts).findings("DDP307")
    assert (finding.severity, finding.ranks, finding.stage) == (severity, (0, 1), "forward")
    assert cause in finding.cause
    # With labels and inputs, a difference is first seen when a rank gets a sample that another rank had before.
    assert finding.step == (0 if kinds == "f" else 4)


@pytest.mark.parametrize(
    ("kinds", "parts"),
    [
        ("fi", (content, label)),
        ("fi", (augmented, label)),
        ("fi", (content, noisy)),
        ("fI", (content, augmented)),
        # Data that each rank draws itself.
        ("fi", (own, lambda rank, epoch, index: random.Random(f"{rank} {index}").randrange(5))),
        ("f", (own,)),
    ],
)
def test_parts_that_may_differ(tmp_path: Path, kinds: str, parts: tuple[Part, ...]) -> None:
    assert built(tmp_path, kinds, *parts).findings("DDP307") == []


def test_an_index_of_an_own_dataset_names_nothing(tmp_path: Path) -> None:
    assert built(tmp_path, "fi", content, renamed, replicas=None).findings("DDP307") == []


def test_one_epoch_does_not_show_what_is_random(tmp_path: Path) -> None:
    assert built(tmp_path, "fi", content, renamed, epochs=1).findings("DDP307") == []


@pytest.mark.parametrize(("members", "found"), [(["m"], ["DDP307"]), (["n"], []), ([""], [])])
def test_lists_in_another_order(tmp_path: Path, members: list[str], found: list[str]) -> None:
    run = RunBuilder(tmp_path, 2).wrap().optimizer().train(4)
    for rank in run.ranks:
        kept = ["m"] if rank == 0 and members[0] else members
        columns, sampler = [f"order of {rank}"], "DistributedSampler"
        run.add(rank, LoaderRecord(0, 40, sampler, replicas=2, share=rank, columns=columns, members=kept))
    assert [finding.code for finding in run.end().findings()] == found


SAME = {"0": 0, "1": 1, "#ab": 2}


def mapped(folder: Path, *targets: dict[str, int], marks: str = "", world_size: int = 3) -> RunBuilder:
    run = RunBuilder(folder, world_size).wrap().optimizer().train(20)
    for rank in run.ranks:
        mark = marks[rank] if marks else "m"
        run.add(
            rank, LoaderRecord(0, LENGTH, "DistributedSampler", replicas=world_size, share=rank, mark=mark)
        )
        run.add(rank, LabelsRecord(0, 0, 0, 0, 0, 4 if targets[rank] != SAME else 0, targets[rank]))
    return run.end()


def test_labels_that_one_rank_maps_to_other_classes(tmp_path: Path) -> None:
    run = mapped(tmp_path, SAME, {"0": 1, "1": 1, "9": 3}, SAME)
    finding = run.only("DDP307")
    assert (finding.severity, finding.step, finding.stage, finding.ranks) == (
        Severity.ERROR,
        4,
        "backward",
        (1,),
    )
    assert finding.evidence["classes"] == {"0": {"rank 0": 0, "rank 1": 1, "rank 2": 0}}
    assert "after the data loader" in finding.cause


@pytest.mark.parametrize(
    ("targets", "marks"),
    [
        ((SAME, SAME, SAME), ""),
        # Labels that a rank does not have, leaves out, or maps by chance.
        ((SAME, {"7": 3}, {}), ""),
        ((SAME, {"0": -100, "1": 1}, SAME), ""),
        # Data of a rank's own.
        ((SAME, {"0": 1}, SAME), "abc"),
    ],
)
def test_mappings_that_agree_or_cannot_be_compared(
    tmp_path: Path, targets: tuple[dict[str, int], ...], marks: str
) -> None:
    assert mapped(tmp_path, *targets, marks=marks).findings() == []


def test_without_a_majority_all_ranks_are_named(tmp_path: Path) -> None:
    finding = mapped(tmp_path, SAME, {"0": 1}, world_size=2).only("DDP307")
    assert finding.ranks == (0, 1)


def test_a_mapping_that_is_known_no_more(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path, 2).wrap().optimizer().train(20)
    for rank in run.ranks:
        run.add(rank, LoaderRecord(0, LENGTH, "DistributedSampler", replicas=2, share=rank))
        run.add(rank, LabelsRecord(0, 0, 0, 0, 0, 0, {"0": rank}))
        run.add(rank, LabelsRecord(0, 0, 0, 0, 0, 9, {}))
    assert run.end().findings() == []
