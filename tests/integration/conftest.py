"""Runs real commands under `ddpcheck run` and gathers everything they left."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.commands import BIN as BIN
from tests.commands import Done as Done
from tests.commands import environment as environment
from tests.corpus.exit_flaw import ABORTED

JOBS = Path(__file__).parents[1] / "jobs"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
MOST_SECONDS = 240.0
# A flaw of torch with gloo, with or without ddpcheck (pytorch#179291): a DDP object, which torch itself holds in a
# cycle of references, may outlive destroy_process_group; a thread of gloo then needs the interpreter while it ends,
# and aborts. About one job in a thousand; such a job says nothing of ddpcheck and runs once more.
# Likewise where gloo could not connect the ranks with each other before anything began.
FLAWS = (ABORTED, "Gloo connectFullMesh failed")
MOST_TRIES = 3


@dataclass(frozen=True)
class Watched(Done):
    """A command that has ended under `ddpcheck run`, and the run it left; no report is an empty one."""

    folder: Path
    report: Mapping[str, Any]

    def codes(self, *severities: str) -> list[str]:
        """Codes of the findings, of all severities or of those named."""
        return [
            finding["code"]
            for finding in self.report["findings"]
            if not severities or finding["severity"] in severities
        ]

    def finding(self, code: str) -> Mapping[str, Any]:
        """The one finding of that code."""
        found = [finding for finding in self.report["findings"] if finding["code"] == code]
        assert len(found) == 1, f"{code}: {len(found)} findings\n{self}"
        return found[0]

    def records(self, rank: int, attempt: int = 0) -> list[dict[str, Any]]:
        """All records of one file of a rank, in order."""
        suffix = f".{attempt}" if attempt else ""
        return records_in(self.folder / f"rank-{rank:05d}{suffix}.jsonl")

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))


Run = Callable[..., Done]
RunWatched = Callable[..., Watched]


def records_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def healthy(watched: Watched, *, world_size: int, steps: int) -> None:
    """Every rank was there from beginning to end, and nothing is wrong."""
    assert watched.status == 0, str(watched)
    assert watched.report.get("verdict") == "ok", str(watched)
    assert watched.codes("error", "warning") == [], str(watched)
    assert "DDP605" not in watched.codes(), str(watched)
    assert (watched.report["world_size"], watched.report["steps"]) == (world_size, steps)
    [attempt] = watched.report["attempts"]
    assert [(row["rank"], row["status"], row["steps"]) for row in attempt["ranks"]] == [
        (rank, "finished", steps) for rank in range(world_size)
    ], str(watched)
    assert watched.files("rank-*.jsonl") == [f"rank-{rank:05d}.jsonl" for rank in range(world_size)]
    assert watched.files("fault-*.jsonl") == []
    [stepwise] = [
        check for check in watched.report["checks"] if check["name"] == "parameters after each step"
    ]
    assert (stepwise["compared"], stepwise["outcome"]) == (steps, "agree")


def run_to_end(
    command: Sequence[object], cwd: Path, env: Mapping[str, str], leaves: Path | None = None
) -> Done:
    """`leaves`: a folder that the command makes, taken away before it runs once more."""
    for _ in range(MOST_TRIES):
        done = _run_once(command, cwd, env)
        if not any(flaw in done.stderr for flaw in FLAWS):
            break
        print(f"once more, torch aborted at its end or gloo did not connect: {command}")
        if leaves is not None:
            shutil.rmtree(leaves, ignore_errors=True)
    return done


def _run_once(command: Sequence[object], cwd: Path, env: Mapping[str, str]) -> Done:
    try:
        return commands.run_to_end(command, cwd, env, MOST_SECONDS)
    except commands.TookTooLong as late:
        pytest.fail(f"{command} did not end\n{late}")


@pytest.fixture
def unwatched(tmp_path: Path) -> Run:
    """Runs a command as it is, in a folder of its own."""

    def run(*command: object, **env: str) -> Done:
        return run_to_end(command, tmp_path, env)

    return run


@pytest.fixture
def ddpcheck(tmp_path: Path) -> RunWatched:
    """Runs a command under `ddpcheck run`."""

    def run(*command: object, options: Sequence[object] = (), out: Path | None = None, **env: str) -> Watched:
        folder = out or tmp_path / "run"
        watch = [BIN / "ddpcheck", "run", "--out", folder, *options, "--", *command]
        done = run_to_end(watch, tmp_path, env, leaves=folder)
        report = folder / "report.json"
        content = json.loads(report.read_text()) if report.is_file() else {}
        return Watched(done.status, done.stdout, done.stderr, folder, content)

    return run


@pytest.fixture
def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
