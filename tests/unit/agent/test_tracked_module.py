"""A tracked module lists the tensors of DDP, detects changes, and keeps no tensor alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from ddpcheck.agent.tracked_module import ParamSetChange, TrackedModule
from tests.helpers.fake_context import watch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mask", None)
        self.register_parameter("absent", None)
        self.register_buffer("table", torch.zeros(2))


@pytest.fixture
def module() -> Tied:
    return Tied()


def names(tracked: TrackedModule) -> list[str]:
    return [slot.name for slot in tracked.parameters]


def test_parameters_are_those_of_named_parameters(module: Tied) -> None:
    tracked = watch(module)
    assert names(tracked) == [name for name, _ in module.named_parameters()]
    assert [slot.name for slot in tracked.buffers] == [name for name, _ in module.named_buffers()]
    for tensor, (_, expected) in zip(
        tracked.tensors(tracked.parameters), module.named_parameters(), strict=True
    ):
        assert tensor is expected


def test_ignored_tensors_are_excluded(module: Tied) -> None:
    tracked = watch(module, ignored=["norm.weight", "norm.running_mean"])
    assert "norm.weight" not in names(tracked)
    assert "norm.bias" in names(tracked)
    assert "norm.running_mean" not in [slot.name for slot in tracked.buffers]
    assert tracked.record().ignored == ["norm.running_mean", "norm.weight"]


def test_record_describes_each_tensor(module: Tied) -> None:
    record = watch(module).record()
    rows = {row[0]: row[1:] for row in record.parameters}
    assert rows["embed.weight"] == ["float32", [5, 3], 1]
    assert rows["scale"] == ["float32", [], 1]
    assert rows["frozen"] == ["float32", [2], 0]
    assert "head.weight" not in rows
    assert {row[0]: row[1:] for row in record.buffers}["norm.num_batches_tracked"] == ["int64", [], 0]
    assert (record.group, record.ordinal, record.name) == ([0, 1], 0, "Tied")


def test_changed_values_are_no_change_of_the_set(module: Tied) -> None:
    tracked = watch(module)
    with torch.no_grad():
        module.scale.add_(1)
    module.table = torch.ones(2)
    assert tracked.changes() == []
    assert tracked.revision == 1
    assert tracked.tensors(tracked.buffers)[0] is module.table


def test_added(module: Tied) -> None:
    tracked = watch(module)
    module.late = nn.Parameter(torch.zeros(1))
    assert tracked.changes() == [ParamSetChange("added", "late")]
    assert tracked.changes() == []
    assert "late" in names(tracked)
    assert tracked.revision == 2


def test_added_submodule(module: Tied) -> None:
    tracked = watch(module)
    module.norm.extra = nn.Linear(2, 2)
    assert tracked.changes() == [
        ParamSetChange("added", "norm.extra.weight"),
        ParamSetChange("added", "norm.extra.bias"),
    ]


def test_replaced(module: Tied) -> None:
    tracked = watch(module)
    module.scale = nn.Parameter(torch.zeros(()))
    assert tracked.changes() == [ParamSetChange("replaced", "scale")]
    assert tracked.tensors(tracked.parameters)[names(tracked).index("scale")] is module.scale


def test_replaced_submodule(module: Tied) -> None:
    """For example a pretrained model that gets a new head after wrapping."""
    tracked = watch(module)
    module.norm = nn.BatchNorm1d(3)
    assert tracked.changes() == [
        ParamSetChange("replaced", "norm.weight"),
        ParamSetChange("replaced", "norm.bias"),
    ]
    assert tracked.tensors(tracked.parameters)[names(tracked).index("norm.bias")] is module.norm.bias
    assert tracked.tensors(tracked.buffers)[0] is module.table
    assert tracked.tensors(tracked.buffers)[1] is module.norm.running_mean


def test_replaced_parameter_without_gradient_is_no_change(module: Tied) -> None:
    tracked = watch(module)
    module.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert tracked.changes() == []
    assert tracked.revision == 2


def test_unfrozen(module: Tied) -> None:
    tracked = watch(module)
    module.frozen.requires_grad_(True)
    assert tracked.changes() == [ParamSetChange("unfrozen", "frozen")]


def test_parameter_that_was_frozen_for_a_while_is_no_change(module: Tied) -> None:
    tracked = watch(module)
    module.scale.requires_grad_(False)
    assert tracked.changes() == []
    module.scale.requires_grad_(True)
    assert tracked.changes() == []
    assert tracked.revision == 3


@pytest.mark.parametrize("how", ["del", "none"])
def test_removed(module: Tied, how: str) -> None:
    tracked = watch(module)
    if how == "del":
        del module.scale
    else:
        module.scale = None
    assert tracked.changes() == []
    assert "scale" not in names(tracked)
    assert len(tracked.tensors(tracked.parameters)) == len(names(tracked))


def test_untied(module: Tied) -> None:
    tracked = watch(module)
    module.head.weight = nn.Parameter(torch.zeros(5, 3))
    assert tracked.changes() == [ParamSetChange("added", "head.weight")]


def test_buffers_are_added_and_removed(module: Tied) -> None:
    tracked = watch(module)
    module.mask = torch.ones(3)
    tracked.changes()
    assert "mask" in [slot.name for slot in tracked.buffers]
    module.mask = None
    tracked.changes()
    assert "mask" not in [slot.name for slot in tracked.buffers]
    del module.table
    module.register_buffer("other", torch.zeros(1))
    tracked.changes()
    assert [tensor.numel() for tensor in tracked.tensors(tracked.buffers)] == [1, 3, 3, 1]


def test_another_dtype_is_no_change_of_the_set(module: Tied) -> None:
    tracked = watch(module)
    module.double()
    assert tracked.changes() == []
    assert all(tensor.dtype == torch.float64 for tensor in tracked.tensors(tracked.parameters))


def test_key_is_equal_on_all_ranks() -> None:
    one, two = watch(nn.Linear(1, 1), index=3), watch(nn.Linear(1, 1), index=3)
    assert one.key == two.key == "0,1#3"


def test_no_tensor_is_kept_alive() -> None:
    module = Tied()
    tracked = watch(module)
    references = [weakref.ref(tensor) for tensor in [*module.parameters(), *module.buffers()]]
    weakref.finalize(module, tracked.forget)
    replaced = weakref.ref(module.scale)
    module.scale = nn.Parameter(torch.zeros(()))
    tracked.changes()
    gc.collect()
    assert replaced() is None
    del module
    gc.collect()
    assert [ref() for ref in references if ref() is not None] == []
    assert tracked.tensors(tracked.parameters) == []
    assert tracked.changes() == []


def sharded() -> nn.Sequential:
    """As DDP leaves a module with DTensor parameters: local shards that know their sharding."""
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    for parameter in module[0].parameters():
        parameter._st_info = object()  # type: ignore[attr-defined]
    return module


def test_local_shards_stay_when_a_forward_puts_dtensors_in_their_place() -> None:
    module = sharded()
    tracked = watch(module)
    shards = list(module.parameters())
    weight = module[0].weight
    del module[0].weight
    # Not a Parameter, so the module does not register it.
    module[0].weight = torch.zeros(2, 2)
    assert all(map(lambda a, b: a is b, tracked.parameter_tensors(), shards))
    assert tracked.refresh() == []
    assert names(tracked) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert tracked.parameter_tensors()[0] is weight
    assert tracked.unknown_parameters() == set()


def test_shards_that_wrapping_puts_in_place_of_dtensors_are_known_to_the_reducer() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    tracked = watch(module)
    shard = nn.Parameter(torch.ones(2, 2))
    shard._st_info = object()  # type: ignore[attr-defined]
    del module[0].weight
    module[0].weight = shard
    assert tracked.refresh() == []
    assert tracked.unknown_parameters() == set()


def test_a_parameter_that_is_missing_for_a_moment_is_read_where_it_was() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    tracked = watch(module)
    before = tracked.parameter_tensors()
    weight = module[0]._parameters.pop("weight")
    assert all(map(lambda a, b: a is b, tracked.parameter_tensors(), before))
    module[0]._parameters["weight"] = weight
    assert tracked.gradients() == [None, None]
