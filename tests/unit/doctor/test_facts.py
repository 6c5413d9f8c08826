"""Where the doctor's facts come from: the system, other Pythons, and NVML."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.config import Config
from ddpcheck.doctor.facts.injection import ENV_TRIAL, injection_in_child, run_in_child
from ddpcheck.doctor.facts.machine import collect, folder_facts, memory_limit, name_facts, processor_limit
from ddpcheck.doctor.facts.record import Facts, rank_numbers
from ddpcheck.doctor.model import DoctorContext, DoctorReport, diagnose
from ddpcheck.launcher.process.command import BOOTSTRAP, command_environment
from tests.helpers import nvml


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def injected(tmp_path: Path, python: str) -> dict[str, Any]:
    environ = command_environment(Config(run_dir=str(tmp_path), run_id="doctor"))
    return injection_in_child(python, {**environ, ENV_TRIAL: BOOTSTRAP})


def test_ddpcheck_is_injected_into_this_python(tmp_path: Path) -> None:
    facts = injected(tmp_path, sys.executable)
    assert (facts["into"], facts["armed"], facts["flags"]) == ("a child", True, [])


@pytest.mark.parametrize(
    ("option", "flag"), [("-I", "isolated"), ("-E", "ignore_environment"), ("-S", "no_site")]
)
def test_options_that_prevent_injection(tmp_path: Path, option: str, flag: str) -> None:
    facts = injected(tmp_path, program(tmp_path / "python", f'exec {sys.executable} {option} "$@"'))
    assert (facts["armed"], flag in facts["flags"]) == (False, True)


def test_a_wrapper_that_overwrites_the_path(tmp_path: Path) -> None:
    facts = injected(
        tmp_path, program(tmp_path / "python", f'PYTHONPATH=/opt/lib exec {sys.executable} "$@"')
    )
    assert (facts["armed"], facts["first_on_path"]) == (False, False)


def test_a_sitecustomize_that_comes_first(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    first = f'PYTHONPATH={tmp_path}:"$PYTHONPATH" exec {sys.executable} "$@"'
    facts = injected(tmp_path, program(tmp_path / "python", first))
    assert (facts["armed"], facts["sitecustomize"]) == (False, str(tmp_path / "sitecustomize.py"))


def test_a_sitecustomize_of_the_user_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    behind = f'PYTHONPATH="$PYTHONPATH":{tmp_path} exec {sys.executable} "$@"'
    facts = injected(tmp_path, program(tmp_path / "python", behind))
    assert (facts["armed"], facts["sitecustomize"]) == (True, str(tmp_path / "sitecustomize.py"))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -SEGV $$", "it was killed by SIGSEGV"),
        ("echo it is broken >&2; exit 3", "it is broken"),
        ("echo no JSON", "its output is not JSON"),
    ],
)
def test_a_python_that_does_not_answer(tmp_path: Path, script: str, error: str) -> None:
    assert run_in_child(program(tmp_path / "python", script), "interpreter.py") == {"error": error}


def test_a_missing_python(tmp_path: Path) -> None:
    assert "No such file" in run_in_child(str(tmp_path / "none"), "interpreter.py")["error"]


def test_the_interpreter_of_another_python() -> None:
    facts = run_in_child(sys.executable, "interpreter.py")
    assert facts["version"] == ".".join(map(str, sys.version_info[:3]))


def test_limits_of_control_groups(tmp_path: Path) -> None:
    second, first = tmp_path / "second", tmp_path / "first"
    (second / "job" / "step").mkdir(parents=True)
    (second / "job" / "memory.max").write_text("1000000\n")
    (second / "job" / "step" / "memory.max").write_text("max\n")
    (second / "job" / "cpu.max").write_text("150000 100000\n")
    (second / "job" / "step" / "cpu.max").write_text("max 100000\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert (memory_limit(second, own), processor_limit(second, own)) == (1_000_000, 1.5)
    for controller in ("memory", "cpu,cpuacct"):
        (first / controller).mkdir(parents=True)
    (first / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (first / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("200000\n")
    (first / "cpu,cpuacct" / "cpu.cfs_period_us").write_text("100000\n")
    own.write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/\n")
    # The path is that of the host; in the container only the root exists.
    assert (memory_limit(first, own), processor_limit(first, own)) == (None, 2.0)
    assert (memory_limit(tmp_path / "none", own), processor_limit(tmp_path / "none", own)) == (None, None)


def test_names() -> None:
    facts = name_facts({"MASTER_ADDR": "127.0.0.1"})
    assert facts["host"] == socket.gethostname()
    assert facts["master"] == {"name": "127.0.0.1", "addresses": ["127.0.0.1"], "own": ["127.0.0.1"]}
    unresolved = name_facts({"MASTER_ADDR": "no such host"})["master"]
    assert (unresolved["addresses"], bool(unresolved["reason"])) == ([], True)


def test_a_folder_that_can_be_written_and_one_that_cannot(tmp_path: Path) -> None:
    facts = folder_facts(tmp_path / "not" / "yet")
    assert (facts["writable"], facts["free"] > 0) == (True, True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    closed = folder_facts(tmp_path / "file" / "runs")
    assert (closed["writable"], "Not a directory" in closed["reason"]) == (False, True)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_PROCID": "0"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    ],
)
def test_ranks_of_any_launcher(environ: dict[str, str]) -> None:
    facts = rank_numbers(environ)
    assert (facts["rank"], facts["world_size"], facts["local_rank"]) == (3, 4, 1)


def collected(tmp_path: Path, **environ: str) -> Facts:
    return collect(tmp_path, lambda: {"version": "2.13.0"}, dict, environ=environ)


def test_only_variables_on_the_list_are_shown(tmp_path: Path) -> None:
    facts = collected(
        tmp_path, NCCL_DEBUG="INFO", WANDB_API_KEY="s3cret", HOME="/home/s3cret", PYTHONPATH="s3cret"
    )
    assert facts.environment == {"NCCL_DEBUG": "INFO"}
    assert "s3cret" not in DoctorReport.of(DoctorContext((facts,))).to_json()


def test_a_source_that_fails_hides_no_other(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no luck")

    facts = collect(tmp_path, broken, broken, environ={})
    assert facts.torch == {"error": "RuntimeError: no luck"}
    assert facts.folder["writable"]
    assert diagnose(DoctorContext((facts,)))[0].severity is Severity.ERROR


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.compiled_into(tmp_path_factory.mktemp("nvml"))


# The library is found when a process starts.
_GPUS = """
import json
from ddpcheck.doctor.model import all_checks
from ddpcheck.doctor.facts.machine import gpu_facts
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import DoctorContext
from ddpcheck.privacy import allowed_environment
import os
facts = Facts("node0", gpus=gpu_facts(), environment=allowed_environment(os.environ))
checks = [check for check in all_checks() if check.name in ("GPUs", "GPUs of ranks")]
print(json.dumps([[one.level, one.message] for check in checks for one in check.run(DoctorContext((facts,)))]))
"""


def of_gpus(library: Path, script: str, **environ: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _GPUS],
        env={**os.environ, **nvml.environment(library, script), **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    facts: list[list[str]] = json.loads(done.stdout)
    # The library's GPUs have half their lanes.
    return [row for row in facts if "PCIe lanes" not in row[1]]


def test_gpus_by_nvml(library: Path) -> None:
    assert of_gpus(library, "devices 2\nlinks 4\n") == []
    sick = of_gpus(library, f"devices 4\nthrottle 64\nprocess 3 77 {30 << 30}\n", CUDA_VISIBLE_DEVICES="0,9")
    assert ["warning", "GPU 2 is throttled: hardware thermal slowdown."] in sick
    assert ["warning", "GPU 3 is in use: process 77 holds 4.3 GB of its memory."] in sick
    assert ["note", "No peer-to-peer access between GPUs 0-2, 0-3, 1-2, 1-3."] in sick
    assert ["problem", "CUDA_VISIBLE_DEVICES is 0,9, but 9 is none of the 4 GPUs."] in sick


def test_a_gpu_that_is_lost_by_nvml(library: Path) -> None:
    facts = of_gpus(library, "devices 2\nlinks 4\nlost 1 0.000001\n")
    assert ["problem", "GPU 1 is lost: the driver cannot reach it."] in facts


def test_a_driver_that_does_not_answer(library: Path) -> None:
    [facts] = of_gpus(library, "fail nvmlInitWithFlags 18\n")
    assert facts[0] == "warning"
    assert "NVML does not answer" in facts[1]
