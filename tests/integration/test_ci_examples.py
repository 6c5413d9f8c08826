"""The examples of docs/ci.md work as written: their shell steps and their tests, run as a CI system would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.helpers.commands import BIN, environment
from tests.helpers.fork_server import prefix, prepared
from tests.helpers.launchers import FORKER
from tests.helpers.paths import JOBS, ROOT

yaml = pytest.importorskip("yaml")

DOCS = ROOT / "docs" / "ci.md"
TIMEOUT_SECONDS = 600.0

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(), re.S | re.M)


def shell(script: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script as CI runners do: bash that stops at the first failure."""
    return subprocess.run(
        [*map(str, prefix(prepared())), "bash", "-e", "-o", "pipefail", "-c", script],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def steps_to_run(commands: list[str]) -> str:
    """Everything is installed already."""
    return "\n".join(command for command in commands if not command.startswith("pip install"))


def with_forking_torchrun(folder: Path) -> str:
    """A PATH whose torchrun forks its ranks, which takes a third of the time."""
    launcher = folder / "bin" / "torchrun"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, prepared(FORKER)))} "$@"\n')
    launcher.chmod(0o755)
    return f"{launcher.parent}:{BIN}:{os.environ['PATH']}"


def artifacts_exist(folder: Path, names: list[str]) -> None:
    assert all((folder / name).stat().st_size for name in names)


def test_github_gets_an_annotation_and_a_summary(tmp_path: Path) -> None:
    workflow: dict[str, Any] = yaml.safe_load(blocks("yaml")[0])
    [job] = workflow["jobs"].values()
    (tmp_path / "train.py").write_text((JOBS / "ci_broken.py").read_text())
    summary = tmp_path / "summary.md"
    done = shell(
        steps_to_run([step["run"] for step in job["steps"] if "run" in step]),
        tmp_path,
        PATH=with_forking_torchrun(tmp_path),
        GITHUB_STEP_SUMMARY=str(summary),
        GITHUB_WORKSPACE=str(tmp_path),
    )
    assert done.returncode == 10, done.stderr
    [annotation] = [line for line in done.stderr.splitlines() if line.startswith("::")]
    lines = (JOBS / "ci_broken.py").read_text().splitlines()
    step = next(number for number, line in enumerate(lines, start=1) if "optimizer.step()" in line)
    assert annotation.startswith(f"::error file=train.py,line={step},title=DDP206 ")
    assert "DDP206" in summary.read_text()
    [upload] = [step["with"]["path"] for step in job["steps"] if "upload" in step.get("uses", "")]
    artifacts_exist(tmp_path, upload.split())


def test_gitlab_gets_its_junit_file(tmp_path: Path) -> None:
    [job] = yaml.safe_load(blocks("yaml")[1]).values()
    healthy = (JOBS / "ci_broken.py").read_text().replace("0.1 * (1 + dist.get_rank())", "0.1")
    (tmp_path / "train.py").write_text(f"{healthy}    print('trained')\n")
    done = shell(steps_to_run(job["script"]), tmp_path, PATH=with_forking_torchrun(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n" * 2, "stdout belongs to the job"
    artifacts_exist(tmp_path, job["artifacts"]["paths"])
    suites = ElementTree.parse(tmp_path / job["artifacts"]["reports"]["junit"]).getroot()
    assert (suites.get("failures"), suites.get("errors")) == ("0", "0")


def test_the_pytest_plugin_runs_a_function_on_ranks(tmp_path: Path) -> None:
    """Of the documented tests, the marked one; each rank has its own learning rate, so it fails."""
    [source] = blocks("python")
    broken = source.replace("lr=rate", "lr=rate + dist.get_rank()").replace("[0.1, 0.5]", "[0.5]")
    (tmp_path / "test_training.py").write_text(broken)
    done = shell("python -m pytest -q -p no:cacheprovider -k itself", tmp_path, PYTEST_ADDOPTS="")
    assert done.returncode == 1, done.stdout
    assert "error DDP206" in done.stdout
    assert re.search(r"group 0, lr +0\.5 +1\.5", done.stdout)
    assert "1 failed, 2 deselected" in done.stdout


def test_the_action_annotates_and_gives_the_page(tmp_path: Path) -> None:
    """The script of action.yml with its defaults, as GitHub would run it."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    [step] = [step for step in action["runs"]["steps"] if step.get("id") == "run"]
    inputs = {name: str(given.get("default", "")) for name, given in action["inputs"].items()}
    inputs["command"] = "torchrun --nproc-per-node 2 train.py"
    variables = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
        for name, value in step["env"].items()
    }
    assert "${{" not in step["run"], "inputs would become part of the script"
    (tmp_path / "train.py").write_text((JOBS / "ci_broken.py").read_text())
    outputs = tmp_path / "outputs"
    done = shell(
        step["run"],
        tmp_path,
        PATH=with_forking_torchrun(tmp_path),
        GITHUB_OUTPUT=str(outputs),
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
        GITHUB_WORKSPACE=str(tmp_path),
        **variables,
    )
    assert done.returncode == 10, done.stderr
    assert "::error file=train.py" in done.stderr
    page = outputs.read_text().strip().removeprefix("page=")
    artifacts_exist(tmp_path, [page, "ddpcheck-report/report.xml"])
    assert action["outputs"]["page"]["value"] == "${{ steps.run.outputs.page }}"
