"""How an epoch's samples were dealt out to the ranks: shares, overlap, what is missing, padding."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpcheck.records.kinds.data import EpochRecord, LoaderRecord

# A map has one bit for each marked sample; nothing that unpacks to more was written by us.
MOST_BYTES = 1 << 16
# Samplers of torch, accelerate, transformers and Lightning that give every sample once.
KNOWN = {
    "BatchSampler",
    "BatchSamplerShard",
    "DistributedLengthGroupedSampler",
    "DistributedSampler",
    "DistributedSamplerWrapper",
    "LengthGroupedSampler",
    "RandomSampler",
    "SeedableRandomSampler",
    "SequentialSampler",
    "SkipBatchSampler",
}


@dataclass(frozen=True)
class Pass:
    """What one rank said of one epoch."""

    loader: LoaderRecord
    epoch: EpochRecord

    @property
    def trained(self) -> bool:
        """Whether most of its batches were trained on: evaluation has a loader too."""
        return self.epoch.fed > 0 and 2 * self.epoch.fed >= self.epoch.yielded


@dataclass(frozen=True)
class EpochSplit:
    """One epoch of one loader over all ranks; counts are estimates where the dataset is very large."""

    loader: int
    epoch: int
    module: int
    step: int
    samples: int
    passes: Mapping[int, Pass]
    exact: bool
    complete: bool
    # None: not known, or not to be told of an epoch that was left early.
    overlap: int | None
    missing: int | None
    padding: int | None

    @property
    def per_rank(self) -> dict[int, int]:
        return {rank: each.epoch.drawn for rank, each in sorted(self.passes.items())}

    @property
    def global_batch(self) -> int:
        """The most that padding or leaving out the last batch can come to."""
        return len(self.passes) * max(each.epoch.largest for each in self.passes.values())

    def one(self, fact: str) -> Any:
        """What all ranks' samplers say of themselves, if they say the same; else None."""
        said = {getattr(each.loader, fact) for each in self.passes.values()}
        return said.pop() if len(said) == 1 else None

    def known_sampler(self) -> bool:
        """Whether it is known of these samplers what they should do; others may repeat samples on purpose."""
        return all(set(str(name).split(" of ")) <= KNOWN for name in self.facts("sampler").values())

    def regular(self) -> bool:
        """Whether all batches but the last are of one size; else they are made by length or the like."""
        epochs = [each.epoch for each in self.passes.values()]
        return all(epoch.drawn > (epoch.batches - 1) * epoch.largest for epoch in epochs)

    def facts(self, fact: str) -> dict[str, Any]:
        return {str(rank): getattr(each.loader, fact) for rank, each in sorted(self.passes.items())}

    def same_data(self, group: int) -> bool:
        """Whether the same number means the same sample on all ranks.

        Ranks may each have a dataset of their own. They do not where their samplers deal one out to all of
        them, nor where the datasets' attributes are equal.
        """
        return not self.other_data(group) and (self.one("replicas") == group or bool(self.one("mark")))

    def other_data(self, group: int) -> bool:
        """Whether samplers deal one dataset out to all ranks, and what they deal out is not the same everywhere."""
        if group < 2 or self.one("replicas") != group:
            return False
        loaders = [each.loader for each in self.passes.values()]
        if len({loader.length for loader in loaders}) > 1:
            return True
        columns = [loader.columns for loader in loaders]
        if not columns[0] or len({len(each) for each in columns}) > 1:
            return False
        # All of them: one alone may hold a rank's own notes, or be drawn anew.
        return all(len(set(said)) > 1 for said in zip(*columns, strict=True))


def split(passes: Mapping[int, Pass]) -> EpochSplit:
    """Put together what the ranks said of one epoch."""
    first = passes[min(passes)]
    told = all(each.epoch.map for each in passes.values())
    drew = _overlap(each.epoch.map for each in passes.values()) if told else None
    complete = all(each.epoch.complete for each in passes.values())
    lengths = {each.loader.length for each in passes.values()}
    overlap = missing = padding = None
    stride = first.loader.stride
    if len(lengths) == 1 and drew is not None:
        overlap, distinct = drew
        marked = -(-first.loader.length // stride)
        missing = (marked - distinct) * stride if complete else None
        padding = max(0, sum(each.epoch.drawn for each in passes.values()) - first.loader.length)
        overlap *= stride
    return EpochSplit(
        loader=first.loader.loader,
        epoch=first.epoch.epoch,
        module=first.epoch.module,
        step=first.epoch.step,
        samples=max(lengths),
        # The maps have been read, and are all that is large.
        passes={rank: Pass(each.loader, replace(each.epoch, map="")) for rank, each in passes.items()},
        exact=stride == 1,
        complete=complete,
        overlap=overlap,
        missing=missing,
        padding=padding,
    )


def _overlap(maps: Iterable[str]) -> tuple[int, int] | None:
    """How many samples several ranks drew, and how many any did; None where a map is damaged."""
    once = twice = 0
    for text in maps:
        bits = unpack(text)
        if bits is None:
            return None
        twice |= once & bits
        once |= bits
    return twice.bit_count(), once.bit_count()


def unpack(text: str) -> int | None:
    """The bitmap of a record as one number; None where there is none."""
    if not text:
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return int.from_bytes(data, "little")
