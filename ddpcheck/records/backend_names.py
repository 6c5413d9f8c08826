"""Names of communication backends, as torch gives them: never compared for equality.

torch 2.15 calls NCCL `nccl2` or `nccl-legacy`, others are called `ncclx` or `rccl`, and a job that names no
backend has one per device type ("cpu:gloo,cuda:nccl"). Standard library only: this is imported inside ranks.
"""

from __future__ import annotations

UNDEFINED = "undefined"


def backend_on(config: str, device_type: str) -> str:
    """The backend of one device type; `config` itself if it names one for all; "" if it has none for this type."""
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    if not by_device:
        return "" if config == UNDEFINED else config
    return by_device.get(device_type, "")


def is_gloo(name: str) -> bool:
    """Works through sockets on the host."""
    return "gloo" in name.lower()


def is_nccl(name: str) -> bool:
    """Kernels on a device that wait for each other: NCCL, RCCL, XCCL, HCCL and their variants."""
    return name.lower().partition("-")[0].rstrip("0123456789x").endswith("ccl")
