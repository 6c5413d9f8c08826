"""Runs scripts on ranks forked from this process, which has imported torch already.

    python forker.py PLAN RESULTS [MODULES ...]           jobs one after the other; the modules are imported once
    python forker.py --nproc-per-node 2 SCRIPT ARGUMENTS  one job, as torchrun would run it

PLAN is a JSON list of jobs: script, arguments, ranks, seconds, logs (a folder). A line of JSON about each job is added
to RESULTS when it ends: process id and exit status of every rank, and which ranks had to be stopped. A rank is as close
to `python script` under a launcher as a fork can be: it has its own environment variables, folder and output, uncaught
exceptions go through sys.excepthook, and exit handlers run at the end.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.optim  # noqa: F401  # slow to import: once here instead of once in each rank
from free_port import free_port

JOBS = str(Path(__file__).parents[1] / "jobs")
sys.path.insert(0, JOBS)
import forking  # noqa: E402

# Scripts must not import the jobs of the tests by accident.
sys.path.remove(JOBS)

RANKS_OPTION = "--nproc-per-node"
LAUNCH_SECONDS = 400.0
# How long the other ranks may continue after one has failed, as under torchrun.
GRACE_SECONDS = 3.0
KILL_SECONDS = 3.0
# For ranks that have to be stopped to write their stacks.
STACK_SECONDS = 1.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Job:
    """A script and the ranks to run it on."""

    script: str
    arguments: list[str]
    ranks: int
    seconds: float
    # Where each rank's output goes; None: to this process's.
    logs: Path | None = None


def main() -> int:
    if sys.argv[1] == RANKS_OPTION:
        forking.prepare()
        ranks, script, *arguments = sys.argv[2:]
        _, exits, _ = run_job(Job(script, arguments, int(ranks), LAUNCH_SECONDS), folder=None)
        return int(any(exits))
    plan, results, modules = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    for module in modules:
        importlib.import_module(module)
    forking.prepare()
    with results.open("a", encoding="utf-8") as sink:
        for planned in json.loads(plan.read_text(encoding="utf-8")):
            sink.write(json.dumps({"name": planned.pop("name"), **run_planned(planned)}) + "\n")
            sink.flush()
    return 0


def run_planned(planned: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    job = Job(**{**planned, "logs": Path(planned["logs"])})
    with tempfile.TemporaryDirectory() as folder:
        pids, exits, stopped = run_job(job, folder)
    return {
        "pids": pids,
        "exits": exits,
        "stopped": stopped,
        "seconds": round(time.monotonic() - began, 2),
    }


def run_job(job: Job, folder: str | None) -> tuple[list[int], list[int], list[int]]:
    """Process ids, exit statuses (negative for a signal), and the ranks that had to be stopped."""
    deadline, port = time.monotonic() + job.seconds, free_port()
    if job.logs is not None:
        job.logs.mkdir(parents=True, exist_ok=True)
    pids = [fork_rank(job, rank, port, folder) for rank in range(job.ranks)]
    return pids, *wait_for(pids, deadline)


def fork_rank(job: Job, rank: int, port: int, folder: str | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        become_rank(job, rank, port, folder)
        status = run_script(job.script)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def become_rank(job: Job, rank: int, port: int, folder: str | None) -> None:
    # Exit handlers of the parent run in the parent only.
    atexit._clear()
    if job.logs is not None:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            log = os.open(job.logs / f"rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, descriptor)
            os.close(log)
    # Write the stack if native code crashes, and all stacks if the rank hangs.
    faulthandler.enable()
    stacks = 2
    if job.logs is not None:
        stacks = os.open(job.logs / f"rank-{rank}.stacks", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    faulthandler.register(signal.SIGQUIT, file=stacks)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.ranks),
        LOCAL_WORLD_SIZE=str(job.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if folder is not None:
        os.chdir(folder)
    sys.argv = [job.script, *job.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(job.script))
    # A state of its own for each rank, as in new processes: forks inherit the parent's.
    random.seed()
    keep_groups()


def keep_groups() -> None:
    """Hold references to process groups until the process is gone.

    Without this, about one script in thirty hangs when `main` returns and its DDP module is freed, with and without
    ddpcheck: see `forking.keep`.
    """
    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        forking.keep(*dist.distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = destroy_process_group


def run_script(script: str) -> int:
    """Run a file as the interpreter does, with exit handlers."""
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def wait_for(pids: list[int], deadline: float) -> tuple[list[int], list[int]]:
    """Exit status of each rank and the ranks that had to be stopped.

    After a failure the other ranks have GRACE_SECONDS.
    """
    exits: dict[int, int] = {}
    stopped: list[int] = []
    while len(exits) < len(pids):
        exits.update(reap(pids, exits))
        if any(exits.values()):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            stopped = [rank for rank, pid in enumerate(pids) if pid not in exits]
            if not any(exits.values()):
                for rank in stopped:
                    os.kill(pids[rank], signal.SIGQUIT)
                time.sleep(STACK_SECONDS)
            end(pids, exits)
            break
        time.sleep(_POLL_SECONDS)
    return [exits[pid] for pid in pids], stopped


def reap(pids: list[int], exits: dict[int, int]) -> dict[int, int]:
    ended = {}
    for pid in pids:
        if pid not in exits:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def end(pids: list[int], exits: dict[int, int]) -> None:
    """SIGTERM, then SIGKILL; wait for killed ranks without a limit."""
    for number, seconds in ((signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, float("inf"))):
        for pid in pids:
            if pid not in exits:
                os.kill(pid, number)
        until = time.monotonic() + seconds
        while len(exits) < len(pids) and time.monotonic() < until:
            exits.update(reap(pids, exits))
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
