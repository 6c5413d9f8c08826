"""The torch build, and the address that gloo binds to.

Standard library and torch only: this file is also run as a script, because importing torch takes seconds and may
fail or end the process, which must not be the process of the command line.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STATE_LISTEN = "0A"


def torch_facts() -> dict[str, Any]:
    """Imports torch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch
        except BaseException as error:
            return {"error": f"{type(error).__name__}: {error}"}
        facts = _build(torch)
        facts["gloo_takes"] = _gloo_takes(torch)
    facts["warnings"] = sorted({str(one.message).partition("\n")[0] for one in caught})
    return facts


def _build(torch: Any) -> dict[str, Any]:
    distributed = torch.distributed
    available = distributed.is_available()
    accelerator, count = _accelerator(torch)
    nccl = available and distributed.is_nccl_available()
    return {
        "version": str(torch.__version__),
        "file": str(torch.__file__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "backends": [
            name
            for name in ("gloo", "nccl", "xccl", "mpi", "ucc")
            if available and getattr(distributed, f"is_{name}_available", bool)()
        ],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
        "accelerator": accelerator,
        "gpus": count,
        "threads": torch.get_num_threads(),
    }


def _accelerator(torch: Any) -> tuple[str, int]:
    """The type of this machine's accelerator and how many there are.

    Not by `ddpcheck.device_api`: the Python that runs this script may not have ddpcheck.
    """
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    device = current() if current is not None else None
    kind = "cuda" if device is None else str(device.type)
    module: Any = getattr(torch, kind, None)
    return (kind, module.device_count()) if module is not None and module.is_available() else ("", 0)


def _gloo_takes(torch: Any) -> dict[str, Any]:
    """Addresses that a process group of one rank listens on; larger groups bind to the same."""
    distributed = torch.distributed
    if not hasattr(distributed, "ProcessGroupGloo"):
        return {}
    from datetime import timedelta

    before = set(_listening())
    try:
        # Keep a reference until the sockets are read.
        group = distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=10))
    except Exception as error:
        return {"error": str(error).partition("\n")[0]}
    bound = [address for address in _listening() if address not in before]
    del group
    return {"addresses": sorted({address for address, _ in bound})}


def _listening() -> list[tuple[str, int]]:
    """Address and port of every listening TCP socket of this process."""
    own = _own_sockets()
    listening = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for row in _rows(f"/proc/self/net/{name}"):
            if len(row) > 9 and row[3] == _STATE_LISTEN and row[9] in own:
                address, _, port = row[1].partition(":")
                listening.append((_address(family, address), int(port, 16)))
    return listening


def _address(family: int, text: str) -> str:
    """Decode an address of /proc/net/tcp: words of four bytes in host byte order."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(family, raw)


def _own_sockets() -> set[str]:
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _rows(path: str) -> list[list[str]]:
    try:
        with open(path) as file:
            return [line.split() for line in file][1:]
    except OSError:
        return []


if __name__ == "__main__":
    import json

    # Importing torch may print: keep that out of the JSON on standard output.
    answer = os.dup(1)
    os.dup2(2, 1)
    facts = json.dumps(torch_facts())
    os.write(answer, facts.encode())
    # Threads of gloo may block a normal interpreter exit.
    os._exit(0)
