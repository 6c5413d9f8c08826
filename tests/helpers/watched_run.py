"""Runs commands under `ddpcheck run` and reads the run folder that they leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import to_mapping
from tests.corpus.exit_flaw import ABORTED
from tests.helpers.commands import BIN, CommandResult, CommandTimeout, run_command

# Not a measure of speed: some commands run a hundred jobs, and others may use the machine too.
TIMEOUT_SECONDS = 1800.0
# Two defects of torch with gloo, with or without ddpcheck. A job that hits one proves nothing and runs again.
# 1. pytorch#179291: torch keeps a DDP object in a reference cycle, so it may outlive destroy_process_group. A gloo
#    thread then needs the interpreter while it exits, and the process aborts. About one job in a thousand.
# 2. gloo fails to connect the ranks before the job begins.
TORCH_DEFECTS = (ABORTED, "Gloo connectFullMesh failed")
MAX_ATTEMPTS = 3
# Name, in report.json, of the check that compares the parameters of all ranks after each step.
STEP_CHECK = "parameters after each step"


@dataclass(frozen=True)
class WatchedRun(CommandResult):
    """A command that ran under `ddpcheck run`, and its run folder. `report` is empty where there is no report.json."""

    folder: Path
    report: Mapping[str, Any]

    def codes(self, *severities: str) -> list[str]:
        """Codes of the findings, of all severities or of the given ones."""
        return [
            finding["code"]
            for finding in self.report["findings"]
            if not severities or finding["severity"] in severities
        ]

    def finding(self, code: str) -> Mapping[str, Any]:
        """The only finding with that code."""
        results = [finding for finding in self.report["findings"] if finding["code"] == code]
        assert len(results) == 1, f"{code}: {len(results)} findings\n{self}"
        return results[0]

    def records(self, rank: int, attempt: int = 0) -> list[dict[str, Any]]:
        """All records of a rank's file, in order."""
        suffix = f".{attempt}" if attempt else ""
        return records_in(self.folder / f"rank-{rank:05d}{suffix}.jsonl")

    def node_records(self, *kinds: str) -> list[dict[str, Any]]:
        """Records of all node logs, of all kinds or of the given ones."""
        records = [record for path in sorted(self.folder.glob("node-*.jsonl")) for record in records_in(path)]
        return [record for record in records if not kinds or record["kind"] in kinds]

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))


Run = Callable[..., CommandResult]
RunWatched = Callable[..., WatchedRun]


def records_in(path: Path) -> list[dict[str, Any]]:
    """The records of a file: JSON lines, and blocks in the files of ranks."""
    if not path.name.startswith("rank-"):
        return [json.loads(line) for line in path.read_text().splitlines()]
    file = RecordFile(path)
    records = list(map(to_mapping, file.all()))
    assert (file.bad, file.torn) == (0, False), path
    return records


def run_to_end(
    command: Sequence[object], cwd: Path, env: Mapping[str, str], leaves: Path | None = None
) -> CommandResult:
    """Run a command, and again if a known defect of torch ended it.

    `leaves`: a folder that the command makes. It is removed before the next attempt.
    """
    for _ in range(MAX_ATTEMPTS):
        result = _run_once(command, cwd, env)
        if not any(defect in result.stderr for defect in TORCH_DEFECTS):
            break
        print(f"running again after a defect of torch: {command}")
        if leaves is not None:
            shutil.rmtree(leaves, ignore_errors=True)
    return result


def _run_once(command: Sequence[object], cwd: Path, env: Mapping[str, str]) -> CommandResult:
    try:
        return run_command(command, cwd, env, TIMEOUT_SECONDS)
    except CommandTimeout as late:
        pytest.fail(f"{command} did not end\n{late}")


def run_watched(
    command: Sequence[object],
    cwd: Path,
    *,
    options: Sequence[object] = (),
    out: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> WatchedRun:
    """Run a command under `ddpcheck run` in `cwd`; `out` is the run folder, `cwd`/run by default."""
    folder = out or cwd / "run"
    watch = [BIN / "ddpcheck", "run", "--out", folder, *options, "--", *command]
    return read_run(run_to_end(watch, cwd, env or {}, leaves=folder), folder)


def read_run(result: CommandResult, folder: Path) -> WatchedRun:
    """A finished command together with the run folder it left."""
    report = folder / "report.json"
    content: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}
    return WatchedRun(result.status, result.stdout, result.stderr, folder, content)


def assert_healthy(run: WatchedRun, *, world_size: int, steps: int) -> None:
    """Every rank reported from start to end, and there is no finding."""
    assert run.status == 0, str(run)
    assert run.report.get("verdict") == "ok", str(run)
    assert run.codes("error", "warning") == [], str(run)
    assert "DDP605" not in run.codes(), str(run)
    assert (run.report["world_size"], run.report["steps"]) == (world_size, steps)
    [attempt] = run.report["attempts"]
    assert [(row["rank"], row["status"], row["steps"]) for row in attempt["ranks"]] == [
        (rank, "finished", steps) for rank in range(world_size)
    ], str(run)
    assert run.files("rank-*.jsonl") == [f"rank-{rank:05d}.jsonl" for rank in range(world_size)]
    assert run.files("fault-*.jsonl") == []
    [check] = [check for check in run.report["checks"] if check["name"] == STEP_CHECK]
    assert (check["compared"], check["outcome"]) == (steps, "agree")
