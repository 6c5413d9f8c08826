"""Identity of this rank: its number, host and process, and the launch of the job that it belongs to."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
import time
import uuid
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.device_api import available_api
from ddpcheck.machine_identity import pid_namespace
from ddpcheck.privacy import allowed_environment, mask_arguments
from ddpcheck.records.backend_names import UNDEFINED
from ddpcheck.records.kinds.rank import RankHeader, session_name

_MOST_LAUNCHES = 10_000


def header(session: str, algorithm: str, host: str) -> RankHeader:
    """The first record of this rank's file."""
    distributed: Any = torch.distributed
    return RankHeader(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        host=host,
        pid=os.getpid(),
        ticks=process_ticks(),
        session=session,
        time=time.time(),
        local_rank=_number("LOCAL_RANK"),
        restart=_number("TORCHELASTIC_RESTART_COUNT") or 0,
        # With the "t" of a free-threaded build.
        python=platform.python_version() + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""),
        torch=str(torch.__version__),
        backend=_backend(),
        device=_device(),
        algorithm=algorithm,
        argv=mask_arguments(sys.argv),
        environment=allowed_environment(os.environ),
        pid_namespace=pid_namespace(),
    )


def session_id(number: int) -> str:
    """The name of this launch of the job. Ranks agree on it through the job's store, without waiting for each other.

    torchrun keeps its store over restarts, and its restart count may differ between nodes. A rank whose key in a
    launch is taken by a process of an earlier attempt therefore tries the next launch.
    """
    distributed: Any = torch.distributed

    try:
        store: Any = torch_compat.lookup(torch_compat.DEFAULT_STORE)()
        job = _agree(store, "ddpcheck/job")
        for launch in range(_MOST_LAUNCHES):
            name = _agree(store, f"ddpcheck/session/{number}/{distributed.get_world_size()}/{launch}")
            own_id = uuid.uuid4().hex
            if _agree(store, f"ddpcheck/place/{name}/{distributed.get_rank()}", own_id) == own_id:
                return session_name(name, job)
        raise RuntimeError("the store has too many launches")
    except Exception:
        # No usable store (MPI): derive the name from variables that all ranks of one launch share.
        values = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        values += [os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), str(number)]
        return hashlib.blake2b("\0".join(values).encode(), digest_size=16).hexdigest()


def job_store() -> Any:
    """The store of the job's rendezvous if it is a TCPStore, else None.

    MPI has no store, and the file of a FileStore grows with every write.
    """
    distributed: Any = torch.distributed
    try:
        store: Any = torch_compat.lookup(torch_compat.DEFAULT_STORE)()
        served = torch_compat.read(torch_compat.UNDERLYING_STORE, store, store)
        return store if isinstance(served, distributed.TCPStore) else None
    except Exception:
        return None


def _agree(store: Any, key: str, proposal: str = "") -> str:
    """The first value that any rank proposed for this key."""
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
    """The device of this rank. Never initialises it: a rank that does not use it must not get a context."""
    api = available_api()
    if api is None:
        return "cpu"
    # The current device; which one a module uses is recorded when it is wrapped.
    return f"{api.type}:{api.index(torch.device(api.type))}" if api.initialized() else api.type


def _backend() -> str:
    """The backend, or one per device type ("cpu:gloo,cuda:nccl") if the program did not name one."""
    distributed: Any = torch.distributed
    name = str(distributed.get_backend())
    if name != UNDEFINED:
        return name
    by_device = getattr(distributed, "get_backend_config", None)
    config = str(by_device()) if by_device is not None else name
    # With one device type, its backend alone, as if the program had named it.
    return config if "," in config else config.partition(":")[2] or config
