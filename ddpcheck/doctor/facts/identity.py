"""Identity of this process: rank numbers from any launcher, and a hash of its machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

_BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
# Variables of torchrun, Slurm, Open MPI and PMI, in the order in which they are tried.
_VARIABLES = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def rank_numbers(environ: Mapping[str, str]) -> dict[str, int | None]:
    return {
        name: next((int(environ[one]) for one in names if environ.get(one, "").isdecimal()), None)
        for name, names in _VARIABLES.items()
    }


def machine_id() -> str:
    """Equal for processes that share a machine and a network namespace, and different for all others."""
    return hashlib.sha256(f"{_boot_id()} {_network_namespace()}".encode()).hexdigest()[:16]


def _boot_id() -> str:
    try:
        with open(_BOOT_ID_FILE) as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
