"""Runs jobs of the corpus, with or without ddpcheck, and collects their results.

Importing torch takes longer than most of these jobs, so several jobs share one command: they run one after the other,
each on newly forked ranks, and each is an attempt in the report. Jobs that fail or hang, that use another launcher or
that have options of their own get a command of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpcheck.launcher.process.process_table import descendants, read_process
from tests.corpus import exit_flaw
from tests.corpus.header import Header
from tests.helpers.commands import BIN, environment
from tests.helpers.fork_server import prefix, prepared

FORKER = Path(__file__).with_name("forker.py")
BY_ENVIRONMENT = Path(__file__).with_name("by_environment.py")

JOB_SECONDS = 180.0
# Long enough for ddpcheck to detect a hang. Without ddpcheck such a job never ends.
HANG_SECONDS = 60.0
# For the imports before the first job; the forker limits the time of each job.
START_SECONDS = 180.0
STOP_SECONDS = 30.0
# For a process to write its stack.
STACK_SECONDS = 5.0
MOST_RETRIES = 2

_RUNNING: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Job:
    """One run of a script."""

    header: Header
    world_size: int
    case: str = ""

    @property
    def name(self) -> str:
        case = f" {self.case}" if self.case else ""
        return f"{self.header.path.parent.name}/{self.header.name}{case} x{self.world_size}"

    def alone(self, watched: bool = True) -> bool:
        """Whether it needs a command of its own."""
        header = self.header
        if header.launcher != "fork":
            return True
        return watched and bool(header.options or header.hangs or header.fails)


@dataclass(frozen=True)
class Outcome:
    """Result of a job: exit statuses, output, and the findings of ddpcheck."""

    job: Job
    # Of each rank, as far as known; negative for a signal.
    exits: tuple[int, ...] = ()
    # Ranks that had to be stopped from outside.
    stopped: tuple[int, ...] = ()
    stderr: tuple[str, ...] = ()
    # Stacks of the ranks that hung.
    stacks: tuple[str, ...] = ()
    seconds: float = 0.0
    # Exit status of the command, which is `ddpcheck run` if the job was watched. None: it had to be killed.
    status: int | None = 0
    findings: tuple[Mapping[str, Any], ...] = ()
    # Status of each rank that reported.
    reported: tuple[str, ...] = ()
    trouble: str = ""
    # How often it was run before and failed by a defect of torch.
    retried: int = 0


def jobs_of(header: Header) -> list[Job]:
    """One job for each case and world size of a script's header."""
    return [Job(header, size, case) for case in header.cases or ("",) for size in header.ranks]


def batches(jobs: Sequence[Job], most: int, watched: bool = True) -> list[list[Job]]:
    """Lists of at most `most` jobs that share one command."""
    alone = [[job] for job in jobs if job.alone(watched)]
    together = [job for job in jobs if not job.alone(watched)]
    # Scripts of one family take about the same time, so they are distributed over the batches.
    count = -(-len(together) // most) if together else 0
    # Jobs that wait for long go first.
    return alone + [together[start::count] for start in range(count)]


def run_batch(
    batch: Sequence[Job],
    *,
    watched: bool = True,
    seconds: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run jobs under one command and return their results, in order."""
    retried = 0
    while True:
        with tempfile.TemporaryDirectory(prefix="corpus-") as name:
            outcomes = _Batch(batch, Path(name), watched, seconds, env or {}).run()
        if retried == MOST_RETRIES or not any(failed_by_torch(outcome) for outcome in outcomes):
            return [replace(outcome, retried=retried) for outcome in outcomes]
        retried += 1


def failed_by_torch(outcome: Outcome) -> bool:
    """Whether a job failed only by the defect of torch that `exit_flaw` describes.

    The forker prevents it in its ranks; jobs of other launchers have to run again.
    """
    header = outcome.job.header
    if header.launcher == "fork" or header.hangs or header.fails:
        return False
    stopped = outcome.status is None
    if not stopped and outcome.status in (0, 10):
        return False
    return exit_flaw.was_torch_s_own(header.path, outcome.stderr, stopped=stopped)


class _Batch:
    """One command and the folder it works in."""

    def __init__(
        self, batch: Sequence[Job], folder: Path, watched: bool, seconds: float | None, env: Mapping[str, str]
    ) -> None:
        self._jobs, self._folder, self._watched, self._env = batch, folder, watched, env
        self._seconds = [seconds or (HANG_SECONDS if job.header.hangs else JOB_SECONDS) for job in batch]
        self._forked = batch[0].header.launcher == "fork"

    def run(self) -> list[Outcome]:
        (self._folder / "tmp").mkdir()
        command = self._forking() if self._forked else self._launching(self._jobs[0])
        if self._watched:
            options = ["--out", self._folder / "run", *self._jobs[0].header.options]
            command = [BIN / "ddpcheck", "run", *options, "--", *command]
        status, stderr = self._run_to_end(command)
        outcomes = list(self._outcomes(status, stderr))
        return [self._with_report(outcome) for outcome in outcomes] if self._watched else outcomes

    def _forking(self) -> list[object]:
        plan = self._folder / "plan.json"
        plan.write_text(
            json.dumps(
                [
                    {
                        "name": job.name,
                        "script": str(job.header.path.resolve()),
                        "arguments": [job.case] if job.case else [],
                        "ranks": job.world_size,
                        "seconds": seconds,
                        "logs": str(self._folder / "logs" / str(number)),
                    }
                    for number, (job, seconds) in enumerate(zip(self._jobs, self._seconds, strict=True))
                ]
            ),
            encoding="utf-8",
        )
        return list(prepared(FORKER, plan, self._folder / "results.jsonl"))

    def _launching(self, job: Job) -> list[object]:
        script = [job.header.path.resolve(), *([job.case] if job.case else [])]
        if job.header.launcher == "python":
            return [sys.executable, *script]
        if job.header.launcher == "environment":
            return [sys.executable, BY_ENVIRONMENT, job.world_size, *script]
        return [BIN / "torchrun", "--standalone", "--nproc-per-node", job.world_size, *script]

    def _run_to_end(self, command: Sequence[object]) -> tuple[int | None, str]:
        """The command's exit status, None if it had to be killed, and its stderr."""
        log = self._folder / "stderr"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [str(word) for word in (*prefix(command), *command)],
                cwd=self._folder / "tmp",
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                start_new_session=True,
            )
            _RUNNING.add(process)
            try:
                status: int | None = process.wait(START_SECONDS + sum(self._seconds))
            except subprocess.TimeoutExpired:
                status = None
                ask_for_stacks(process.pid)
            finally:
                end_group(process)
                _RUNNING.discard(process)
        return status, log.read_text(encoding="utf-8", errors="replace")

    def _environment(self) -> dict[str, str]:
        return {
            **environment(),
            "TMPDIR": str(self._folder / "tmp"),
            **({} if self._forked else exit_flaw.ENVIRONMENT),
            **self._env,
        }

    def _outcomes(self, status: int | None, stderr: str) -> Iterator[Outcome]:
        results = self._results()
        for number, job in enumerate(self._jobs):
            done = results.get(job.name)
            if not self._forked:
                stopped = tuple(range(job.world_size)) if status is None else ()
                yield Outcome(job, stopped=stopped, stderr=(stderr,), status=status)
            elif done is None:
                # The job ended together with the command: ddpcheck stopped it, or something failed.
                trouble = "" if job.header.hangs else f"did not run: {_tail(stderr)}"
                yield Outcome(job, status=status, trouble=trouble)
            else:
                yield Outcome(
                    job,
                    exits=tuple(done["exits"]),
                    stopped=tuple(done["stopped"]),
                    stderr=self._logs(number, job.world_size, "stderr"),
                    stacks=self._logs(number, job.world_size, "stacks"),
                    seconds=done["seconds"],
                    status=status,
                )

    def _results(self) -> dict[str, dict[str, Any]]:
        path = self._folder / "results.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {row["name"]: row for row in map(json.loads, lines)}

    def _logs(self, number: int, world_size: int, kind: str) -> tuple[str, ...]:
        folder = self._folder / "logs" / str(number)
        paths = [folder / f"rank-{rank}.{kind}" for rank in range(world_size)]
        return tuple(
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in paths
        )

    def _with_report(self, outcome: Outcome) -> Outcome:
        path = self._folder / "run" / "report.json"
        if not path.exists():
            return replace(outcome, trouble=outcome.trouble or "ddpcheck left no report.json")
        report = json.loads(path.read_text(encoding="utf-8"))
        mine = self._attempts(report, outcome.job)
        return replace(
            outcome,
            findings=tuple(f for f in report["findings"] if len(self._jobs) == 1 or f["attempt"] in mine),
            reported=tuple(
                row["status"] for a in report["attempts"] if a["number"] in mine for row in a["ranks"]
            ),
        )

    def _attempts(self, report: Mapping[str, Any], job: Job) -> set[int]:
        """The attempts of a job, by the process ids of its ranks: a job may make its process group twice."""
        if len(self._jobs) == 1:
            return {attempt["number"] for attempt in report["attempts"]}
        pids = set(self._results().get(job.name, {}).get("pids", ()))
        return {a["number"] for a in report["attempts"] if any(row["pid"] in pids for row in a["ranks"])}


def end_all() -> None:
    """Stop all running commands; callers that wait for one continue."""
    for process in list(_RUNNING):
        process.terminate()


def ask_for_stacks(root: int) -> None:
    """Make every leaf of the process tree write its stack and abort, one after the other.

    Their launchers are stopped meanwhile: otherwise they would end the other ranks after the first abort.
    """
    processes = [process for process in descendants(root) if not process.is_gone]
    parents = {process.parent for process in processes}
    launchers = [process.pid for process in processes if process.pid in parents]
    for pid in launchers:
        _send(pid, signal.SIGSTOP)
    for pid in (process.pid for process in processes if process.pid not in parents):
        _send(pid, signal.SIGABRT)
        until = time.monotonic() + STACK_SECONDS
        while time.monotonic() < until and (left := read_process(pid)) is not None and not left.is_gone:
            time.sleep(0.02)
    for pid in launchers:
        _send(pid, signal.SIGCONT)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Stop a command and its whole process group, first by SIGTERM so that it can stop its job itself."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _tail(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
