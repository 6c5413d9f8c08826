"""Records about training data: batches, data loaders and epochs. They never contain the data itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.records.registry import BlockTable, Record, TextEncoding, record


@record("batch", BlockTable(("module",), {"digest": TextEncoding.HEX}))
@dataclass(frozen=True)
class BatchRecord(Record):
    """A fingerprint of the batch of one training forward: enough to compare ranks."""

    forward: int
    module: int = 0
    # The optimizer step of the forward; None: the step has the same number as the forward.
    step: int | None = None
    digest: str = ""
    # Number of distinct values behind the digest; 64: many, or not known.
    variety: int = 64
    rows: int = 0
    # Labels that count in the loss, and tokens that are not padding, where the batch contains them.
    tokens: int = 0
    attended: int = 0
    # Digest of the random generators that were used between this forward and the backward.
    drew: str = ""
    # The same between the last step and this forward. If any were used, `parts` has a short digest of each tensor of
    # the batch; it is empty for a tensor with too few values to identify it.
    drew_before: str = ""
    parts: list[str] = field(default_factory=list)


@record("loader")
@dataclass(frozen=True)
class LoaderRecord(Record):
    """A data loader whose batches were trained on, and the attributes of its sampler."""

    loader: int
    # Samples in the dataset; -1: not known.
    length: int
    sampler: str
    # The maps of the epochs contain only samples whose index is a multiple of this.
    stride: int = 1
    iterable: bool = False
    shuffle: bool | None = None
    replacement: bool = False
    replicas: int | None = None
    share: int | None = None
    seed: int | None = None
    # Digest of the dataset's attributes: equal for equal datasets. Empty: they do not identify the dataset.
    mark: str = ""
    # Digest of each attribute with one entry per sample, such as a list of files or of indices.
    columns: list[str] = field(default_factory=list)
    # The same without regard to the order of the entries; empty for a list that is too long.
    members: list[str] = field(default_factory=list)


@record("epoch")
@dataclass(frozen=True)
class EpochRecord(Record):
    """One pass over a loader: which samples this rank drew, and in what order."""

    loader: int
    epoch: int
    drawn: int
    module: int = 0
    step: int = 0
    batches: int = 0
    largest: int = 0
    # Batches that the loader returned, and those of them that a training forward used.
    yielded: int = 0
    fed: int = 0
    # Whether the sampler was observed from its first draw to its end.
    complete: bool = False
    # Base64 of a compressed bitmap, one bit for each sample whose index is a multiple of the loader's stride.
    map: str = ""
    repeated: int = 0
    order: str = ""
    # Digest of the first indices only, for passes that end early.
    head: str = ""
    # The sampler's own epoch, as `set_epoch` sets it.
    at: int | None = None


@record("samples")
@dataclass(frozen=True)
class SamplesRecord(Record):
    """Fingerprints of a few samples in one pass over a loader: of the same indices on every rank."""

    loader: int
    epoch: int
    module: int = 0
    step: int = 0
    # For each part of a sample: "i" one integer or text, "I" several integers, "f" numbers with a fraction.
    kinds: str = ""
    indices: list[int] = field(default_factory=list)
    # For each index, 8 hexadecimal digits of each part.
    digests: list[str] = field(default_factory=list)


@record("labels")
@dataclass(frozen=True)
class LabelsRecord(Record):
    """Which class numbers the labels of a data loader have in the loss, since they have always had the same ones.

    Written when that is known, and when it is known no more, with empty `targets`.
    """

    loader: int
    # Position of the labels among the columns of integers and texts of a batch, and of the term in the loss.
    part: int
    term: int
    # How many batches the loader was ahead of the loss.
    ahead: int
    module: int
    step: int
    # By label; a text is "#" and a digest.
    targets: dict[str, int] = field(default_factory=dict)
