"""Who this rank is: its number, its host, its process, and the start of the job it belongs to."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
import time
import uuid
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.privacy import allowed_environment, mask_arguments
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.session_name import session_name

_MOST_STARTS = 10_000


def header(session: str, algorithm: str) -> RankHeader:
    """The first record of this rank's file."""
    distributed: Any = torch.distributed
    return RankHeader(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        host=socket.gethostname(),
        pid=os.getpid(),
        ticks=process_ticks(),
        session=session,
        time=time.time(),
        local_rank=_number("LOCAL_RANK"),
        restart=_number("TORCHELASTIC_RESTART_COUNT") or 0,
        python=platform.python_version(),
        torch=str(torch.__version__),
        backend=str(distributed.get_backend()),
        device=_device(),
        algorithm=algorithm,
        argv=mask_arguments(sys.argv),
        environment=allowed_environment(os.environ),
    )


def session_id(number: int) -> str:
    """One name for this start of the job, agreed on through the job's own store; waits for nobody.

    torchrun keeps its store over restarts, and its count of restarts need not be the same on all nodes: so a
    rank that finds its place in a start taken, by a process of an earlier attempt, goes on to the next one.
    """
    distributed: Any = torch.distributed

    try:
        store: Any = torch_compat.lookup(torch_compat.DEFAULT_STORE)()
        job = _agree(store, "ddpcheck/job")
        for start in range(_MOST_STARTS):
            name = _agree(store, f"ddpcheck/session/{number}/{distributed.get_world_size()}/{start}")
            mine = uuid.uuid4().hex
            if _agree(store, f"ddpcheck/place/{name}/{distributed.get_rank()}", mine) == mine:
                return session_name(name, job)
        raise RuntimeError("the store holds too many starts")
    except Exception:
        # No store that can do it (MPI): what all ranks of one start have in common must do.
        parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        parts += [os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), str(number)]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def job_store() -> Any:
    """The store through which the job's ranks met, where it is one that nodes can go on speaking through.

    There is none with MPI, and a FileStore's file would grow with every word.
    """
    distributed: Any = torch.distributed
    try:
        store: Any = torch_compat.lookup(torch_compat.DEFAULT_STORE)()
        served = torch_compat.read(torch_compat.UNDERLYING_STORE, store, store)
        return store if isinstance(served, distributed.TCPStore) else None
    except Exception:
        return None


def _agree(store: Any, key: str, proposal: str = "") -> str:
    """The first value that anyone proposed for this key."""
    return str(store.compare_set(key, "", proposal or uuid.uuid4().hex).decode())


def process_ticks() -> int:
    """When this process started, in clock ticks since boot."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _number(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def _device() -> str:
    """Without waking a device up: a rank that never uses CUDA must not get a context from us."""
    cuda: Any = torch.cuda
    if torch.cuda.is_available() and cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return "cuda" if torch.cuda.is_available() else "cpu"
