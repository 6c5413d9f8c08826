"""What was loaded from a file, compared at the first forward and at the first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpcheck.guard import GUARD
from ddpcheck.probes import restore, resumed_data
from ddpcheck.probes.checkpoints.tracker import CheckpointTracker
from ddpcheck.probes.restore import RestoreProbe
from ddpcheck.probes.resumed_data import NOTES, ResumedDataProbe
from ddpcheck.records.kinds.checkpoints import (
    OptimizerRestoreRecord,
    RestoreRecord,
    ResumedDataRecord,
    SaveRecord,
)
from tests.helpers.fake_context import FakeContext, Job


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointTracker]:
    faults: list[Any] = []
    GUARD.report_to(lambda *fault: faults.append(fault))
    originals = (torch.load, torch.save, nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)
    tracker = CheckpointTracker()
    tracker.install()
    monkeypatch.setattr(restore, "CHECKPOINTS", tracker)
    monkeypatch.setattr(resumed_data, "CHECKPOINTS", tracker)
    yield tracker
    tracker.remove()
    assert faults == []
    now = (torch.load, torch.save, nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)
    assert now == originals


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16))


def checkpoint(folder: Path, **changes: Any) -> dict[str, Any]:
    """A file of an earlier run, as it is loaded."""
    module = build(1)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    torch.save(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict(), **changes}, folder / "last.pt"
    )
    loaded: dict[str, Any] = torch.load(folder / "last.pt")
    return loaded


def compared(module: nn.Module) -> tuple[FakeContext, Job]:
    context = FakeContext()
    job = Job(module, context, [RestoreProbe]).wrapped()
    job.forward()
    return context, job


def test_a_restored_module_is_equal(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module = build(2)
    module.load_state_dict(checkpoint(tmp_path)["model"])
    context, job = compared(module)
    [record] = context.of(RestoreRecord)
    # Counters of integers and buffers that no checkpoint has are left out.
    assert (record.tensors, record.equal, record.changed, record.misnamed, record.swapped) == (
        10,
        10,
        0,
        0,
        0,
    )
    assert record.holds == ["model", "optimizer"]
    assert record.file == str(tmp_path / "last.pt")
    assert "test_restore.py:" in record.where
    job.forward()
    assert len(context.of(RestoreRecord)) == 1


@pytest.mark.parametrize("wrap", ["module.", "_orig_mod.module.", "net."])
def test_names_with_a_prefix_are_not_loaded(tracker: CheckpointTracker, tmp_path: Path, wrap: str) -> None:
    weights = {f"{wrap}{name}": value for name, value in build(1).state_dict().items()}
    module = build(2)
    module.load_state_dict(checkpoint(tmp_path, model=weights)["model"], strict=False)
    [record] = compared(module)[0].of(RestoreRecord)
    # Weights and biases of norms are the same in all models.
    assert (record.misnamed, record.equal) == (6, 0)
    assert record.misnamed_example == [f"{wrap}0.weight", "0.weight"]


def test_a_whole_checkpoint_is_no_state_dict(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module = build(2)
    module.load_state_dict(checkpoint(tmp_path), strict=False)
    [record] = compared(module)[0].of(RestoreRecord)
    assert record.misnamed_example == ["model.0.weight", "0.weight"]


def test_a_second_load_that_fits_counts(tracker: CheckpointTracker, tmp_path: Path) -> None:
    weights = {f"module.{name}": value for name, value in build(1).state_dict().items()}
    loaded = checkpoint(tmp_path, model=weights)["model"]
    module = build(2)
    module.load_state_dict(loaded, strict=False)
    module.load_state_dict({name.removeprefix("module."): value for name, value in loaded.items()})
    [record] = compared(module)[0].of(RestoreRecord)
    assert (record.misnamed, record.equal) == (0, 10)


def test_a_new_head_is_not_misnamed(tracker: CheckpointTracker, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)["model"]
    module = build(2)
    module.load_state_dict(
        {name.replace("3.", "head."): value for name, value in weights.items()}, strict=False
    )
    [record] = compared(module)[0].of(RestoreRecord)
    assert (record.misnamed, record.equal) == (0, 8)


def test_weights_that_are_made_anew_are_unrelated(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module = build(2)
    module.load_state_dict(checkpoint(tmp_path)["model"])
    for layer in (module[0], module[2], module[3]):  # type: ignore[index]
        layer.reset_parameters()
    [record] = compared(module)[0].of(RestoreRecord)
    assert record.changed == 6
    assert record.correlation is not None
    assert abs(record.correlation) < 0.2


def test_layers_under_the_name_of_another(tracker: CheckpointTracker, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)["model"]
    names = {"2": "3", "3": "2"}
    swapped = {f"{names.get(name[0], name[0])}{name[1:]}": value for name, value in weights.items()}
    module = build(2)
    module.load_state_dict(swapped)
    [record] = compared(module)[0].of(RestoreRecord)
    assert record.swapped == 4
    assert ["3.weight", "2.weight"] in record.swapped_examples


def test_the_state_of_the_optimizer_that_trains(tracker: CheckpointTracker, tmp_path: Path) -> None:
    loaded, module = checkpoint(tmp_path), build(2)
    module.load_state_dict(loaded["model"])
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    context, job = compared(module)
    job.train(optimizer, steps=2)
    [record] = context.of(OptimizerRestoreRecord)
    assert (record.state, record.entries, record.found, record.fresh) == ("loaded", 8, 8, 0)
    assert (record.cast, record.rounded) == (0, [])


def test_a_state_in_an_optimizer_that_never_steps(tracker: CheckpointTracker, tmp_path: Path) -> None:
    loaded, module = checkpoint(tmp_path), build(2)
    module.load_state_dict(loaded["model"])
    other = torch.optim.Adam(module.parameters())
    other.load_state_dict(loaded["optimizer"])
    context, job = compared(module)
    job.train(torch.optim.Adam(module.parameters()))
    [record] = context.of(OptimizerRestoreRecord)
    assert (record.state, record.same_settings) == ("elsewhere", True)


def test_a_state_that_was_not_loaded(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module = build(2)
    optimizer = torch.optim.Adam(module.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loaded = checkpoint(tmp_path, schedule=schedule.state_dict())
    module.load_state_dict(loaded["model"])
    schedule.load_state_dict(loaded["schedule"])
    context, job = compared(module)
    job.train(optimizer)
    [record] = context.of(OptimizerRestoreRecord)
    assert (record.state, record.resumed, record.same_settings) == ("empty", ["scheduler"], True)


def test_parameters_that_are_in_no_file(tracker: CheckpointTracker, tmp_path: Path) -> None:
    loaded, module = checkpoint(tmp_path), build(2)
    body = {name: value for name, value in loaded["model"].items() if not name.startswith("3.")}
    torch.save({"model": body, "optimizer": loaded["optimizer"]}, tmp_path / "body.pt")
    tracker.files.clear()
    again = torch.load(tmp_path / "body.pt")
    module.load_state_dict(again["model"], strict=False)
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.load_state_dict(again["optimizer"])
    context, job = compared(module)
    job.train(optimizer)
    [record] = context.of(OptimizerRestoreRecord)
    assert (record.fresh, record.fresh_examples) == (2, ["3.weight", "3.bias"])


def test_weights_that_were_copied_in_by_hand_are_in_the_file(
    tracker: CheckpointTracker, tmp_path: Path
) -> None:
    loaded, module = checkpoint(tmp_path), build(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(loaded["model"][name])
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    context, job = compared(module)
    job.train(optimizer)
    [record] = context.of(OptimizerRestoreRecord)
    assert record.fresh == 0


def test_state_dicts_of_no_file_are_passed_over(tracker: CheckpointTracker, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    module, other = build(2), build(3)
    for _ in range(100):
        module.load_state_dict(other.state_dict())
    assert tracker.modules == []
    assert compared(module)[0].of(RestoreRecord) == []


def test_no_tensor_of_the_program_is_kept(tracker: CheckpointTracker, tmp_path: Path) -> None:
    loaded = checkpoint(tmp_path)
    stored = tracker.files[-1].tensors
    assert all(each.ref() is not None for each in stored)
    loaded.clear()
    assert all(each.ref() is None for each in stored)


def test_a_save_is_recorded_and_noted_in_the_run_folder(tracker: CheckpointTracker, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    context = FakeContext(run)
    Job(build(2), context, [ResumedDataProbe]).wrapped()
    checkpoint(out)
    [record] = context.of(SaveRecord)
    assert (record.file, record.holds) == (str(out / "last.pt"), ["model", "optimizer"])
    # No training data was used yet, so there is no position to note. Nothing is written beside the checkpoint.
    assert not (run / NOTES).exists()
    assert [path.name for path in out.iterdir()] == ["last.pt"]


def resumed(
    tracker: CheckpointTracker, folder: Path, saved_after: int, skipped: int, epoch: int = 0
) -> list[ResumedDataRecord]:
    """A job that saves within an epoch, and one that continues it and skips some batches."""
    runs = folder / "runs"

    def train(name: str, load: bool, skip: int, epoch: int, until: int) -> FakeContext:
        (runs / name).mkdir(parents=True)
        context = FakeContext(runs / name)
        module = build(2)
        optimizer = torch.optim.Adam(module.parameters())
        if load:
            whole = torch.load(folder / "last.pt")
            module.load_state_dict(whole["model"])
            optimizer.load_state_dict(whole["optimizer"])
        job = Job(module, context, [ResumedDataProbe]).wrapped()
        data = TensorDataset(torch.arange(96))
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        sampler.set_epoch(epoch)
        iterator = iter(DataLoader(data, batch_size=4, sampler=sampler))
        draw = iterator._next_index

        def next_index() -> Any:
            index = draw()
            job.dispatcher.sample_drawn(iterator, index)
            return index

        iterator._next_index = next_index  # type: ignore[method-assign]
        for number, _ in enumerate(iterator):
            job.dispatcher.batch_received(iterator, None)
            if number < skip:
                continue
            job.dispatcher.before_forward(module)
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            job.step(optimizer)
            if number + 1 == until:
                break
        if not load:
            torch.save(
                {"model": module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt"
            )
        return context

    train("first", False, 0, 0, saved_after)
    return train("second", True, skipped, epoch, 12).of(ResumedDataRecord)


def test_an_epoch_that_goes_on_where_it_was(tracker: CheckpointTracker, tmp_path: Path) -> None:
    assert resumed(tracker, tmp_path, saved_after=6, skipped=6) == []


@pytest.mark.parametrize("skipped", [0, 3, 8])
def test_an_epoch_that_goes_on_elsewhere(tracker: CheckpointTracker, tmp_path: Path, skipped: int) -> None:
    [record] = resumed(tracker, tmp_path, saved_after=6, skipped=skipped)
    assert (record.in_progress, record.saved_batches, record.passed_over) == (True, 6, skipped)


def test_the_rest_of_an_epoch_is_left_out(tracker: CheckpointTracker, tmp_path: Path) -> None:
    [record] = resumed(tracker, tmp_path, saved_after=6, skipped=0, epoch=1)
    assert (record.in_progress, record.left_out) == (False, 6)


def test_a_save_at_the_last_batch_leaves_nothing_out(tracker: CheckpointTracker, tmp_path: Path) -> None:
    [record] = resumed(tracker, tmp_path, saved_after=12, skipped=0, epoch=1)
    assert (record.repeats, record.left_out) == (-1, 0)


def test_parts_of_the_file_that_stay_there(tracker: CheckpointTracker, tmp_path: Path) -> None:
    parts = {
        "schedule": {"last_epoch": 3, "base_lrs": [0.1], "_step_count": 4},
        "rng": torch.get_rng_state(),
        "scaler": {"scale": 2.0, "_growth_tracker": 1},
    }
    whole = checkpoint(tmp_path, **parts)
    module = build(2)
    optimizer = torch.optim.Adam(module.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    module.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    context, job = compared(module)
    job.train(optimizer, 2)
    [record] = context.of(OptimizerRestoreRecord)
    # The job has no scaler.
    assert record.not_restored == ["scheduler", "rng"]


def test_all_parts_are_restored(tracker: CheckpointTracker, tmp_path: Path) -> None:
    state = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(build(1).parameters()), 10).state_dict()
    whole = checkpoint(tmp_path, schedule=state, rng=torch.get_rng_state())
    module = build(2)
    optimizer = torch.optim.Adam(module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    module.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    schedule.load_state_dict(whole["schedule"])
    torch.set_rng_state(whole["rng"])
    context, job = compared(module)
    job.train(optimizer, 2)
    [record] = context.of(OptimizerRestoreRecord)
    assert record.not_restored == []
    assert record.resumed == ["rng", "scheduler"]


def test_buffers_that_the_state_dict_lacks(tracker: CheckpointTracker, tmp_path: Path) -> None:
    module = build(2)
    names = dict(module.named_parameters())
    weights = {name: value for name, value in checkpoint(tmp_path)["model"].items() if name in names}
    module.load_state_dict(weights, strict=False)
    [record] = compared(module)[0].of(RestoreRecord)
    assert (record.equal, record.left) == (8, 2)
    assert record.left_examples == ["1.running_mean", "1.running_var"]


def test_a_layer_that_the_file_lacks_is_not_left_out(tracker: CheckpointTracker, tmp_path: Path) -> None:
    stored = {name: value for name, value in build(1).state_dict().items() if not name.startswith("3.")}
    module = build(2)
    module.load_state_dict(checkpoint(tmp_path, model=stored)["model"], strict=False)
    [record] = compared(module)[0].of(RestoreRecord)
    assert (record.equal, record.left) == (8, 0)
