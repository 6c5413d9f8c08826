"""Selects the hash algorithm for a device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from ddpcheck.probes.digest.multilinear import MultilinearDigester
from ddpcheck.probes.digest.protocol import DigestFuture
from ddpcheck.probes.digest.xxh3 import Xxh3Digester

# "multilinear" makes CPU ranks use the algorithm of GPUs, so that both can be compared in one job.
ENV_HASH = "DDPCHECK_HASH"


class Digester(Protocol):
    """Digests of lists of tensors. Only leaves of the same `algorithm` can be compared."""

    @property
    def algorithm(self) -> str: ...

    def submit(self, tensors: Sequence[torch.Tensor]) -> DigestFuture:
        """Hash `tensors` as they are now, in the order of the current stream."""


def make_digester(device_type: str) -> Digester:
    """The fastest digester for tensors of `device_type` ("cpu", "cuda", …) with the installed packages."""
    if device_type == "cpu" and os.environ.get(ENV_HASH) != "multilinear":
        try:
            return Xxh3Digester(importlib.import_module("xxhash"))
        except (ImportError, AttributeError):
            pass  # not installed, or older than xxh3: multilinear-128 works everywhere
    return MultilinearDigester()
