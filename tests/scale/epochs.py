"""How the samples of each epoch are dealt out to the ranks of a made run: each to one of them."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from ddpcheck.probes.sample_draws import stride_for
from tests.scale.lines import Raw, digits, line_of
from tests.scale.plan import Plan
from tests.scale.seed import Seed


class Epochs:
    """Of a loader like the seed's; without one, nothing."""

    def __init__(self, seed: Seed, plan: Plan) -> None:
        self._plan = plan
        self._epoch = seed.ranks[0].epoch
        self._drawn = plan.epoch * (self._epoch["largest"] if self._epoch else 0)
        self._samples = self._drawn * plan.ranks
        self._stride = stride_for(self._samples, plan.ranks)

    def loader(self, rank: int) -> Raw:
        """What is other than in the seed's record of the loader."""
        told = {"length": self._samples, "stride": self._stride, "replicas": self._plan.ranks, "share": rank}
        return {name: value for name, value in told.items() if name != "stride" or value != 1}

    def line(self, rank: int, step: int) -> str:
        """Written when the last step of an epoch is over."""
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
        """Samples go to the ranks in turn, in each epoch beginning with another one."""
        marked = np.arange(0, self._samples, self._stride)
        bits = np.packbits((marked + epoch) % self._plan.ranks == rank, bitorder="little")
        return base64.b64encode(zlib.compress(bits.tobytes())).decode()
