"""docs/recipes.md: recipes for one machine run as written, the others are valid and use options that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.config import flags, options
from tests.helpers.commands import BIN, environment
from tests.helpers.fork_server import prefix, prepared
from tests.helpers.launchers import FORKER
from tests.helpers.paths import JOBS, ROOT

yaml = pytest.importorskip("yaml")

PAGE = (ROOT / "docs" / "recipes.md").read_text()
TIMEOUT_SECONDS = 600.0

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


def block_with(text: str) -> str:
    [found] = [block for block in blocks("sh") if text in block]
    return found


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a recipe with two ranks, which are forked."""
    launcher = folder / "bin" / "torchrun"
    launcher.parent.mkdir(exist_ok=True)
    # The forking launcher needs no rendezvous.
    launcher.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(map(str, prepared(FORKER)))} "$@"\n')
    launcher.chmod(0o755)
    healthy = (JOBS / "ci_broken.py").read_text().replace("0.1 * (1 + dist.get_rank())", "0.1")
    (folder / "train.py").write_text(healthy)
    return subprocess.run(
        [
            *map(str, prefix(prepared())),
            "bash",
            "-e",
            "-c",
            script.replace("--nproc-per-node 8", "--nproc-per-node 2"),
        ],
        cwd=folder,
        env=environment(PATH=f"{launcher.parent}:{BIN}:{os.environ['PATH']}"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def test_one_node(tmp_path: Path) -> None:
    done = run(block_with("--html -- torchrun --standalone --nproc-per-node 8"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("ddpcheck-runs/*/report.html"))


def test_ci(tmp_path: Path) -> None:
    done = run(block_with("--fail-on warning"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"ddpcheck.xml", "ddpcheck.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("script", blocks("sh"))
def test_shell_is_valid_and_options_exist(script: str) -> None:
    subprocess.run(["bash", "-n", "-c", script], check=True)
    known = {flag for name, declared in options() for flag in flags(name, declared)} | {
        "--fail-on-regression"
    }
    for call in re.findall(r"ddpcheck (?:run|diff)(.*?)(?: -- |$)", script.replace("\\\n", " "), re.M):
        assert {word for word in call.split() if word.startswith("--")} - {"--"} <= known


@pytest.mark.parametrize("source", blocks("yaml"))
def test_jobs_of_kubernetes_begin_with_ddpcheck(source: str) -> None:
    job = yaml.safe_load(source)
    commands = [each["command"] for each in containers(job) if "command" in each]
    assert commands
    assert all(command[:2] == ["ddpcheck", "run"] and command[-1] == "--" for command in commands)


def containers(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [found for each in value for found in containers(each)]
    if not isinstance(value, dict):
        return []
    inner = [found for each in value.values() for found in containers(each)]
    return [value, *inner] if "command" in value else inner
