"""Splits the samples of each epoch over the ranks of a generated run."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from ddpcheck.probes.samples.draws import stride_for
from tests.scale.lines import Raw, digits, line_of
from tests.scale.plan import Plan
from tests.scale.seed import Seed


class Epochs:
    """Epoch records for a loader like the seed's; none if the seed has no loader."""

    def __init__(self, seed: Seed, plan: Plan) -> None:
        self._plan = plan
        self._epoch = seed.ranks[0].epoch
        self._drawn = plan.epoch * (self._epoch["largest"] if self._epoch else 0)
        self._samples = self._drawn * plan.ranks
        self._stride = stride_for(self._samples, plan.ranks)

    def loader(self, rank: int) -> Raw:
        """Fields that differ from the seed's record of the loader."""
        fields = {
            "length": self._samples,
            "stride": self._stride,
            "replicas": self._plan.ranks,
            "share": rank,
        }
        return {name: value for name, value in fields.items() if name != "stride" or value != 1}

    def line(self, rank: int, step: int) -> str:
        """The record that a rank writes after the last step of an epoch."""
        if self._epoch is None or (step + 1) % self._plan.epoch:
            return ""
        epoch = step // self._plan.epoch
        return line_of(
            {
                **self._epoch,
                "epoch": epoch,
                "step": step + 1 - self._plan.epoch,
                "drawn": self._drawn,
                "batches": self._plan.epoch,
                "yielded": self._plan.epoch,
                "fed": self._plan.epoch,
                "at": epoch,
                "map": self._map(rank, epoch),
                "order": digits(16, "order", rank, epoch),
                "head": digits(12, "head", rank, epoch),
            }
        )

    def _map(self, rank: int, epoch: int) -> str:
        """Ranks take samples in turn; each epoch starts with another rank."""
        marked = np.arange(0, self._samples, self._stride)
        bits = np.packbits((marked + epoch) % self._plan.ranks == rank, bitorder="little")
        return base64.b64encode(zlib.compress(bits.tobytes())).decode()
