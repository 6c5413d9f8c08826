"""Records about gradients: sketches of reduced backwards, and the gradients that optimizers apply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.registry import BlockTable, Record, TextEncoding, record


@record(
    "backward",
    BlockTable(
        ("module", "revision"),
        {"local": TextEncoding.SKETCHES, "reduced": TextEncoding.SKETCHES, "root": TextEncoding.HEX},
    ),
)
@dataclass(frozen=True)
class BackwardRecord(Record):
    """Sketches of the gradients of one backward that DDP reduced."""

    module: int = field(default=0, kw_only=True)
    # Number of the reduced backward of this module, from 1: identical on all ranks.
    number: int
    step: int
    # Packed sketches of the local gradients of all parameters. Records from a block have `bytes` here and in `reduced`,
    # which `unwrap` of `ddpcheck.records.codecs` accepts too.
    local: str
    # Packed sketches of this rank's share of the reduced gradients: see `ddpcheck.records.codecs`.
    reduced: str
    # Truncated digest of all reduced gradients.
    root: str
    # Number of non-finite values by parameter index.
    local_nonfinite: dict[str, int] = field(default_factory=dict)
    reduced_nonfinite: dict[str, int] = field(default_factory=dict)
    # Indices of parameters without a reduced gradient: unused on all ranks, applied already, or unknown to the reducer.
    absent: list[int] = field(default_factory=list)
    # -1: the sum is divided by the number of ranks that took part, not by the size of the group.
    divisor: int = 0
    # When DDP finished it, by the clock of this host; 0: not known.
    time: float = 0.0
    # The revision of the module record whose parameters the indices refer to.
    revision: int = 0


@record("applied", BlockTable(("module", "optimizer"), {"root": TextEncoding.HEX}))
@dataclass(frozen=True)
class AppliedRecord(Record):
    """The gradients that an optimizer is about to apply, and the backwards that produced them."""

    # Compared across ranks like a digest; its leaves are written only where ranks disagree.
    stage: ClassVar[str] = Stage.APPLIED.value
    of: ClassVar[str] = TensorKind.GRADIENTS.value
    leaves: ClassVar[str] = ""
    width: ClassVar[int] = 8
    forward: ClassVar[int | None] = None
    module: int = field(default=0, kw_only=True)
    optimizer: int = field(default=0, kw_only=True)
    step: int
    root: str
    last: str = "synced"
    # Whether the gradients were written after DDP had reduced them.
    moved: bool = False
    synced: int = 1
    unsynced: int = 0
    reason: str = ""
    waiting: list[int] = field(default_factory=list)
    nonfinite: dict[str, int] = field(default_factory=dict)


@record("manual_reduction")
@dataclass(frozen=True)
class ManualReductionRecord(Record):
    """Sketches of gradients outside of DDP, before and after the job may have reduced them; of the first steps."""

    module: int
    optimizer: int
    step: int
    # Packed sketches of all parameters, when the last backward had ended and as the optimizer applies them.
    local: str
    applied: str
    # Indices of parameters without an applied gradient.
    absent: list[int] = field(default_factory=list)
    # Whether the loss is a mean over the rank's own batch that the job does not scale.
    own_mean: bool = False
    # Backwards since the last step; 0: not known.
    backwards: int = 0
