"""The facts of one process and its machine, as ranks exchange them and `--json` prints them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ddpcheck.machine_identity import boot_id

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
    machine = boot_id() or os.uname().nodename
    return hashlib.sha256(f"{machine} {_network_namespace()}".encode()).hexdigest()[:16]


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


Section = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """Facts by section. A section that could not be read holds an `error`; one that was not read is empty."""

    host: str
    # Hash of boot ID and network namespace: distinguishes hosts with the same name.
    place: str = ""
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    python: Section = field(default_factory=dict)
    torch: Section = field(default_factory=dict)
    names: Section = field(default_factory=dict)
    interfaces: Sequence[Section] = ()
    infiniband: Sequence[Section] = ()
    gpus: Section = field(default_factory=dict)
    limits: Section = field(default_factory=dict)
    memory: Section = field(default_factory=dict)
    processors: Section = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Section = field(default_factory=dict)
    injection: Section = field(default_factory=dict)
    # Address, port and token of the socket that other hosts connect to while the doctor runs.
    listener: Section = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Facts:
        """Decode facts; fields that this version does not know are dropped."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})
