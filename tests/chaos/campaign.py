"""Runs jobs with a fault each, some at a time, and keeps how they ended."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.judge import wrongs
from tests.chaos.scene import JOB, STEPS, NoFaultError, Scene, weights
from tests.helpers.commands import environment
from tests.helpers.fork_server import prepared
from tests.helpers.watched_run import TORCH_DEFECTS

# A job that proved nothing is repeated, with another moment.
MAX_ATTEMPTS = 3


@dataclass
class Outcome:
    """A job of the campaign, and everything that should not have happened."""

    number: int
    fault: str
    seed: int
    wrong: list[str] = field(default_factory=list)
    # The fault struck too late, or torch itself failed: the job proves nothing.
    void: str = ""


def faults(only: str = "") -> list[Fault]:
    return [each for each in FAULTS if only in each.name and not each.missing()]


@cache
def plain_weights() -> Mapping[int, str]:
    """The result of the job without ddpcheck."""
    with tempfile.TemporaryDirectory() as folder:
        command = prepared(JOB, folder, "--steps", STEPS, "--pause", 0)
        subprocess.run([str(word) for word in command], check=True, env=environment(), timeout=300)
        return weights(Path(folder))


def run_fault(fault: Fault, number: int, seed: int, keep: Path | None = None) -> Outcome:
    """One job; its folder is moved to `keep` if something is wrong."""
    for attempt in range(MAX_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{number}-"))
        try:
            outcome = _run_once(fault, number, seed + 1_000_000 * attempt, folder)
            if outcome.wrong and keep is not None:
                _copy(folder, keep / folder.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if not outcome.void:
            break
    return outcome


def _run_once(fault: Fault, number: int, seed: int, folder: Path) -> Outcome:
    outcome = Outcome(number, fault.name, seed)
    expected = plain_weights()
    scene = Scene(folder, random.Random(seed), fault.on_nodes)
    try:
        fault.prepare(scene)
        scene.start()
        try:
            fault.strike(scene)
        except (NoFaultError, FileNotFoundError, ProcessLookupError) as error:
            outcome.void = f"no fault: {error}"
        scene.wait()
        if any(defect in launch.stderr for launch in scene.launches for defect in TORCH_DEFECTS):
            outcome.void = "a defect of torch ended the job"
        if not outcome.void:
            outcome.wrong = list(wrongs(scene, fault, expected))
    finally:
        scene.close()
    return outcome


def _copy(folder: Path, target: Path) -> None:
    # The disk of the job is unmounted: only the copies from before the fault and the notes of the job are left.
    shutil.copytree(folder, target, ignore_dangling_symlinks=True)


@dataclass
class Results:
    """Outcomes of several calls, kept in a file with one line each."""

    path: Path

    def __iter__(self) -> Iterator[Outcome]:
        if self.path.exists():
            yield from (Outcome(**json.loads(line)) for line in self.path.read_text().splitlines())

    def add(self, outcome: Outcome) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def campaign(
    numbers: Sequence[int],
    chosen: Sequence[Fault],
    seed: int,
    *,
    at_once: int = 1,
    seconds: float = float("inf"),
    keep: Path | None = None,
    ended: Callable[[Outcome], None],
) -> None:
    """Run the jobs with these numbers, with the faults in turn; begin none after `seconds`."""
    until = time.monotonic() + seconds
    # Starts the fork server, too.
    plain_weights()

    def run(number: int) -> Outcome | None:
        if time.monotonic() > until:
            return None
        return run_fault(chosen[number % len(chosen)], number, seed + number, keep)

    with ThreadPoolExecutor(at_once) as pool:
        for job in as_completed([pool.submit(run, number) for number in numbers]):
            outcome = job.result()
            if outcome is not None:
                ended(outcome)
