"""Runs jobs one after the other, each on ranks forked from this process, which has torch imported already.

    python forker.py PLAN RESULTS

PLAN is a JSON list of jobs: script, arguments, ranks, seconds, logs (a folder). A line of JSON about each goes to
RESULTS as it ends: the process and the exit status of every rank, and which ranks had to be stopped. A rank is as
close to `python script` under a launcher as a fork can be: its own environment variables, folder and output, an
uncaught exception through sys.excepthook, exit handlers at the end.
"""

from __future__ import annotations

import atexit
import faulthandler
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
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # slow to import: once here instead of at the first step of every rank
import torch.distributed as dist
import torch.distributed.optim
from free_port import free_port

# What a launcher leaves the other ranks after one has failed.
GRACE_SECONDS = 3.0
KILL_SECONDS = 3.0
_POLL_SECONDS = 0.02
_KEPT: list[Any] = []


def main() -> None:
    torch.set_num_threads(1)
    plan, results = Path(sys.argv[1]), Path(sys.argv[2])
    with results.open("a", encoding="utf-8") as sink:
        for job in json.loads(plan.read_text(encoding="utf-8")):
            sink.write(json.dumps({"name": job["name"], **run_job(job)}) + "\n")
            sink.flush()


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    logs = Path(job["logs"])
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = [fork_rank(job, rank, port, folder) for rank in range(job["ranks"])]
        exits, stopped = wait_for(ranks, began + job["seconds"])
    seconds = round(time.monotonic() - began, 2)
    return {"pids": ranks, "exits": exits, "stopped": stopped, "seconds": seconds}


def fork_rank(job: dict[str, Any], rank: int, port: int, folder: str) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        become_rank(job, rank, port, folder)
        status = run_script(job["script"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def become_rank(job: dict[str, Any], rank: int, port: int, folder: str) -> None:
    # Handlers of the parent are the parent's to run.
    atexit._clear()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        log = os.open(f"{job['logs']}/rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, descriptor)
        os.close(log)
    # A rank that crashes in somebody's native code tells where.
    faulthandler.enable()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["ranks"]),
        LOCAL_WORLD_SIZE=str(job["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(folder)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = os.path.dirname(job["script"])
    # Of its own for every rank, as in processes that were started: forks share the parent's.
    random.seed()
    keep_groups()


def keep_groups() -> None:
    """Hold on to process groups until the process is gone.

    A group whose last reference is dropped while gloo's threads still want the interpreter now and then never
    returns: one script in thirty stands still as `main` ends and its DDP module goes. That is torch's own, with and
    without ddpcheck, and not what a script is here for.
    """
    destroy = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        _KEPT.extend(dist.distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = destroy_process_group


def run_script(script: str) -> int:
    """As the interpreter runs a file, with what it does at the end."""
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


def wait_for(ranks: list[int], deadline: float) -> tuple[list[int], list[int]]:
    """How each rank ended, negative by a signal, and which had to be stopped.

    After a failure the others have a moment, as under torchrun.
    """
    exits: dict[int, int] = {}
    stopped: list[int] = []
    while len(exits) < len(ranks):
        exits.update(reap(ranks, exits))
        if any(exits.values()):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            stopped = [rank for rank, pid in enumerate(ranks) if pid not in exits]
            end(ranks, exits)
            break
        time.sleep(_POLL_SECONDS)
    return [exits[pid] for pid in ranks], stopped


def reap(ranks: list[int], exits: dict[int, int]) -> dict[int, int]:
    ended = {}
    for pid in ranks:
        if pid not in exits:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def end(ranks: list[int], exits: dict[int, int]) -> None:
    """Ask, then kill; what was killed is waited for however long it takes."""
    for number, seconds in ((signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, float("inf"))):
        for pid in ranks:
            if pid not in exits:
                os.kill(pid, number)
        until = time.monotonic() + seconds
        while len(exits) < len(ranks) and time.monotonic() < until:
            exits.update(reap(ranks, exits))
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
