"""Checks of one machine, healthy and with problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.model import DoctorContext, all_checks
from ddpcheck.sampling.amd import NOT_INSTALLED
from tests.helpers.doctor_contexts import (
    GIB,
    gpu,
    job,
    machine,
    on_gpus,
    problems,
    single,
    the_problem,
    with_gpus,
)

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def test_torch() -> None:
    absent = the_problem(single(torch={"error": "ModuleNotFoundError: No module named 'torch'"}), "torch")
    assert (absent.severity, absent.message) == (ERROR, "torch is not installed in this Python.")
    broken = the_problem(single(torch={"error": "ImportError: libcudart.so.12: cannot open"}), "torch")
    assert "libcudart" in broken.message
    assert the_problem(single(torch={**machine().torch, "backends": []}), "torch").severity is ERROR
    without_cuda = the_problem(single(gpus=with_gpus(2)), "torch")
    assert (without_cuda.severity, "without CUDA" in without_cuda.message) == (WARNING, True)
    old_driver = {**on_gpus(2)["torch"], "gpus": 0, "warnings": ["The NVIDIA driver is too old"]}
    too_old = the_problem(single(gpus=with_gpus(2), torch=old_driver), "torch")
    assert (too_old.severity, "driver is too old" in too_old.message, "570.1" in too_old.cause) == (
        ERROR,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("state", "because"),
    [
        ({"flags": ["isolated", "ignore_environment"]}, "-I"),
        ({"flags": ["ignore_environment"]}, "-E"),
        ({"flags": ["no_site"]}, "-S"),
        ({"first_on_path": False}, "no longer first"),
        (
            {"sitecustomize": "/opt/site/sitecustomize.py"},
            "/opt/site/sitecustomize.py is imported instead",
        ),
        ({}, "cannot be read"),
        ({"error": "it was killed by SIGSEGV"}, "SIGSEGV"),
    ],
)
def test_the_reason_for_a_failed_injection_is_reported(state: dict[str, Any], because: str) -> None:
    known = {"into": "a child", "armed": False, "first_on_path": True, "sitecustomize": "", "flags": []}
    diagnosis = the_problem(single(injection={**known, **state}), "injection")
    assert diagnosis.severity is ERROR
    assert because in diagnosis.message
    assert "ddpcheck.auto" in diagnosis.fix


def test_a_sitecustomize_of_the_user_runs_next_to_ddpchecks() -> None:
    armed = {**machine().injection, "sitecustomize": "/etc/python3.11/sitecustomize.py"}
    assert problems(single(injection=armed), "injection") == []


def test_python() -> None:
    python = machine().python
    assert the_problem(single(python={**python, "version": "3.9.2"}), "python").severity is ERROR
    assert the_problem(single(python={"error": "no such file"}), "python").severity is ERROR
    assert (
        "PYTHONSAFEPATH"
        in the_problem(single(python={**python, "flags": {"safe_path": 1}}), "python").message
    )
    assert "assertions" in the_problem(single(python={**python, "flags": {"optimize": 1}}), "python").message


def test_the_run_folder() -> None:
    folder = machine().folder
    closed = the_problem(
        single(folder={"path": "/x", "writable": False, "reason": "/: permission denied"}), "run folder"
    )
    assert (closed.severity, "permission denied" in closed.message, "--out" in closed.fix) == (
        ERROR,
        True,
        True,
    )
    assert the_problem(single(folder={**folder, "free": 500 << 20}), "run folder").severity is WARNING
    assert the_problem(single(folder={**folder, "free": 5 << 20}), "run folder").severity is ERROR


def test_gpus() -> None:
    def only(**now: Any) -> DoctorContext:
        return single(**on_gpus(2, **now))

    assert "lost" in the_problem(only(lost="GPU is lost"), "GPUs").message
    hot = problems(only(throttled=0x40 | 0x4), "GPUs")
    assert [(one.severity, one.message) for one in hot] == [
        (WARNING, f"GPU {index} is throttled: hardware thermal slowdown.") for index in range(2)
    ]
    assert problems(only(throttled=0x4 | 0x1), "GPUs") == []  # idle, or held to the power it is set to
    busy = problems(only(memory=30 * GIB, processes={"77": 30 * GIB}), "GPUs")[0]
    assert (busy.severity, "process 77" in busy.message) == (WARNING, True)
    assert "fewer PCIe lanes" in the_problem(only(pcie_link=[1, 8]), "GPUs").message


def test_gpus_that_are_not_alike() -> None:
    facts = with_gpus(2)
    mixed = {**facts, "gpus": [gpu(0), gpu(1, name="V100", memory=32 * GIB)]}
    torch = on_gpus(2)["torch"]
    assert "differ" in the_problem(single(gpus=mixed, torch=torch), "GPUs").message
    fewer = {**facts, "gpus": [gpu(0), gpu(1, nvlinks=[0])]}
    assert "GPU 1 has fewer active NVLinks" in the_problem(single(gpus=fewer, torch=torch), "GPUs").message
    apart = {**facts, "p2p": [[True, False], [False, True]]}
    assert "GPUs 0-1" in the_problem(single(gpus=apart, torch=torch), "GPUs").message
    silent = {"note": "NVML does not answer: Driver/library version mismatch", "now": []}
    assert the_problem(single(gpus=silent), "GPUs").severity is WARNING


@pytest.mark.parametrize(
    ("change", "phrase", "fix"),
    [
        ({"version": ""}, "Triton is not installed", "Install the triton"),
        ({"compiler": ""}, "no C compiler", "set CC"),
        ({"headers": False}, "Python.h", "python3-dev"),
        (
            {"cache_writable": False},
            "cannot write its cache folder /home/me/.triton/cache",
            "TRITON_CACHE_DIR",
        ),
    ],
)
def test_kernels_that_cannot_be_compiled(change: dict[str, Any], phrase: str, fix: str) -> None:
    facts = on_gpus(2)
    assert problems(single(**facts), "GPU kernels") == []
    facts["torch"]["triton"] |= change
    found = the_problem(single(**facts), "GPU kernels")
    assert found.severity is WARNING
    assert phrase in found.message
    assert fix in found.fix
    # Nothing to compile for.
    assert problems(single(torch={**facts["torch"], "gpus": 0}), "GPU kernels") == []


def test_the_first_run_on_gpus() -> None:
    [check] = [check for check in all_checks() if check.name == "first run on GPUs"]
    [found] = check.run(single(**on_gpus(2)))
    assert found.passed
    assert "ddpcheck selftest" in found.message
    assert check.run(single()) == []


def test_amd_gpus_without_their_package() -> None:
    found = the_problem(single(gpus={"note": NOT_INSTALLED, "now": []}), "GPUs")
    assert (found.severity, "amdsmi" in found.message) == (WARNING, True)


def test_gpus_that_a_variable_hides() -> None:
    def visible(value: str) -> DoctorContext:
        return single(**on_gpus(2), environment={"CUDA_VISIBLE_DEVICES": value})

    diagnosis = the_problem(visible("0,3,1"), "GPUs of ranks")
    assert (
        diagnosis.severity,
        "3 is none of the 2" in diagnosis.message,
        "1 of 2 GPUs" in diagnosis.cause,
    ) == (
        ERROR,
        True,
        True,
    )
    for value in ("", "-1"):
        assert the_problem(visible(value), "GPUs of ranks").severity is WARNING
    assert problems(visible("1,0"), "GPUs of ranks") == []


def test_processors() -> None:
    def threads(count: int) -> Any:
        return lambda facts: replace(facts, torch={**facts.torch, "threads": count})

    diagnosis = the_problem(job(1, 4, threads(8)), "processors")
    assert (diagnosis.severity, "OMP_NUM_THREADS=2" in diagnosis.fix) == (WARNING, True)
    bound = the_problem(
        job(
            1, 2, lambda facts: replace(facts, processors={"all": 8, "allowed": [facts.rank], "quota": None})
        ),
        "processors",
    )
    assert "2 ranks with 2 threads each share 2 processors" in bound.message
    unused = job(
        1, 1, lambda facts: replace(threads(1)(facts), processors={"all": 64, "allowed": list(range(64))})
    )
    assert the_problem(unused, "processors").severity is NOTE
    small = single(processors={"all": 64, "allowed": list(range(64)), "quota": 4.0})
    assert "4 of 64" in the_problem(small, "processors").message


def test_memory() -> None:
    memory = machine().memory
    assert "8.6 GB of 68.7 GB" in the_problem(single(memory={**memory, "limit": 8 * GIB}), "memory").message
    assert the_problem(single(memory={**memory, "available": 500 << 20}), "memory").severity is WARNING
    docker = {**memory, "shared": {"total": 64 << 20, "free": 64 << 20, "writable": True}}
    assert (the_problem(single(memory=docker), "shared memory").severity) is WARNING
    scant = {**memory, "shared": {"total": GIB, "free": 600 << 20, "writable": True}}
    assert the_problem(single(memory=scant), "shared memory").severity is NOTE
    none = {**memory, "shared": {"error": "No such file or directory"}}
    assert the_problem(single(memory=none), "shared memory").severity is WARNING


def test_limits() -> None:
    limits = machine().limits
    assert the_problem(single(limits={**limits, "open_files": [1024, 524288]}), "limits").severity is NOTE
    assert the_problem(single(limits={**limits, "open_files": [256, 256]}), "limits").severity is WARNING
    assert "512 per user" in the_problem(single(limits={**limits, "processes": [512, 512]}), "limits").message
    assert problems(single(limits={**limits, "processes": [512, 512], "root": True}), "limits") == []
    with_card = single(infiniband=[{"name": "mlx5_0/1"}])
    assert "InfiniBand" in the_problem(with_card, "limits").message


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
def test_variables(variable: str, value: str, level: Severity) -> None:
    diagnosis = the_problem(single(**on_gpus(2), environment={variable: value}), "variables")
    assert (diagnosis.severity, diagnosis.message) == (level, f"{variable} is {value}.")


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
def test_harmless_variables(variable: str, value: str) -> None:
    assert problems(single(**on_gpus(2), environment={variable: value}), "variables") == []


def test_variables_where_they_matter() -> None:
    without_gpu = the_problem(single(environment={"NCCL_P2P_DISABLE": "1"}), "variables")
    assert (without_gpu.severity, "no GPU" in without_gpu.cause) == (NOTE, True)
    with_card = single(**on_gpus(2), infiniband=[{"name": "mlx5_0/1"}], environment={"NCCL_IB_DISABLE": "1"})
    assert "this host has InfiniBand" in the_problem(with_card, "variables").message
    crashing = the_problem(single(environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}), "variables")
    assert (crashing.severity, "segmentation fault" in crashing.cause) == (ERROR, True)
