"""DDP213: ranks train in different states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcheck.records.kinds.modules import StructureRecord
from ddpcheck.records.kinds.rank import FaultRecord
from ddpcheck.records.kinds.state import LossSettingsRecord, StateRecord
from tests.helpers.run_builder import RunBuilder

START = {
    "autocast": False,
    "default_dtype": "float32",
    "float32_matmul_precision": "highest",
    "threads": 1,
    ":training": True,
    "drop:p": 0.1,
}


def run(folder: Path, world_size: int = 3, steps: int = 12) -> RunBuilder:
    build = RunBuilder(folder, world_size).wrap().optimizer().train(steps)
    for rank in build.ranks:
        build.add(rank, StateRecord(0, 0, dict(START), "/home/me/train.py:7", every=4))
    return build


def change(build: RunBuilder, rank: int, step: int, last: bool = False, **changed: Any) -> RunBuilder:
    keys = {key.replace("__", ":"): value for key, value in changed.items()}
    build.add(rank, StateRecord(0, step, keys, "/home/me/train.py:9", every=4, last=last))
    return build


def test_equal_states(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        change(build, rank, 5, __training=False)
    assert build.end().findings() == []


def test_a_rank_in_evaluation_mode(tmp_path: Path) -> None:
    finding = change(run(tmp_path), 1, 5, __training=False).end().only("DDP213")
    assert (finding.severity.value, finding.step, finding.ranks) == ("error", 5, (1,))
    assert "evaluation mode on rank 1" in finding.cause
    assert finding.evidence["forward_at"] == "/home/me/train.py:9"
    assert finding.evidence["steps"] == [5, None]


def test_it_ends_when_the_rank_returns(tmp_path: Path) -> None:
    build = change(run(tmp_path), 2, 5, __training=False)
    finding = change(build, 2, 6, __training=True).end().only("DDP213")
    assert (finding.step, finding.evidence["steps"]) == (5, [5, 5])


def test_a_submodule_that_another_rank_read_later_is_no_difference(tmp_path: Path) -> None:
    """It is read at intervals: one rank had a reason to read everything earlier."""
    build = run(tmp_path)
    change(build, 0, 5, bn__training=False)
    for rank in (1, 2):
        change(build, rank, 8, bn__training=False)
    assert build.end().findings() == []


def test_a_submodule(tmp_path: Path) -> None:
    finding = change(run(tmp_path), 0, 4, bn__training=False).end().only("DDP213")
    assert (finding.step, finding.ranks) == (4, (0,))
    assert finding.cause.startswith("bn is in evaluation mode")


def test_a_submodule_that_follows_the_whole_module_does_not_differ_itself(tmp_path: Path) -> None:
    build = run(tmp_path)
    change(build, 0, 4, bn__training=False)
    change(build, 1, 4, bn__training=False, __training=False)
    change(build, 2, 4, bn__training=False)
    finding = build.end().only("DDP213")
    assert finding.evidence["count"] == 1


@pytest.mark.parametrize(
    ("changed", "severity"),
    [
        ({"drop__p": 0.5}, "error"),
        ({"body.bias__requires_grad": False}, "error"),
        ({"autocast": True, "autocast.dtype": "bfloat16"}, "warning"),
        ({"default_dtype": "float64"}, "warning"),
        ({"threads": 4}, "note"),
    ],
)
def test_severities(tmp_path: Path, changed: dict[str, Any], severity: str) -> None:
    (finding,) = change(run(tmp_path), 1, 4, **changed).end().findings()
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP213", severity, (1,))
    assert (finding.parameter == "body.bias") == ("body.bias__requires_grad" in changed)


def test_two_ranks_have_no_majority(tmp_path: Path) -> None:
    finding = change(run(tmp_path, 2), 1, 5, __training=False).end().only("DDP213")
    assert finding.ranks == (0, 1)


def test_a_parameter_that_was_unfrozen_is_reported_by_ddp104_alone(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in (1, 2):
        change(build, rank, 4, **{"body.bias__requires_grad": False})
    build.add(0, StructureRecord(0, "unfrozen", "body.bias", 4, 4))
    assert build.end().findings("DDP213") == []


def test_a_rank_that_ended_or_lost_the_probe_is_not_compared(tmp_path: Path) -> None:
    build = change(run(tmp_path), 1, 5, __training=False)
    build.add(1, FaultRecord("program_state", "before_forward", "ValueError: no", "", 1))
    assert build.end().findings("DDP213") == []


def test_after_its_last_record_a_state_is_unknown(tmp_path: Path) -> None:
    build = change(run(tmp_path), 1, 4, last=True, other=1)
    for rank in (0, 2):
        change(build, rank, 6, __training=False)
    assert build.end().findings("DDP213") == []


def test_a_state_after_the_last_step_of_a_rank(tmp_path: Path) -> None:
    assert change(run(tmp_path), 1, 12, __training=False).end().findings() == []


def test_another_hash_seed_is_a_note(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        change(build, rank, 0, hash_seed="0" if rank == 2 else "random")
    [finding] = [each for each in build.end().report().findings if each.code == "DDP213"]
    assert (finding.severity.value, finding.ranks) == ("note", (2,))


def test_settings_are_named_with_their_modules(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        change(build, rank, 0, norm__eps=1e-3 if rank == 1 else 1e-5, drop__p=0.5 if rank == 1 else 0.1)
    assert "eps of norm; p of drop" in build.end().only("DDP213").cause


def with_losses(folder: Path, steps: int = 12, **of_rank_1: Any) -> RunBuilder:
    build = run(folder, steps=steps)
    for rank in build.ranks:
        settings = {"ignore_index": -100, "label_smoothing": 0.0, "weight": ""}
        settings.update(of_rank_1 if rank == 1 else {})
        known = {name: value for name, value in settings.items() if value is not None}
        build.add(rank, LossSettingsRecord(0, 0, ["NllLoss"], [known], "/home/me/train.py:8"))
    return build.end()


def test_another_setting_of_the_loss(tmp_path: Path) -> None:
    finding = with_losses(tmp_path, label_smoothing=0.1).only("DDP213")
    assert (finding.severity.value, finding.step, finding.ranks) == ("warning", 0, (1,))
    assert "label smoothing of the loss differs: 0.0 on ranks 0 and 2; 0.1 on rank 1" in finding.cause
    assert finding.evidence["backward_at"] == "/home/me/train.py:8"


def test_other_weights_of_classes_are_a_note(tmp_path: Path) -> None:
    [finding] = with_losses(tmp_path, weight="0a1b2c3d").findings()
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP213", "note", (1,))


def test_what_could_not_be_read_of_a_loss_is_not_compared(tmp_path: Path) -> None:
    assert with_losses(tmp_path, weight=None).findings() == []


def test_other_functions_are_not_compared(tmp_path: Path) -> None:
    build = run(tmp_path)
    for rank in build.ranks:
        name, settings = ("HuberLoss", {"delta": 1.0}) if rank == 1 else ("NllLoss", {"ignore_index": -100})
        build.add(rank, LossSettingsRecord(0, 0, [name], [settings]))
    assert build.end().findings() == []
