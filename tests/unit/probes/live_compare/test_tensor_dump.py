"""Dumped tensors: files that the safetensors package reads, within a budget."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ddpcheck.analysis.evidence import CapturedTensors
from ddpcheck.probes.live_compare import tensor_dump
from ddpcheck.probes.live_compare.node import SnapshotKey
from ddpcheck.probes.live_compare.tensor_dump import dump_tensors
from ddpcheck.records.kinds.digests import Stage, TensorKind
from tests.helpers.fake_context import FakeContext, watch
from tests.helpers.unreadable_tensors import UNREADABLE, wrapper

KINDS = {
    "float64": torch.randn(3, dtype=torch.float64),
    "float16": torch.randn(2, 2).half(),
    "brain": torch.randn(5).bfloat16(),
    "complex": torch.randn(2, dtype=torch.complex64),
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "sliced": torch.arange(20.0)[::3],
}
BUFFERS = {
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "octets": torch.arange(5, dtype=torch.uint8),
    "small": torch.randn(4).to(torch.float8_e4m3fn),
}


@pytest.fixture
def module() -> nn.Module:
    module = nn.Module()
    for name, tensor in KINDS.items():
        module.register_parameter(name, nn.Parameter(tensor))
    for name, tensor in BUFFERS.items():
        module.register_buffer(name, tensor)
    return module


@pytest.fixture
def context(tmp_path: Path) -> FakeContext:
    return FakeContext(tmp_path, rank=3)


def snapshot_key(
    module: nn.Module, of: TensorKind = TensorKind.PARAMETERS, step: int = 5, optimizer: int | None = 0
) -> SnapshotKey:
    return SnapshotKey(watch(module), Stage.PARAMS, of, step, optimizer)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    bits = [tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for tensor in (one, two)]
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(*bits)


def test_parameters_come_back_to_the_bit(context: FakeContext, module: nn.Module, tmp_path: Path) -> None:
    name, complete, truncated = dump_tensors(context, snapshot_key(module), list(range(len(KINDS))))
    assert complete == list(range(len(KINDS)))
    assert truncated == []
    loaded = load_file(tmp_path / name)
    assert loaded.keys() == KINDS.keys()
    for key, tensor in KINDS.items():
        assert same_bits(loaded[key], tensor), key


def test_buffers_come_back_to_the_bit(context: FakeContext, module: nn.Module, tmp_path: Path) -> None:
    name, _, _ = dump_tensors(context, snapshot_key(module, TensorKind.BUFFERS), list(range(len(BUFFERS))))
    loaded = load_file(tmp_path / name)
    assert all(same_bits(loaded[key], tensor) for key, tensor in BUFFERS.items())
    assert loaded.keys() == BUFFERS.keys()


def test_only_the_requested_tensors_are_written(
    context: FakeContext, module: nn.Module, tmp_path: Path
) -> None:
    name, complete, _ = dump_tensors(context, snapshot_key(module), [1, 5])
    assert complete == [1, 5]
    with safe_open(tmp_path / name, "pt") as file:
        assert set(file.keys()) == {"float16", "scalar"}


def test_our_own_reader_agrees(context: FakeContext, module: nn.Module, tmp_path: Path) -> None:
    name, _, _ = dump_tensors(context, snapshot_key(module), [0, 7])
    file = CapturedTensors(tmp_path / name)
    assert file.names() == {"float64", "transposed"}
    assert file.read("transposed") == struct.pack("<6f", 0, 3, 1, 4, 2, 5)
    assert file.read("scalar") == b""


def test_only_the_user_can_read_it(context: FakeContext, module: nn.Module, tmp_path: Path) -> None:
    name, _, _ = dump_tensors(context, snapshot_key(module), [0])
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / name).parent.stat().st_mode & 0o777 == 0o700


def test_the_budget_cuts(context: FakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_dump, "BUDGET", 100)
    module = nn.ParameterList([torch.arange(15.0), torch.arange(20.0).view(4, 5), torch.arange(3.0)])
    name, complete, truncated = dump_tensors(context, snapshot_key(module), [0, 1, 2])
    assert (complete, truncated) == ([0], [1])
    loaded = load_file(tmp_path / name)
    assert torch.equal(loaded["0"], torch.arange(15.0))
    assert torch.equal(loaded["1"], torch.arange(10.0))
    assert "2" not in loaded


def test_unsupported_dtypes_are_left_out(context: FakeContext, tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    module.register_buffer("plain", torch.ones(1))
    name, complete, _ = dump_tensors(context, snapshot_key(module, TensorKind.BUFFERS), [0, 1, 2])
    assert complete == [2]
    assert load_file(tmp_path / name).keys() == {"plain"}


def test_unreadable_tensors_are_left_out(context: FakeContext, tmp_path: Path) -> None:
    module = nn.Module()
    for number, make in enumerate([*UNREADABLE, wrapper]):
        module.register_buffer(str(number), make())
    module.register_buffer("plain", torch.ones(1))
    name, complete, truncated = dump_tensors(
        context, snapshot_key(module, TensorKind.BUFFERS), list(range(len(UNREADABLE) + 2))
    )
    assert (len(complete), truncated) == (1, [])
    assert load_file(tmp_path / name).keys() == {"plain"}


def test_no_two_snapshots_share_a_file(context: FakeContext, module: nn.Module) -> None:
    tracked = watch(module)
    keys = [
        SnapshotKey(tracked, Stage.INIT_AFTER, TensorKind.PARAMETERS, -1),
        SnapshotKey(tracked, Stage.INIT_AFTER, TensorKind.BUFFERS, -1),
        SnapshotKey(tracked, Stage.PARAMS, TensorKind.PARAMETERS, 3, 0),
        SnapshotKey(tracked, Stage.PARAMS, TensorKind.PARAMETERS, 3, 1),
        SnapshotKey(tracked, Stage.PARAMS, TensorKind.PARAMETERS, 4, 1),
    ]
    assert len({dump_tensors(context, each, [0])[0] for each in keys}) == len(keys)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 5) + b"\xff{..}",
    ],
)
def test_a_damaged_file_holds_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    file = CapturedTensors(path)
    assert file.names() == set()
    assert file.read("w") == b""


@pytest.mark.parametrize("offsets", [[4, 0], [-1, 4], ["0", 4], [0], None])
def test_damaged_offsets_hold_nothing(tmp_path: Path, offsets: object) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    assert CapturedTensors(path).read("w") == b""


def test_a_missing_file_holds_nothing(tmp_path: Path) -> None:
    assert CapturedTensors(tmp_path / "gone").names() == set()
