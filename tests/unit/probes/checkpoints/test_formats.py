"""safetensors and torch.distributed.checkpoint: which tensors came from which file, and what was not asked for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ddpcheck.guard import GUARD
from ddpcheck.probes.checkpoints.formats import DISTRIBUTED, SAFETENSORS, LaterImports
from ddpcheck.probes.checkpoints.tracker import CheckpointTracker
from ddpcheck.records.kinds.checkpoints import StateKind

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def tracker() -> Iterator[CheckpointTracker]:
    faults: list[Any] = []
    GUARD.report_to(lambda *fault: faults.append(fault))
    planner = sys.modules[f"{DISTRIBUTED}.default_planner"].DefaultLoadPlanner
    before = (safetensors.safe_open, dcp.load, dcp.save, planner.set_up_planner, list(sys.meta_path))
    tracker = CheckpointTracker()
    tracker.install()
    tracker.patch_formats()
    tracker.patch_formats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield tracker
    tracker.remove()
    assert faults == []
    assert before == (safetensors.safe_open, dcp.load, dcp.save, planner.set_up_planner, list(sys.meta_path))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16))


def test_tensors_of_safetensors_are_followed(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module, path = build(), tmp_path / "model.safetensors"
    safetensors.save_file(module.state_dict(), path)
    weights = safetensors.load_file(path)
    assert torch.equal(weights["0.weight"], module.state_dict()["0.weight"])
    [file] = tracker.files
    assert (file.path, file.holds, len(file.tensors)) == (str(path), {StateKind.MODEL}, 4)
    build().load_state_dict({f"module.{name}": tensor for name, tensor in weights.items()}, strict=False)
    [load] = tracker.modules
    assert (len(load.loaded), len(load.misnamed)) == (0, 4)
    safetensors.load_model(build(), path)
    assert len(tracker.modules[-1].loaded) == 4


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = build()
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def test_a_distributed_checkpoint_is_followed(tracker: CheckpointTracker, tmp_path: Path) -> None:
    saves: list[tuple[str, set[StateKind]]] = []
    tracker.on_saved = lambda path, kinds: saves.append((path, kinds))
    module, optimizer = trained()
    dcp.save(
        {"model": module.bfloat16().state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path
    )
    assert saves == [(str(tmp_path / ".metadata"), {StateKind.MODEL, StateKind.OPTIMIZER})]
    again, fresh = build(), torch.optim.Adam(build().parameters())
    state = {"model": {k: v.clone() for k, v in again.state_dict().items()}, "optimizer": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    # torch reads each tensor with torch.load, but none of these is a state dict.
    [file] = tracker.files
    assert file.path == str(tmp_path)
    assert file.key
    assert file.not_requested == 4
    again.load_state_dict(state["model"])
    filled, load = tracker.modules
    assert len(load.loaded) == 4
    # The load itself filled copies.
    assert (len(filled.filled), filled.loaded_into(list(again.parameters()))) == (4, [])
    # As it is stored, not as it was read.
    assert {stored.dtype for stored in file.tensors} == {torch.bfloat16}


def test_a_state_that_is_asked_for_is_no_fault(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module, optimizer = trained()
    dcp.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    again, second = trained()
    state = {"model": again.state_dict(), "optimizer": second.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    second.load_state_dict(state["optimizer"])
    [file] = tracker.files
    assert file.not_requested == 0
    assert tracker.optimizers[0].contents.entries == 4


def test_a_load_into_the_tensors_of_the_module(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module = build()
    dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path)
    again, other = build(), build()
    dcp.load({"model": again.state_dict()}, checkpoint_id=tmp_path)
    [load] = tracker.modules
    parameters = list(again.parameters())
    assert [target.name for target in load.loaded_into(parameters)] == list(dict(again.named_parameters()))
    assert load.loaded_into(list(other.parameters())) == []
    # Memory that is gone is nobody's, also where another tensor has its address.
    del again, parameters
    assert load.loaded_into([torch.empty(16, 6) for _ in range(8)]) == []
    assert all(filled.key() is None for filled in load.filled)


def test_a_library_that_is_imported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    finder = LaterImports({"imported_later": lambda: seen.append("imported"), SAFETENSORS: list})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import imported_later  # type: ignore[import-not-found]

    assert (imported_later.value, seen) == (1, ["imported"])
    sys.modules.pop("imported_later")
