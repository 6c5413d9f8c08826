"""The runtime environment for workers of Ray. Needs no Ray: the real one is in tests/integration/test_schedulers.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.config import ENV_CONFIG, Config
from ddpcheck.launcher.process.command import BOOTSTRAP
from ddpcheck.ray import runtime_env, runtime_env_hook

RUN = Config(run_dir="/shared/run", run_id="run", every=7)


@pytest.fixture
def under_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CONFIG, RUN.to_environment()[ENV_CONFIG])


def test_workers_join_the_run_of_the_driver(under_run: None) -> None:
    variables = runtime_env()["env_vars"]
    assert Config.from_environment(variables) == RUN
    assert variables["PYTHONPATH"] == f"{BOOTSTRAP}:${{PYTHONPATH}}"


def test_what_the_program_gives_is_kept(under_run: None) -> None:
    given = {"working_dir": "/src", "env_vars": {"A": "1", "PYTHONPATH": "/own"}}
    environment = runtime_env_hook(given)
    assert environment["working_dir"] == "/src"
    assert environment["env_vars"]["A"] == "1"
    assert environment["env_vars"]["PYTHONPATH"] == f"{BOOTSTRAP}:/own"
    assert given == {"working_dir": "/src", "env_vars": {"A": "1", "PYTHONPATH": "/own"}}


def test_without_a_run_there_is_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CONFIG, raising=False)
    config = Config.from_environment(runtime_env(out=tmp_path / "run", every=3)["env_vars"])
    assert config is not None
    assert (config.run_dir, config.every, config.own_launcher) == (str(tmp_path / "run"), 3, False)
    assert (tmp_path / "run" / "run.json").exists()


def test_the_hook_does_nothing_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CONFIG, raising=False)
    assert runtime_env_hook(None) == {}
    assert runtime_env_hook({"env_vars": {"A": "1"}}) == {"env_vars": {"A": "1"}}


def test_an_error_in_the_hook_leaves_the_job_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CONFIG, "not json")
    assert runtime_env_hook({"env_vars": {"A": "1"}}) == {"env_vars": {"A": "1"}}
