"""Comparison of saved gradients, from files that may be missing, truncated or damaged."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcheck.analysis.allreduce.saved_gradients import SHOWN, SavedGradients, saved_gradients
from ddpcheck.errors import RunNotFound
from ddpcheck.probes.live_compare.tensor_dump import tensor_bytes, write_safetensors

LOCAL = {0: [1.0, 2.0], 1: [3.0, 6.0]}
MEAN = [2.0, 4.0]


def path_of(run: Path, rank: int, step: int = 0, module: int = 0, what: str = "") -> Path:
    return run / "gradients" / f"step-{step:08d}-module-{module}-rank-{rank:05d}{what}.safetensors"


def save(
    run: Path,
    rank: int,
    tensors: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    group: str = "0,1",
    **where: Any,
) -> Path:
    made = {name: torch.tensor(values, dtype=dtype) for name, values in tensors.items()}
    rows = {name: (dtype, list(tensor.shape), tensor_bytes(tensor)) for name, tensor in made.items()}
    path = path_of(run, rank, **where)
    write_safetensors(path, rows, {"group": group} if group else None)
    return path


def save_all(
    run: Path, local: Mapping[int, Sequence[float]] = LOCAL, reduced: Sequence[float] = MEAN, **more: Any
) -> None:
    for rank, own in local.items():
        save(run, rank, {"local/w": own, "reduced/w": reduced}, **more)


def only(run: Path, step: int = 0) -> SavedGradients:
    (module,) = saved_gradients(run, step)
    return module


def test_side_by_side(tmp_path: Path) -> None:
    save_all(tmp_path)
    for rank in (0, 1):
        save(tmp_path, rank, {"before/w": [0.0, 0.0], "after/w": [-2.0, -4.0]}, what="-parameters")
    module = only(tmp_path)
    (w,) = module.parameters
    assert (module.ranks, module.missing, w.name, w.dtype, w.shape) == ((0, 1), (), "w", "float32", (2,))
    assert [w.local[rank].first for rank in (0, 1)] == [(1.0, 2.0), (3.0, 6.0)]
    assert w.local[0].norm == pytest.approx(math.sqrt(5))
    assert (w.reduced_equal, w.off_mean) == (True, 0.0)
    assert (w.before[1].first, w.after[1].first) == ((0.0, 0.0), (-2.0, -4.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_off_the_mean(tmp_path: Path, dtype: torch.dtype) -> None:
    save_all(tmp_path, reduced=[2.0, 4.5], dtype=dtype)
    (w,) = only(tmp_path).parameters
    assert (w.reduced_equal, w.off_mean) == (True, 0.5)


def test_the_rank_with_the_highest_peak_counts(tmp_path: Path) -> None:
    save(tmp_path, 0, {"local/w": LOCAL[0], "reduced/w": MEAN})
    save(tmp_path, 1, {"local/w": LOCAL[1], "reduced/w": [2.0, 7.0]})
    (w,) = only(tmp_path).parameters
    assert (w.reduced_equal, w.off_mean) == (False, 3.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_have_no_mean(tmp_path: Path, bad: float) -> None:
    save_all(tmp_path, {0: [1.0, bad], 1: [1.0, -bad]}, [1.0, math.nan])
    (w,) = only(tmp_path).parameters
    assert w.off_mean is None
    assert math.isnan(w.reduced[0].norm)


def test_very_large_numbers(tmp_path: Path) -> None:
    save_all(tmp_path, {0: [1.5e308, 0.0], 1: [1.5e308, 0.0]}, [1.5e308, 0.0], dtype=torch.float64)
    (w,) = only(tmp_path).parameters
    assert (w.off_mean, w.local[0].norm) == (0.0, 1.5e308)


def test_only_the_first_values_are_kept(tmp_path: Path) -> None:
    save_all(tmp_path, {0: [1.0] * 100, 1: [3.0] * 100}, [2.0] * 100)
    (w,) = only(tmp_path).parameters
    assert (len(w.local[0].first), w.local[0].norm, w.off_mean) == (SHOWN, 10.0, 0.0)


def test_numbers_that_python_does_not_have(tmp_path: Path) -> None:
    save_all(tmp_path, {0: [1.0], 1: [2.0]}, [1.5], dtype=torch.complex64)
    (w,) = only(tmp_path).parameters
    assert (w.dtype, w.local[0].first, w.off_mean) == ("complex64", ("(1+0j)",), None)


def test_a_missing_file_is_not_a_wrong_mean(tmp_path: Path) -> None:
    save_all(tmp_path, {0: [1.0, 2.0], 1: [3.0, 6.0]}, [5.0, 5.0], group="0,1,2")
    module = only(tmp_path)
    assert (module.ranks, module.missing, module.parameters[0].off_mean) == ((0, 1), (2,), None)


def test_a_parameter_that_one_rank_did_not_use(tmp_path: Path) -> None:
    save(tmp_path, 0, {"local/w": LOCAL[0], "reduced/w": MEAN})
    save(tmp_path, 1, {"reduced/w": MEAN})
    (w,) = only(tmp_path).parameters
    assert (list(w.local), w.off_mean, w.reduced_equal) == ([0], None, True)


def test_modules_of_different_groups_are_not_mixed(tmp_path: Path) -> None:
    """Both are module 0 to their own ranks."""
    for ranks, shift in (((0, 1), 0.0), ((2, 3), 10.0)):
        for rank in ranks:
            own = [x + shift for x in LOCAL[rank % 2]]
            kept = {"local/w": own, "reduced/w": [x + shift for x in MEAN]}
            save(tmp_path, rank, kept, group=",".join(map(str, ranks)))
    modules = saved_gradients(tmp_path, 0)
    assert [module.ranks for module in modules] == [(0, 1), (2, 3)]
    assert [module.parameters[0].off_mean for module in modules] == [0.0, 0.0]


def test_files_without_a_group(tmp_path: Path) -> None:
    save_all(tmp_path, group="")
    assert (only(tmp_path).missing, only(tmp_path).parameters[0].off_mean) == ((), 0.0)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    save_all(tmp_path)
    path = path_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-3])
    (w,) = only(tmp_path).parameters
    assert (w.off_mean, w.reduced_equal) == (None, False)
    assert w.local[1].first == (3.0, 6.0)


def test_a_header_with_offsets_beyond_the_file(tmp_path: Path) -> None:
    save_all(tmp_path)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**62]}
    header = json.dumps({"__metadata__": {"group": "0,1"}, "local/w": entry}).encode()
    path_of(tmp_path, 1).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    (w,) = only(tmp_path).parameters
    assert w.local[1].first == (0.0, 0.0)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"\xff" * 64, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 5) + b"{\xff\xfe"]
)
def test_a_damaged_file_counts_as_missing(tmp_path: Path, data: bytes) -> None:
    save_all(tmp_path)
    path_of(tmp_path, 1).write_bytes(data)
    module = only(tmp_path)
    assert (module.ranks, module.missing, module.parameters[0].off_mean) == ((0,), (1,), None)


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {"dtype": "F32"},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": None},
        {"dtype": "ODD", "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_invalid_entries(tmp_path: Path, entry: Any) -> None:
    save_all(tmp_path)
    header = json.dumps({"__metadata__": {"group": "0,1"}, "local/x": entry}).encode()
    path_of(tmp_path, 1).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    assert "w" in [parameter.name for parameter in only(tmp_path).parameters]


def test_a_step_of_which_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="run the job with --save-gradients"):
        saved_gradients(tmp_path, 0)
    save_all(tmp_path, step=4)
    save_all(tmp_path, step=12)
    with pytest.raises(RunNotFound, match=r"no saved gradients of step 5 \(saved steps: 4, 12\)"):
        saved_gradients(tmp_path, 5)


def test_other_files_are_skipped(tmp_path: Path) -> None:
    save_all(tmp_path)
    (tmp_path / "gradients" / "notes.safetensors").write_bytes(b"hello")
    assert len(saved_gradients(tmp_path, 0)) == 1


def test_names_may_have_slashes_and_dots(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path, rank, {"local/a.b/c": LOCAL[rank], "reduced/a.b/c": MEAN})
    assert [parameter.name for parameter in only(tmp_path).parameters] == ["a.b/c"]


def test_attempts_are_kept_apart_oldest_first(tmp_path: Path) -> None:
    """A restart repeats the step; the name of its file sorts before that of the first attempt."""
    save_all(tmp_path, what="-ffffffff")
    save_all(tmp_path, local={0: [5.0, 5.0], 1: [5.0, 5.0]}, reduced=[5.0, 5.0], what="-00000000")
    for age, mark in enumerate(("ffffffff", "00000000")):
        for rank in (0, 1):
            os.utime(path_of(tmp_path, rank, what=f"-{mark}"), (age, age))
    first, second = saved_gradients(tmp_path, 0)
    assert [(one.attempt, one.attempts, one.ranks) for one in (first, second)] == [
        (0, 2, (0, 1)),
        (1, 2, (0, 1)),
    ]
    assert first.parameters[0].reduced[0].first == (2.0, 4.0)
    assert second.parameters[0].reduced[0].first == (5.0, 5.0)
