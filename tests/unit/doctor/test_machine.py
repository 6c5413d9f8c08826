"""Checks of one machine: in good order, and not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Level
from tests.helpers.doctor_scenes import (
    GIB,
    alone,
    gpu,
    job,
    machine,
    on_gpus,
    said,
    the_one,
    with_gpus,
)

PROBLEM, WARNING, NOTE = Level.PROBLEM, Level.WARNING, Level.NOTE


def test_torch() -> None:
    absent = the_one(alone(torch={"error": "ModuleNotFoundError: No module named 'torch'"}), "torch")
    assert (absent.level, absent.what) == (PROBLEM, "torch is not installed in this Python.")
    broken = the_one(alone(torch={"error": "ImportError: libcudart.so.12: cannot open"}), "torch")
    assert "libcudart" in broken.what
    assert the_one(alone(torch={**machine().torch, "backends": []}), "torch").level is PROBLEM
    without_cuda = the_one(alone(gpus=with_gpus(2)), "torch")
    assert (without_cuda.level, "without CUDA" in without_cuda.what) == (WARNING, True)
    old_driver = {**on_gpus(2)["torch"], "gpus": 0, "warnings": ["The NVIDIA driver is too old"]}
    too_old = the_one(alone(gpus=with_gpus(2), torch=old_driver), "torch")
    assert (too_old.level, "driver is too old" in too_old.what, "570.1" in too_old.why) == (
        PROBLEM,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("told", "because"),
    [
        ({"flags": ["isolated", "ignore_environment"]}, "-I"),
        ({"flags": ["ignore_environment"]}, "-E"),
        ({"flags": ["no_site"]}, "-S"),
        ({"first_on_path": False}, "not first there any more"),
        (
            {"sitecustomize": "/opt/site/sitecustomize.py"},
            "/opt/site/sitecustomize.py is imported in the place",
        ),
        ({}, "cannot be read"),
        ({"error": "it was ended by SIGSEGV"}, "SIGSEGV"),
    ],
)
def test_what_keeps_ddpcheck_out_is_named(told: dict[str, Any], because: str) -> None:
    known = {"into": "a child", "armed": False, "first_on_path": True, "sitecustomize": "", "flags": []}
    found = the_one(alone(injection={**known, **told}), "injection")
    assert found.level is PROBLEM
    assert because in found.what
    assert "ddpcheck.auto" in found.fix


def test_a_sitecustomize_of_the_user_runs_beside_ours() -> None:
    armed = {**machine().injection, "sitecustomize": "/etc/python3.11/sitecustomize.py"}
    assert said(alone(injection=armed), "injection") == []


def test_python() -> None:
    python = machine().python
    assert the_one(alone(python={**python, "version": "3.9.2"}), "python").level is PROBLEM
    assert the_one(alone(python={"error": "no such file"}), "python").level is PROBLEM
    assert "PYTHONSAFEPATH" in the_one(alone(python={**python, "flags": {"safe_path": 1}}), "python").what
    assert "assertions" in the_one(alone(python={**python, "flags": {"optimize": 1}}), "python").what


def test_the_run_folder() -> None:
    folder = machine().folder
    closed = the_one(
        alone(folder={"path": "/x", "writable": False, "reason": "/: permission denied"}), "run folder"
    )
    assert (closed.level, "permission denied" in closed.what, "--out" in closed.fix) == (PROBLEM, True, True)
    assert the_one(alone(folder={**folder, "free": 500 << 20}), "run folder").level is WARNING
    assert the_one(alone(folder={**folder, "free": 5 << 20}), "run folder").level is PROBLEM


def test_gpus() -> None:
    def only(**now: Any) -> DoctorContext:
        return alone(**on_gpus(2, **now))

    assert "lost" in the_one(only(lost="GPU is lost"), "GPUs").what
    hot = said(only(throttled=0x40 | 0x4), "GPUs")
    assert [(one.level, one.what) for one in hot] == [
        (WARNING, f"GPU {index} is held back: hardware thermal slowdown.") for index in range(2)
    ]
    assert said(only(throttled=0x4 | 0x1), "GPUs") == []  # idle, or held to the power it is set to
    busy = said(only(memory=30 * GIB, processes={"77": 30 * GIB}), "GPUs")[0]
    assert (busy.level, "process 77" in busy.what) == (WARNING, True)
    assert "fewer PCIe lanes" in the_one(only(pcie_link=[1, 8]), "GPUs").what


def test_gpus_that_are_not_alike() -> None:
    facts = with_gpus(2)
    mixed = {**facts, "gpus": [gpu(0), gpu(1, name="V100", memory=32 * GIB)]}
    torch = on_gpus(2)["torch"]
    assert "not alike" in the_one(alone(gpus=mixed, torch=torch), "GPUs").what
    fewer = {**facts, "gpus": [gpu(0), gpu(1, nvlinks=[0])]}
    assert "GPU 1 has fewer active NVLinks" in the_one(alone(gpus=fewer, torch=torch), "GPUs").what
    apart = {**facts, "p2p": [[True, False], [False, True]]}
    assert "GPUs 0-1 cannot read" in the_one(alone(gpus=apart, torch=torch), "GPUs").what
    silent = {"note": "NVML does not answer: Driver/library version mismatch", "now": []}
    assert the_one(alone(gpus=silent), "GPUs").level is WARNING


def test_gpus_that_a_variable_hides() -> None:
    def visible(value: str) -> DoctorContext:
        return alone(**on_gpus(2), environment={"CUDA_VISIBLE_DEVICES": value})

    found = the_one(visible("0,3,1"), "GPUs of ranks")
    assert (found.level, "3 is none of the 2" in found.what, "1 of them" in found.why) == (
        PROBLEM,
        True,
        True,
    )
    for value in ("", "-1"):
        assert the_one(visible(value), "GPUs of ranks").level is WARNING
    assert said(visible("1,0"), "GPUs of ranks") == []


def test_processors() -> None:
    def threads(count: int) -> Any:
        return lambda facts: replace(facts, torch={**facts.torch, "threads": count})

    found = the_one(job(1, 4, threads(8)), "processors")
    assert (found.level, "OMP_NUM_THREADS=2" in found.fix) == (WARNING, True)
    bound = the_one(
        job(
            1, 2, lambda facts: replace(facts, processors={"all": 8, "allowed": [facts.rank], "quota": None})
        ),
        "processors",
    )
    assert "2 ranks of 2 threads share 2 processors" in bound.what
    unused = job(
        1, 1, lambda facts: replace(threads(1)(facts), processors={"all": 64, "allowed": list(range(64))})
    )
    assert the_one(unused, "processors").level is NOTE
    small = alone(processors={"all": 64, "allowed": list(range(64)), "quota": 4.0})
    assert "4 of 64" in the_one(small, "processors").what


def test_memory() -> None:
    memory = machine().memory
    assert "8.6 GB of 68.7 GB" in the_one(alone(memory={**memory, "limit": 8 * GIB}), "memory").what
    assert the_one(alone(memory={**memory, "available": 500 << 20}), "memory").level is WARNING
    docker = {**memory, "shared": {"total": 64 << 20, "free": 64 << 20, "writable": True}}
    assert (the_one(alone(memory=docker), "shared memory").level) is WARNING
    scant = {**memory, "shared": {"total": GIB, "free": 600 << 20, "writable": True}}
    assert the_one(alone(memory=scant), "shared memory").level is NOTE
    none = {**memory, "shared": {"error": "No such file or directory"}}
    assert the_one(alone(memory=none), "shared memory").level is WARNING


def test_limits() -> None:
    limits = machine().limits
    assert the_one(alone(limits={**limits, "open_files": [1024, 524288]}), "limits").level is NOTE
    assert the_one(alone(limits={**limits, "open_files": [256, 256]}), "limits").level is WARNING
    assert "512 processes" in the_one(alone(limits={**limits, "processes": [512, 512]}), "limits").what
    assert said(alone(limits={**limits, "processes": [512, 512], "root": True}), "limits") == []
    with_card = alone(infiniband=[{"name": "mlx5_0/1"}])
    assert "InfiniBand" in the_one(with_card, "limits").what


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", WARNING),
        ("NCCL_P2P_DISABLE", "1", WARNING),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", WARNING),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", WARNING),
        ("NCCL_DEBUG", "INFO", NOTE),
        ("NCCL_ALGO", "Ring", NOTE),
        ("NVIDIA_TF32_OVERRIDE", "0", NOTE),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", WARNING),
    ],
)
def test_variables(variable: str, value: str, level: Level) -> None:
    found = the_one(alone(**on_gpus(2), environment={variable: value}), "variables")
    assert (found.level, found.what) == (level, f"{variable} is {value}.")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_IB_DISABLE", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO"),
        ("OMP_NUM_THREADS", "4"),
    ],
)
def test_variables_that_do_no_harm(variable: str, value: str) -> None:
    assert said(alone(**on_gpus(2), environment={variable: value}), "variables") == []


def test_variables_where_they_matter() -> None:
    without_gpu = the_one(alone(environment={"NCCL_P2P_DISABLE": "1"}), "variables")
    assert (without_gpu.level, "no GPU here" in without_gpu.why) == (NOTE, True)
    with_card = alone(**on_gpus(2), infiniband=[{"name": "mlx5_0/1"}], environment={"NCCL_IB_DISABLE": "1"})
    assert "there is InfiniBand" in the_one(with_card, "variables").what
    crashing = the_one(alone(environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}), "variables")
    assert (crashing.level, "segmentation fault" in crashing.why) == (PROBLEM, True)
