"""Which hash serves which device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from ddpcheck.probes.digest.multilinear import MultilinearDigester
from ddpcheck.probes.digest.protocol import DigestFuture
from ddpcheck.probes.digest.xxh3 import Reading, Xxh3Digester

# "multilinear" makes CPU ranks use the GPUs' algorithm, so that the two can be compared in one job.
ENV_HASH = "DDPCHECK_HASH"


class Digester(Protocol):
    """Digests of lists of tensors. Leaves compare only with leaves of the same `algorithm`."""

    @property
    def algorithm(self) -> str: ...

    def submit(self, tensors: Sequence[torch.Tensor]) -> DigestFuture:
        """Hash `tensors` as they are at this moment, in the order of the current stream."""

    def read_along(self, tensor: torch.Tensor) -> Reading | None:
        """For hashing a tensor while it is read for something else; None where that cannot be done."""


def make_digester(device_type: str) -> Digester:
    """The fastest digester for tensors of `device_type` ("cpu", "cuda", …) with what is installed."""
    if device_type == "cpu" and os.environ.get(ENV_HASH) != "multilinear":
        try:
            return Xxh3Digester(importlib.import_module("xxhash"))
        except (ImportError, AttributeError):
            pass  # not in the user's environment, or older than xxh3: nothing to worry anybody with
    return MultilinearDigester()
