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
# ROCm presents itself under this name too, and RCCL as NCCL.
_NCCL_DEVICE_TYPE = "cuda"


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
        facts["triton"] = _triton()
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
        "nccl": _nccl_version(torch) if nccl else "",
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
    kind = _NCCL_DEVICE_TYPE if device is None else str(device.type)
    module: Any = getattr(torch, kind, None)
    return (kind, module.device_count()) if module is not None and module.is_available() else ("", 0)


def _nccl_version(torch: Any) -> str:
    """Of the library that this build of torch links to, also on a machine without a GPU."""
    module: Any = getattr(torch, _NCCL_DEVICE_TYPE, None)
    try:
        return ".".join(map(str, module.nccl.version()))
    except (AttributeError, RuntimeError):
        return ""


def _triton() -> dict[str, Any]:
    """What Triton needs to compile a kernel in this Python. Nothing is compiled, and Triton is not imported."""
    import importlib.metadata
    import importlib.util
    import shutil
    import sysconfig

    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), "")
    facts: dict[str, Any] = {
        "compiler": compiler if shutil.which(compiler) else "",
        "headers": os.path.exists(os.path.join(sysconfig.get_path("include") or "", "Python.h")),
        **_cache_folder(),
    }
    try:
        installed = importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        installed = False
    names = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
    for name in names if installed else ():
        try:
            return {**facts, "version": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**facts, "version": "unknown" if installed else ""}


def _cache_folder() -> dict[str, Any]:
    """Where Triton keeps compiled kernels, and whether this process can write there."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    existing = folder
    while existing and not os.path.isdir(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    return {"cache": folder, "cache_writable": os.access(existing or os.sep, os.W_OK | os.X_OK)}


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
