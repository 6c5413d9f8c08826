"""Runs a command without and with `ddpcheck run`, and compares the two."""

from __future__ import annotations

import difflib
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.corpus import exit_flaw
from tests.corpus.jobs import FORKER
from tests.helpers.commands import BIN, CommandResult, CommandTimeout, run_command
from tests.helpers.fork_server import prepared

MOST_SECONDS = 300.0
MOST_TIMES = 3
# The folder for torchrun's `--log-dir`, below the one in which a program runs.
LOGS = "logs"
# What differs between any two runs of a program: speeds, addresses, temporary folders.
_VARYING = (
    (re.compile(r"'train_\w+_per_second': '?[\d.e+-]+'?|'train_runtime': '?[\d.e+-]+'?"), "<speed>"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "<address>"),
    (re.compile(r"/tmp/\w+"), "<folder>"),
)


@dataclass(frozen=True)
class Ended(CommandResult):
    """A finished program."""

    # The output of each rank, if the launcher writes it to separate files (LOGS).
    ranks: tuple[str, ...] = ()


# A finished program and ddpcheck's report about it.
WatchedResult = tuple[Ended, Mapping[str, Any]]


@dataclass(frozen=True)
class Pair:
    """The same program without and with ddpcheck, and the report."""

    plain: Ended
    watched: Ended
    report: Mapping[str, Any]

    def differences(self) -> list[str]:
        """Differences in exit status and output; empty is right."""
        found = []
        if self.plain.status != self.watched.status:
            found.append(f"exit status {self.watched.status} in place of {self.plain.status}")
        # Ranks that share a pipe may print in any order.
        pairs = [(sorted(lasting(self.plain.stdout)), sorted(lasting(self.watched.stdout)))]
        pairs += [(lasting(before), lasting(after)) for before, after in self._by_rank()]
        for before, after in pairs:
            found.extend(line for line in difflib.ndiff(before, after) if line[0] in "+-")
        return found

    def _by_rank(self) -> Iterator[tuple[str, str]]:
        yield from itertools.zip_longest(self.plain.ranks, self.watched.ranks, fillvalue="")

    def codes(self) -> list[str]:
        """Codes of findings above a note."""
        return sorted(
            {finding["code"] for finding in self.report["findings"] if finding["severity"] != "note"}
        )


def run_both(command: Sequence[object], **env: str) -> Pair:
    """Findings do not change the exit status here, so that the two can be compared."""
    env = {**exit_flaw.ENVIRONMENT, **env}
    plain, _ = _run_well(command, lambda folder: (run(command, folder, env), {}))
    watched, report = _run_well(command, lambda folder: _run_watched(command, folder, env))
    return Pair(plain, watched, report)


@dataclass(frozen=True)
class ForkedProgram:
    """A program that ranks run which were forked, without a launcher."""

    name: str
    script: Path
    arguments: Sequence[str] = ()


def run_forked(
    programs: Sequence[ForkedProgram], ranks: int, modules: Sequence[str], **env: str
) -> list[Pair]:
    """All programs in one command without ddpcheck and one with it; `modules` are imported once for all ranks."""
    sides: list[list[Ended]] = []
    for watched in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command = prepared(FORKER, _plan(programs, ranks, folder), folder / "results.jsonl", *modules)
            if watched:
                done, report = _run_watched(command, name, env)
            else:
                done = run(command, name, env)
            if not (folder / "results.jsonl").is_file():
                raise RuntimeError(f"the programs did not run: {done}")
            lines = (folder / "results.jsonl").read_text().splitlines()
            results = {row["name"]: row for row in map(json.loads, lines)}
            sides.append([_ended(folder, program, results[program.name]) for program in programs])
    pids = [set(results[program.name]["pids"]) for program in programs]
    return [Pair(*pair, _of_ranks(report, own)) for *pair, own in zip(*sides, pids, strict=True)]


def _plan(programs: Sequence[ForkedProgram], ranks: int, folder: Path) -> Path:
    jobs = [
        {
            "name": program.name,
            "script": str(program.script),
            "arguments": list(program.arguments),
            "ranks": ranks,
            "seconds": MOST_SECONDS,
            "logs": str(folder / program.name),
        }
        for program in programs
    ]
    plan = folder / "plan.json"
    plan.write_text(json.dumps(jobs), encoding="utf-8")
    return plan


def _ended(folder: Path, program: ForkedProgram, result: Mapping[str, Any]) -> Ended:
    outputs = [
        [(folder / program.name / f"rank-{rank}.{stream}").read_text() for rank in range(len(result["pids"]))]
        for stream in ("stdout", "stderr")
    ]
    return Ended(int(any(result["exits"])), "", "".join(outputs[1]), tuple(outputs[0]))


def _of_ranks(report: Mapping[str, Any], pids: set[int]) -> dict[str, Any]:
    """The attempts of these processes, and the findings about them."""
    attempts = [each for each in report["attempts"] if {row["pid"] for row in each["ranks"]} & pids]
    numbers = {each["number"] for each in attempts}
    findings = [finding for finding in report["findings"] if finding["attempt"] in numbers]
    return {"attempts": attempts, "findings": findings}


def _run_well(command: Sequence[object], once: Callable[[str], WatchedResult]) -> WatchedResult:
    """Run again only if torch failed a program after all its work: see `exit_flaw`."""
    [script] = [Path(str(word)) for word in command if str(word).endswith(".py")]
    for _ in range(MOST_TIMES):
        with tempfile.TemporaryDirectory() as folder:
            ended, report = once(folder)
        if not exit_flaw.was_torch_s_own(script, ended.stderr.splitlines(), stopped=False):
            break
    return ended, report


def _run_watched(command: Sequence[object], folder: str, env: Mapping[str, str]) -> WatchedResult:
    out = Path(folder) / "run"
    ended = run([BIN / "ddpcheck", "run", "--fail-on", "never", "--out", out, "--", *command], folder, env)
    file = out / "report.json"
    return ended, json.loads(file.read_text()) if file.is_file() else {"findings": [], "attempts": []}


def run(
    command: Sequence[object], folder: str, env: Mapping[str, str], most_seconds: float = MOST_SECONDS
) -> Ended:
    try:
        done = run_command(command, folder, env, most_seconds)
    except CommandTimeout as late:
        done = replace(late.result, stderr=f"{late.result.stderr}\nkilled after {most_seconds:.0f} seconds\n")
    logs = sorted(Path(folder).glob(f"{LOGS}/*/attempt_0/*/stdout.log"), key=lambda log: int(log.parent.name))
    return Ended(done.status, done.stdout, done.stderr, tuple(log.read_text() for log in logs))


def lasting(text: str) -> list[str]:
    """Lines without the parts that differ in every run."""
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return [line.strip() for line in text.splitlines() if line.strip()]
