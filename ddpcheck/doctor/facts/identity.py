"""Who this process is: its rank, whatever launcher gave it, and its machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

_BOOT = "/proc/sys/kernel/random/boot_id"
# What launchers other than torchrun call the rank, the number of ranks, and the same on this node.
_NAMES = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def rank_numbers(environ: Mapping[str, str]) -> dict[str, int | None]:
    return {
        name: next((int(environ[one]) for one in names if environ.get(one, "").isdecimal()), None)
        for name, names in _NAMES.items()
    }


def place() -> str:
    """The same for all processes that share a machine and its network, and for no others."""
    return hashlib.sha256(f"{_boot()} {_network()}".encode()).hexdigest()[:16]


def _boot() -> str:
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _network() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
