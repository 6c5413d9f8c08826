"""How the samples of an epoch were distributed over ranks: shares, overlap, missing samples and padding."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpcheck.records.kinds.data import EpochRecord, LoaderRecord

# Limit of an unpacked bitmap: ddpcheck writes none that is larger.
MOST_BYTES = 1 << 16
# Samplers of torch, accelerate, transformers and Lightning that draw every sample once.
KNOWN_SAMPLERS = {
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
class LoaderPass:
    """One epoch of a loader on one rank."""

    loader: LoaderRecord
    epoch: EpochRecord

    @property
    def trained(self) -> bool:
        """Whether most of its batches were used for training, not for evaluation."""
        return self.epoch.fed > 0 and 2 * self.epoch.fed >= self.epoch.yielded


@dataclass(frozen=True)
class EpochSplit:
    """One epoch of one loader over all ranks. Counts are estimates for very large datasets."""

    loader: int
    epoch: int
    module: int
    step: int
    samples: int
    passes: Mapping[int, LoaderPass]
    exact: bool
    complete: bool
    # None: not known, for example because the epoch ended early.
    overlap: int | None
    missing: int | None
    padding: int | None

    @property
    def per_rank(self) -> dict[int, int]:
        return {rank: each.epoch.drawn for rank, each in sorted(self.passes.items())}

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks: the upper limit of padding, and of samples dropped with the last batch."""
        return len(self.passes) * max(each.epoch.largest for each in self.passes.values())

    def one(self, fact: str) -> Any:
        """The value of a loader attribute if it is equal on all ranks; otherwise None."""
        values = {getattr(each.loader, fact) for each in self.passes.values()}
        return values.pop() if len(values) == 1 else None

    def known_sampler(self) -> bool:
        """Whether all samplers are known to draw every sample once; others may repeat samples on purpose."""
        return all(set(str(name).split(" of ")) <= KNOWN_SAMPLERS for name in self.facts("sampler").values())

    def regular(self) -> bool:
        """Whether all batches but the last have the same size, not batches by length."""
        epochs = [each.epoch for each in self.passes.values()]
        return all(epoch.drawn > (epoch.batches - 1) * epoch.largest for epoch in epochs)

    def facts(self, fact: str) -> dict[str, Any]:
        return {str(rank): getattr(each.loader, fact) for rank, each in sorted(self.passes.items())}

    def same_data(self, group: int) -> bool:
        """Whether an index identifies the same sample on all ranks.

        Each rank may have its own dataset. All have the same if their samplers distribute one dataset over the
        group, or if the attributes of the datasets are equal.
        """
        return not self.other_data(group) and (self.one("replicas") == group or bool(self.one("mark")))

    def other_data(self, group: int) -> bool:
        """Whether samplers distribute one dataset over all ranks, but the datasets differ."""
        if group < 2 or self.one("replicas") != group:
            return False
        loaders = [each.loader for each in self.passes.values()]
        if len({loader.length for loader in loaders}) > 1:
            return True
        columns = [loader.columns for loader in loaders]
        if not columns[0] or len({len(each) for each in columns}) > 1:
            return False
        # All columns must differ: a single one may be specific to the rank, or random.
        return all(len(set(column)) > 1 for column in zip(*columns, strict=True))


def split(passes: Mapping[int, LoaderPass]) -> EpochSplit:
    """Combine the passes of all ranks over one epoch."""
    first = passes[min(passes)]
    all_have_maps = all(each.epoch.map for each in passes.values())
    counts = _overlap(each.epoch.map for each in passes.values()) if all_have_maps else None
    complete = all(each.epoch.complete for each in passes.values())
    lengths = {each.loader.length for each in passes.values()}
    overlap = missing = padding = None
    stride = first.loader.stride
    if len(lengths) == 1 and counts is not None:
        overlap, distinct = counts
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
        # Drop the maps, which are large.
        passes={rank: LoaderPass(each.loader, replace(each.epoch, map="")) for rank, each in passes.items()},
        exact=stride == 1,
        complete=complete,
        overlap=overlap,
        missing=missing,
        padding=padding,
    )


def _overlap(maps: Iterable[str]) -> tuple[int, int] | None:
    """Number of samples that several ranks drew, and that any rank drew; None where a map is damaged."""
    once = twice = 0
    for text in maps:
        bits = unpack(text)
        if bits is None:
            return None
        twice |= once & bits
        once |= bits
    return twice.bit_count(), once.bit_count()


def unpack(text: str) -> int | None:
    """The bitmap of a record as an integer; None where it is missing or damaged."""
    if not text:
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return int.from_bytes(data, "little")
