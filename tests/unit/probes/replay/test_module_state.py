"""A replay leaves the module, its tensors and all generators as they were, and computes the same bits."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.probes.replay.module_state import (
    CollectiveInReplayError,
    generators_of_rank,
    pack_attributes,
    pack_generators,
    refuse_collectives,
    replaced,
)
from ddpcheck.probes.replay.payload import (
    ALIGNMENT,
    NotPortableError,
    Packer,
    aligned_copy,
    read_payload,
    unpack,
    write_payload,
)

CPU = torch.device("cpu")


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.LSTM(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls, self.seen = 0, [1]
        self.cache: dict[str, Any] = {"last": None}
        self.carried = torch.zeros(2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["last"] = values
        self.carried.add_(1)
        self.made = values.sum()
        outputs, _ = self.reader(values)
        return self.norm(outputs.transpose(1, 2))


def state(module: nn.Module) -> list[Any]:
    """Everything in the module, by identity and by value."""
    children = list(module.modules())
    tensors = [*module.parameters(), *module.buffers(), module.carried]
    return [
        [sorted((key, id(value)) for key, value in vars(child).items()) for child in children],
        [(id(tensor), tensor._version, tensor.detach().clone().tolist()) for tensor in tensors],
        [id(weight) for weight in module.reader._flat_weights],
        list(module.seen),
        dict(module.cache),
        [parameter.grad for parameter in module.parameters()],
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_restored(fails: bool) -> None:
    module = Stateful()
    packer = Packer()
    attributes = pack_attributes(module, packer)
    tensors = [span.data.view(span.shape) for span in packer.spans]
    parameters = list(module.parameters())
    alignments = [parameter.data_ptr() % ALIGNMENT for parameter in parameters]
    values = torch.randn(5, 4, 3)
    expected = module.reader(values)[0]
    before = state(module)
    with (
        contextlib.suppress(ValueError),
        replaced(module, parameters, alignments, attributes, tensors) as leaves,
    ):
        assert torch.equal(module.reader(values)[0], expected)
        # The LSTM raises at an input of four dimensions, after the attributes were written.
        module(values if not fails else values[None]).sum().backward()
    assert state(module) == before
    assert all((leaf.grad is None) == fails for leaf in leaves)


def test_attributes_of_another_rank_take_their_place() -> None:
    source, replica = Stateful(), Stateful()
    source.calls, source.norm.momentum = 7, 0.25
    source.norm.running_mean.fill_(3.0)
    packer = Packer()
    attributes = pack_attributes(source, packer)
    tensors = [span.data.view(span.shape) for span in packer.spans]
    parameters = list(replica.parameters())
    with replaced(replica, parameters, [0] * len(parameters), attributes, tensors):
        assert (replica.calls, replica.norm.momentum) == (7, 0.25)
        assert replica.norm.running_mean.tolist() == [3.0] * 4
    assert (replica.calls, replica.norm.momentum) == (0, 0.1)
    assert replica.norm.running_mean.tolist() == [0.0] * 4


def test_generators_are_restored() -> None:
    packer = Packer()
    torch.manual_seed(1)
    random.seed(1)
    packed = pack_generators(packer, [])
    expected = torch.rand(3).tolist(), random.random()
    before = torch.get_rng_state(), random.getstate()
    tensors = [span.data for span in packer.spans]
    with generators_of_rank(packed, tensors, []):
        assert (torch.rand(3).tolist(), random.random()) == expected
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_collective_is_refused() -> None:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with refuse_collectives(), pytest.raises(CollectiveInReplayError):
            torch.distributed.all_reduce(torch.ones(2))
    finally:
        torch.distributed.destroy_process_group()


TENSORS = {
    "plain": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": torch.randn(6, 9)[1::2, 3:],
    "expanded": torch.randn(3, 1).expand(3, 5),
    "unaligned": torch.zeros(64)[3:40],
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "half": torch.randn(7).to(torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "indices": torch.arange(5),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_keep_values_strides_and_alignment(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    packer = Packer()
    encoded = packer.value([tensor, {"same": tensor}])
    path = tmp_path / "folder" / "file.safetensors"
    size = write_payload(path, packer, {"value": encoded})
    assert path.stat().st_size == size
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    content, tensors = read_payload(path, CPU)
    first, second = unpack(content["value"], tensors)
    assert first is second["same"]
    assert first.dtype == tensor.dtype
    assert torch.equal(first, tensor)
    assert first.stride() == tensor.stride()
    if tensor.numel():
        assert first.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


def test_values() -> None:
    value = [None, True, 3, -0.1, float("inf"), "text", (1, [2]), {"a": 1, 2: "b"}, torch.float16, CPU]
    value.append(torch.Size([2, 3]))
    assert unpack(Packer().value(value), []) == value


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, torch.randn(3).to_sparse(), torch.zeros(2, dtype=torch.complex64).conj(), len]
)
def test_what_cannot_be_handed_over(value: object) -> None:
    with pytest.raises(NotPortableError):
        Packer().value([value])


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "file.safetensors"
    packer = Packer()
    write_payload(path, packer, {"value": packer.value(torch.randn(100))})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"header|truncated|char"):
        read_payload(path, CPU)


def test_copies_have_the_alignment_that_is_asked_for() -> None:
    tensor = torch.randn(4, 6).t()
    copy = aligned_copy(tensor, 20)
    assert copy.data_ptr() % ALIGNMENT == 20
    assert (copy.stride(), copy.tolist()) == (tensor.stride(), tensor.tolist())
