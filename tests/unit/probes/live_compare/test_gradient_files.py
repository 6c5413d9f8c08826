"""Full gradients in files: the selected steps, the right bytes, readable with the safetensors package."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ddpcheck.probes.gradients import GradientProbe
from ddpcheck.probes.live_compare.tensor_dump import NAMES, tensor_bytes, write_safetensors
from tests.helpers.fake_context import FakeContext, Job

X = torch.tensor([[1.0, 2.0, 3.0]])


def train(folder: Path, steps: int, module: nn.Module | None = None, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    module = module or nn.Linear(3, 2)
    job = Job(module, FakeContext(folder, **config), [GradientProbe]).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        job.forward(X).sum().backward()
        job.step(optimizer)
    return module


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "gradients").glob("*"))


def test_no_files_unless_requested(tmp_path: Path) -> None:
    train(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    train(tmp_path, 6, save_gradients="1,3:5", rank=1)
    kept = [f"step-{step:08d}-module-0-rank-00001-01234567" for step in (1, 3, 4)]
    assert names(tmp_path) == sorted(
        f"{name}{what}.safetensors" for name in kept for what in ("", "-parameters")
    )


def test_every_step(tmp_path: Path) -> None:
    train(tmp_path, 3, gradients="full")
    assert len(names(tmp_path)) == 6


def test_the_contents_of_the_files(tmp_path: Path) -> None:
    module = train(tmp_path, 1, save_gradients="0")
    stem = str(tmp_path / "gradients" / "step-00000000-module-0-rank-00000-01234567")
    kept = load_file(stem + ".safetensors")
    assert sorted(kept) == ["local/bias", "local/weight", "reduced/bias", "reduced/weight"]
    assert kept["local/weight"].tolist() == [[1.0, 2.0, 3.0]] * 2
    assert kept["reduced/bias"].tolist() == [1.0, 1.0]
    weights = load_file(stem + "-parameters.safetensors")
    assert torch.equal(weights["after/weight"], module.state_dict()["weight"])
    assert torch.equal(weights["before/weight"] - 0.5 * kept["reduced/weight"], weights["after/weight"])
    with safe_open(stem + ".safetensors", "pt") as file:
        assert file.metadata() == {"group": "0,1"}


def test_local_gradients_are_copies(tmp_path: Path) -> None:
    """DDP overwrites them with the mean before the file is written."""

    class Doubled(nn.Linear):
        """Its gradients change between ready and reduced, as if by a reducer."""

    module = Doubled(3, 2)
    context = FakeContext(tmp_path, save_gradients="0")
    job = Job(module, context, [GradientProbe])
    job.wrapped()
    probe = context.probes[0]
    reduced = probe.gradients_reduced

    def reduce_then(tracked: Any) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad *= 2
        reduced(tracked)

    probe.gradients_reduced = reduce_then  # type: ignore[method-assign]
    job.forward(X).sum().backward()
    kept = load_file(tmp_path / "gradients" / "step-00000000-module-0-rank-00000-01234567.safetensors")
    assert kept["local/bias"].tolist() == [1.0, 1.0]
    assert kept["reduced/bias"].tolist() == [2.0, 2.0]


def test_no_tensor_stays_in_memory(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    context = FakeContext(tmp_path, save_gradients="0:2")
    job = Job(module, context, [GradientProbe]).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(4):
        job.forward(X).sum().backward()
        job.step(optimizer)
    probe = context.probes[0]
    assert isinstance(probe, GradientProbe)
    assert (probe._files._local, probe._files._before) == ({}, {})


def test_only_the_user_may_read_them(tmp_path: Path) -> None:
    train(tmp_path, 1, save_gradients="0")
    assert stat.S_IMODE((tmp_path / "gradients").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "gradients").iterdir()} == {0o600}


def test_unsupported_dtypes_are_left_out(tmp_path: Path) -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3, sparse=True)
            self.wide = nn.Parameter(torch.ones(3, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(torch.tensor([1])).sum() + (self.wide * x).abs().sum()

    train(tmp_path, 1, Strange(), save_gradients="0")
    assert len(names(tmp_path)) == 2
    stem = str(tmp_path / "gradients" / "step-00000000-module-0-rank-00000-01234567")
    assert load_file(stem + ".safetensors") == {}
    assert sorted(load_file(stem + "-parameters.safetensors")) == [
        "after/table.weight",
        "before/table.weight",
    ]


@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_every_dtype_can_be_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).to(dtype).t()
    empty = torch.empty(0, 2, dtype=dtype)
    rows = {name: (dtype, list(t.shape), tensor_bytes(t)) for name, t in (("a", tensor), ("b", empty))}
    write_safetensors(tmp_path / "new" / "file", rows, {"group": "0"})
    back = load_file(tmp_path / "new" / "file")
    assert back["a"].dtype == dtype
    assert (tuple(back["a"].shape), tuple(back["b"].shape)) == ((3, 2), (0, 2))
    assert tensor_bytes(back["a"]) == tensor_bytes(tensor)


def test_conjugates_are_written_as_they_read(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    write_safetensors(tmp_path / "file", {"c": (tensor.dtype, [1], tensor_bytes(tensor))})
    assert load_file(tmp_path / "file")["c"].tolist() == [1 - 2j]
