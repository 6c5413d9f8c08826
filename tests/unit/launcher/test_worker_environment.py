"""What a launcher of somebody else has to set, in each form, and the run folder for its workers."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from ddpcheck.config import Config
from ddpcheck.errors import OutputFolderError
from ddpcheck.launcher.process.command import BOOTSTRAP
from ddpcheck.launcher.run_folder import has_own_launcher
from ddpcheck.launcher.worker_environment import (
    as_bash,
    as_json,
    as_kubernetes,
    as_python,
    has_own_entries,
    prepare_run,
    worker_variables,
)
from ddpcheck.records.reader import read_run_file

AWKWARD = Config(run_dir="/a b/$(HOME)/it's", run_id='"x"', own_launcher=False, every=3)


def test_settings_reach_the_workers() -> None:
    variables = worker_variables(AWKWARD)
    assert variables["PYTHONPATH"] == BOOTSTRAP
    assert Config.from_environment(variables) == AWKWARD
    assert worker_variables(AWKWARD, Path("/opt/ddpcheck"))["PYTHONPATH"] == "/opt/ddpcheck/bootstrap"


def test_json_and_python() -> None:
    variables = worker_variables(AWKWARD)
    assert json.loads(as_json(variables)) == variables
    assert ast.literal_eval(as_python(variables)) == variables


def test_kubernetes() -> None:
    """The values are JSON strings, and so YAML; $( would be replaced by the kubelet."""
    lines = as_kubernetes(worker_variables(AWKWARD)).splitlines()
    assert lines[0] == "env:"
    assert [line.partition("name: ")[2] for line in lines[1::2]] == ["PYTHONPATH", "DDPCHECK_CONFIG"]
    value = json.loads(lines[4].partition("value: ")[2])
    assert value.replace("$$(", "$(") == worker_variables(AWKWARD)["DDPCHECK_CONFIG"]
    assert "$$(HOME)" in value


@pytest.mark.parametrize(("before", "after"), [(None, BOOTSTRAP), ("/own", f"{BOOTSTRAP}:/own")])
def test_bash(before: str | None, after: str) -> None:
    script = as_bash(worker_variables(AWKWARD)) + "env -0"
    environ = {"PATH": os.environ["PATH"], **({} if before is None else {"PYTHONPATH": before})}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, check=True)
    variables = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)
    assert variables["PYTHONPATH"] == after
    assert Config.from_environment(variables) == AWKWARD


def test_entries_that_the_printed_value_replaces() -> None:
    assert not has_own_entries({})
    assert not has_own_entries({"PYTHONPATH": BOOTSTRAP})
    assert has_own_entries({"PYTHONPATH": f"{BOOTSTRAP}:/own"})


def test_every_node_prepares_the_same_run(tmp_path: Path) -> None:
    first = prepare_run(Config(out=tmp_path / "run"))
    second = prepare_run(Config(out=tmp_path / "run", every=1))
    assert (first.run_dir, first.run_id) == (second.run_dir, second.run_id) == (str(tmp_path / "run"), "run")
    run = read_run_file(tmp_path / "run")
    assert not has_own_launcher(run)
    assert "pid" not in run


def test_a_run_of_another_job_is_not_joined(tmp_path: Path) -> None:
    prepare_run(Config(out=tmp_path / "run", job_id="7"))
    with pytest.raises(OutputFolderError):
        prepare_run(Config(out=tmp_path / "run", job_id="8"))


def test_a_run_that_has_ended_is_not_joined(tmp_path: Path) -> None:
    prepare_run(Config(out=tmp_path / "run"))
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ended": "now"}))
    with pytest.raises(OutputFolderError):
        prepare_run(Config(out=tmp_path / "run"))


def test_a_folder_that_only_the_workers_see(tmp_path: Path) -> None:
    config = prepare_run(Config(out=tmp_path / "run"), create=False)
    assert (config.run_dir, config.run_id, config.own_launcher) == (str(tmp_path / "run"), "run", False)
    assert not (tmp_path / "run").exists()
