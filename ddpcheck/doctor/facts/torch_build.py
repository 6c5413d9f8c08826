"""What torch is here, and which address gloo takes when it is asked for one.

Standard library and torch only, and runs as a script too: importing torch takes seconds, may fail, and may
even end the process. That must not be the process of the command line.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LISTENS = "0A"


def torch_facts() -> dict[str, Any]:
    """Imports torch."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            import torch
        except BaseException as error:
            return {"error": f"{type(error).__name__}: {error}"}
        facts = _build(torch)
        facts["gloo_takes"] = _gloo_takes(torch)
    facts["warnings"] = sorted({str(one.message).partition("\n")[0] for one in said})
    return facts


def _build(torch: Any) -> dict[str, Any]:
    distributed = torch.distributed
    there = distributed.is_available()
    nccl = there and distributed.is_nccl_available()
    return {
        "version": str(torch.__version__),
        "file": str(torch.__file__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi", "ucc")
            if there and getattr(distributed, f"is_{name}_available", bool)()
        ],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "threads": torch.get_num_threads(),
    }


def _gloo_takes(torch: Any) -> dict[str, Any]:
    """A group of one rank binds to the address that one of many would bind to."""
    distributed = torch.distributed
    if not hasattr(distributed, "ProcessGroupGloo"):
        return {}
    from datetime import timedelta

    before = set(_listening())
    try:
        # Kept until the sockets have been looked at.
        group = distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=10))
    except Exception as error:
        return {"error": str(error).partition("\n")[0]}
    taken = [address for address in _listening() if address not in before]
    del group
    return {"addresses": sorted({address for address, _ in taken})}


def _listening() -> list[tuple[str, int]]:
    """Address and port of every socket of this process that others can connect to."""
    own = _own_sockets()
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for row in _rows(f"/proc/self/net/{name}"):
            if len(row) > 9 and row[3] == _LISTENS and row[9] in own:
                address, _, port = row[1].partition(":")
                found.append((_address(family, address), int(port, 16)))
    return found


def _address(family: int, text: str) -> str:
    """The kernel prints words of four bytes, in the machine's own order."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(family, raw)


def _own_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _rows(path: str) -> list[list[str]]:
    try:
        with open(path) as file:
            return [line.split() for line in file][1:]
    except OSError:
        return []


if __name__ == "__main__":
    import json

    # What importing torch prints belongs to nobody's JSON.
    answer = os.dup(1)
    os.dup2(2, 1)
    facts = json.dumps(torch_facts())
    os.write(answer, facts.encode())
    # Threads of gloo may still hold on to the interpreter; nothing is left to do for it.
    os._exit(0)
