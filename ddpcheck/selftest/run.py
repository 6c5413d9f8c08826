"""Runs the parts of `ddpcheck selftest` in child processes, and makes the report of what they found.

The job runs twice at the same time, once under `ddpcheck run`. Both train the same blocks of steps in turns: one waits
while the other one works, so that a machine that changes its speed changes it for both.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpcheck.sampling.nvml import open_gpus
from ddpcheck.selftest.model import CostResult, SelftestReport, WeightsResult

_JOB = Path(__file__).with_name("job.py")
_PART_SECONDS = 600.0
_POLL_SECONDS = 0.002
_MOST_TEXT = 300
# One rank makes no AllReduce; more than eight show nothing more.
_FEWEST_RANKS, _MOST_RANKS = 2, 8

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SelftestOptions:
    """How much is measured."""

    folder: Path
    blocks: int = 6
    steps: int = 24
    ranks: int = 0


class PartFailed(Exception):
    """A child process failed; the message says how."""


def run_selftest(options: SelftestOptions, progress: Progress) -> SelftestReport:
    report = SelftestReport(time.strftime("%Y-%m-%d %H:%M:%S %z"), platform.node(), gpus=_gpus())
    progress("comparing kernels with operators of torch")
    try:
        part = _kernels()
        report = replace(report, environment=part["environment"], kernels=part["kernels"])
    except PartFailed as error:
        report = replace(report, errors=(f"The kernels could not be compared: {error}",))
    try:
        return _with_job(report, options, progress)
    except PartFailed as error:
        return replace(report, weights=WeightsResult(0, 0, 0, error=str(error)))


def _gpus() -> dict[str, Any]:
    gpus = open_gpus()
    try:
        gpus.read()
        return gpus.describe()
    finally:
        gpus.close()


def _kernels() -> dict[str, Any]:
    command = [sys.executable, "-m", "ddpcheck.selftest.kernels"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PART_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PartFailed(f"no answer within {_PART_SECONDS:g} s") from error
    if done.returncode:
        raise PartFailed(_last_line(done.stderr) or f"status {done.returncode}")
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError) as error:
        raise PartFailed("its output is not JSON") from error


class _Job:
    """One of the two jobs, which trains a block when `train` is called."""

    def __init__(self, name: str, options: SelftestOptions, ranks: int, device: str, blocks: int) -> None:
        self.folder = options.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run_folder = self.folder / "run"
        self._log = self.folder / "output.txt"
        arguments = ["--ranks", ranks, "--blocks", blocks, "--steps", options.steps, "--device", device]
        job = [sys.executable, str(_JOB), str(self.folder), *map(str, arguments)]
        watched = [sys.executable, "-m", "ddpcheck", "run", "--no-live", "--out", str(self.run_folder), "--"]
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*(watched if name == "watched" else []), *job],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, name: str) -> Path:
        path = self.folder / name
        limit = time.monotonic() + _PART_SECONDS
        while not path.exists():
            if self._process.poll() is not None and not path.exists():
                raise PartFailed(f"it ended with status {self._process.returncode}: {self.last_line()}")
            if time.monotonic() > limit:
                raise PartFailed(f"no progress within {_PART_SECONDS:g} s: {self.last_line()}")
            time.sleep(_POLL_SECONDS)
        return path

    def train(self, block: int) -> float:
        """Seconds that the block took."""
        (self.folder / f"go-{block}").touch()
        return float(json.loads(self.wait_for(f"block-{block}").read_text())["seconds"])

    def finish(self) -> int:
        try:
            return self._process.wait(_PART_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise PartFailed("it did not end") from error

    def weights(self, ranks: int) -> dict[str, str]:
        """Digests by "rank N: name"."""
        weights = {}
        for rank in range(ranks):
            document = json.loads(self.wait_for(f"weights-{rank}.json").read_text())
            weights.update({f"rank {rank}: {name}": digest for name, digest in document["weights"].items()})
        return weights

    def last_line(self) -> str:
        return _last_line(self._log.read_text(errors="replace"))

    def stop(self) -> None:
        """End what is left of it, with its ranks: they share a session of their own."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _with_job(report: SelftestReport, options: SelftestOptions, progress: Progress) -> SelftestReport:
    device = str(report.environment.get("device_type", "cpu"))
    count = len(report.environment.get("devices") or ())
    # A single device cannot hold two ranks of NCCL: the job then runs on the CPU.
    if count < _FEWEST_RANKS:
        device = "cpu"
    ranks = options.ranks or min(max(count, _FEWEST_RANKS), _MOST_RANKS)
    progress(f"starting a job of {ranks} ranks ({device}), with and without ddpcheck")
    jobs = [_Job(name, options, ranks, device, options.blocks) for name in ("plain", "watched")]
    try:
        for job in jobs:
            job.wait_for("ready")
        plain: list[float] = []
        watched: list[float] = []
        for block in range(options.blocks):
            progress(f"training block {block + 1} of {options.blocks} with and without ddpcheck")
            # Each is first every other time.
            for job in jobs if block % 2 else reversed(jobs):
                (plain if job is jobs[0] else watched).append(job.train(block))
        progress("comparing final weights")
        weights = [job.weights(ranks) for job in jobs]
        statuses = [job.finish() for job in jobs]
        verdict, findings, own_us, device_us = _report_of(jobs[1].run_folder)
        differing = tuple(name for name, digest in weights[0].items() if weights[1].get(name) != digest)
        steps = 3 + options.blocks * options.steps
        result = WeightsResult(ranks, steps, len(weights[0]) // ranks, differing)
        if differing:
            progress("weights differ: training again without ddpcheck")
            result = replace(result, plain_repeats=_repeats(options, ranks, device, weights[0]))
        failed = [f"The job ended with status {status}." for status in statuses[:1] if status]
        return replace(
            report,
            weights=result,
            cost=CostResult(options.steps, tuple(plain), tuple(watched), own_us, device_us),
            verdict=verdict,
            findings=findings,
            errors=(*report.errors, *failed),
        )
    finally:
        for job in jobs:
            job.stop()


def _repeats(options: SelftestOptions, ranks: int, device: str, expected: Mapping[str, str]) -> bool:
    """Whether the job without ddpcheck has the same weights when it is run again."""
    again = _Job("plain-again", options, ranks, device, options.blocks)
    try:
        for block in range(options.blocks):
            again.train(block)
        return again.weights(ranks) == expected
    finally:
        again.stop()


def _report_of(folder: Path) -> tuple[str, tuple[str, ...], float | None, float | None]:
    """Verdict, findings, and what ddpcheck took per step, from the report of the watched job."""
    try:
        report = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError) as error:
        raise PartFailed(f"`ddpcheck run` left no report: {error}") from error
    findings = tuple(
        f"{each['severity']} {each['code']}: {each['message']}"[:_MOST_TEXT] for each in report["findings"]
    )
    ranks = (report.get("cost") or {}).get("ranks") or ()
    own = [each.get("cost_us") for each in ranks if each.get("cost_us") is not None]
    device = [each.get("device_us") for each in ranks if each.get("device_us")]
    return str(report["verdict"]), findings, max(own, default=None), max(device, default=None)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:_MOST_TEXT]
