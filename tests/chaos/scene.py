"""One job of the campaign: its folders and processes, how it is started, and how it ends."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import processes
from tests.helpers.commands import BIN, environment
from tests.helpers.fork_server import CLIENT, prefix, prepared
from tests.lab.lab import Lab, make_lab

JOB = Path(__file__).with_name("job.py")
WORLD_SIZE, STEPS = 2, 100
# A job takes some 4 seconds, and ends itself after a minute. At this limit it is killed, and counts as harmed.
LIMIT_SECONDS = 150.0
# How long processes may take to end after their parent.
END_SECONDS = 15.0
# In the environment of all programs of the job, and of one node.
MARK, NODE = "CHAOS_JOB", "CHAOS_NODE"
STORE_PORT = 29400


class NoFaultError(Exception):
    """The job did not reach the point that a fault waits for."""


@dataclass
class Launch:
    """`ddpcheck run` on one node, and what came of it."""

    run_dir: Path
    process: subprocess.Popen[str]
    first_rank: int
    # The process of `ddpcheck run`, which is a fork of the server of the tests; the leader of its session.
    pid: int = 0
    status: int = 0
    stderr: str = ""
    # A fault has killed the launcher and all ranks of this node: nobody is left who could clean up.
    gone: bool = False


@dataclass
class Scene:
    """The job, and what a fault may do to it."""

    folder: Path
    chance: random.Random
    # The job runs on two nodes of a lab, with a launcher on each.
    on_nodes: bool = False
    # Without it, each node has a run folder of its own.
    shared_folder: bool = True
    # Environment and options of `ddpcheck run` that the fault asks for.
    env: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    lab: Lab | None = None
    # Copies of the run folders as they were before the fault: what they contain must be readable afterwards.
    copies: dict[Path, Path] = field(default_factory=dict)
    # Shared-memory files of the launchers.
    segments: set[Path] = field(default_factory=set)
    # Closed when the job has ended: unmounts, removes control groups and the lab.
    cleanups: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        for path in (self.folder, self.state, self.temporary):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def run_dir(self) -> Path:
        return self.folder / "disk" / "run"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def mark(self) -> str:
        """In the environment of all programs of the job."""
        return f"{MARK}={os.getpid()}-{self.folder.name}"

    # Starting

    def start(self) -> None:
        self.run_dir.parent.mkdir(exist_ok=True)
        if not self.on_nodes:
            job = prepared(JOB, self.state, "--steps", STEPS)
            command = self._command(self.run_dir, job)
            process = subprocess.Popen(
                [str(word) for word in (*prefix(command), *command)],
                cwd=self.folder,
                env=self._environment(0),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self.launches.append(Launch(self.run_dir, process, 0))
            return
        self.lab = self.cleanups.enter_context(make_lab(WORLD_SIZE, self.folder / "hosts"))
        for rank, host in enumerate(self.lab.hosts):
            ranks = ("--first-rank", rank, "--local-ranks", 1, "--store", f"{self.lab[0].name}:{STORE_PORT}")
            run_dir = self.run_dir if self.shared_folder else self.run_dir.with_name(f"run-{rank}")
            # The same job on all nodes; a node does not wait long for a launcher that is gone.
            command = self._command(
                run_dir,
                prepared(JOB, self.state, "--steps", STEPS, *ranks),
                *("--run-id", "chaos", "--wait-nodes", 5),
            )
            self.launches.append(Launch(run_dir, host.start(command, env=self._environment(rank)), rank))

    def _command(self, run_dir: Path, job: Sequence[object], *options: object) -> list[object]:
        return [BIN / "ddpcheck", "run", "--out", run_dir, *self.options, *options, "--", *job]

    def _environment(self, node: int) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return environment(**{name: value, NODE: str(node), "TMPDIR": str(self.temporary), **self.env})

    # While it runs

    def wait_for_step(self, step: int) -> None:
        """Wait until all ranks have finished this step, and note the processes and files of the job."""
        deadline = time.monotonic() + 120.0
        while min(map(self.steps_of, range(WORLD_SIZE))) <= step:
            if any(launch.process.poll() is not None for launch in self.launches):
                raise NoFaultError(f"the job ended before step {step}")
            if time.monotonic() > deadline:
                raise NoFaultError(f"the job did not reach step {step}")
            time.sleep(0.01)
        for launch in self.launches:
            launch.pid = launch.pid or self._launcher(launch)
            self.segments |= processes.segments(launch.pid)

    def copy_folders(self) -> None:
        """Keep what has been written up to now."""
        for launch in self.launches:
            if launch.run_dir not in self.copies:
                copy = self.folder / f"before-{len(self.copies)}"
                shutil.copytree(launch.run_dir, copy)
                self.copies[launch.run_dir] = copy

    def steps_of(self, rank: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.state / f"steps-{rank}").stat().st_size
        return 0

    def rank_pid(self, rank: int) -> int:
        return int((self.state / f"pid-{rank}").read_text())

    def _launcher(self, launch: Launch) -> int:
        """Its own forks have the same command line."""
        words = {"run", "--out", str(launch.run_dir)}
        matching = {
            pid
            for pid in processes.pids()
            if words <= set(command := processes.command_line(pid))
            and str(CLIENT) not in command[:5]
            and processes.has_variable(pid, self.mark)
            and processes.has_variable(pid, f"{NODE}={launch.first_rank}")
        }
        for pid in matching:
            if processes.parent(pid) not in matching:
                return pid
        raise NoFaultError("ddpcheck run has ended")

    def of_node(self, number: int) -> list[int]:
        """All processes of a node of the lab."""
        assert self.lab is not None
        command = ["ip", "netns", "pids", self.lab[number].namespace]
        return [int(pid) for pid in subprocess.check_output(command, text=True).split()]

    # The end

    def wait(self) -> None:
        """Wait for the launchers, and for processes that a killed launcher has left."""
        deadline = time.monotonic() + LIMIT_SECONDS
        for launch in self.launches:
            try:
                _, launch.stderr = launch.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                launch.status = launch.process.returncode
            except subprocess.TimeoutExpired:
                self.kill_all()
                _, launch.stderr = launch.process.communicate()
                launch.status = -signal.SIGALRM
        while self.ranks_alive() and time.monotonic() < deadline:
            time.sleep(0.05)

    def ranks_alive(self) -> bool:
        started = [rank for rank in range(WORLD_SIZE) if (self.state / f"pid-{rank}").exists()]
        return any(processes.is_alive(self.rank_pid(rank)) for rank in started)

    def processes(self) -> list[int]:
        """Processes of this job that are alive. Forks of the server have its environment, so the session counts too."""
        sessions = {launch.pid for launch in self.launches} - {0}
        return [
            pid
            for pid in processes.pids()
            if processes.is_alive(pid)
            and (processes.session(pid) in sessions or processes.has_variable(pid, self.mark))
        ]

    def left_behind(self) -> list[str]:
        """Processes, descriptors, shared memory and temporary files that are still there some time after the end."""
        deadline = time.monotonic() + END_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        named = [f"process {pid}: {' '.join(processes.command_line(pid))[:150]}" for pid in left]
        if any(launch.gone for launch in self.launches):
            # Another run on the machine removes what a node that was killed as a whole leaves.
            self._run_another()
        named += [f"shared memory {path}" for path in sorted(self.segments) if path.exists()]
        named += [
            f"temporary file {path.name}" for path in self.temporary.rglob("*") if "ddpcheck" in path.name
        ]
        for run_dir in {launch.run_dir for launch in self.launches}:
            if run_dir.is_dir():
                named += [f"temporary file {path.name} in the run folder" for path in run_dir.glob(".*")]
        for path in sorted(self.state.glob("descriptors-*")):
            # A record file may be opened later, but only once.
            opened = path.read_text().splitlines()
            records = {
                target for target in opened if opened.count(target) == 1 and self._is_record_file(target)
            }
            if left_open := [target for target in opened if target not in records]:
                named.append(f"{path.name} of a rank: {left_open}")
        return named

    def _is_record_file(self, target: str) -> bool:
        # A file that was removed has another name here.
        return (
            any(Path(target).parent == launch.run_dir for launch in self.launches) and Path(target).exists()
        )

    def _run_another(self) -> None:
        command = [BIN / "ddpcheck", "run", "--out", self.folder / "another", "--quiet", "--", "true"]
        subprocess.run(list(map(str, command)), env=self._environment(0), capture_output=True, timeout=120)

    def kill_all(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill_all()
        for launch in self.launches:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.process.wait(10)
        self.cleanups.close()


def weights(state: Path) -> Mapping[int, str]:
    """The digest of the final state of each rank that reached its end."""
    return {int(path.name.partition("-")[2]): path.read_text() for path in state.glob("weights-*")}
