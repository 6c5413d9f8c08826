"""Records with digests of tensors, and what is written in addition where ranks disagree."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ddpcheck.records.registry import BlockTable, Record, TextEncoding, record

# Buffers that torch's normalisation layers update in each forward.
NORM_STATISTICS = ("running_mean", "running_var")


class Stage(str, Enum):
    """The points of a job at which tensors are digested. The first at which ranks disagree is the root cause."""

    INIT_BEFORE = "init.before"
    INIT_AFTER = "init.after"
    BUFFERS = "buffers"
    # At the end of the job, only if buffers were written since the last step.
    BUFFERS_END = "buffers.end"
    # Before an optimizer step, only if the parameters were written since the previous step.
    REWRITTEN = "rewritten"
    PARAMS = "params"
    # Parameters where they are used after a step: at the next forward if ranks differed after the step, and at the end
    # if they were written since.
    USED = "used"
    # The gradient as this rank computed it, as DDP reduced it, and as the optimizer applies it.
    LOCAL = "local"
    REDUCED = "reduced"
    APPLIED = "applied"
    # Optimizer state before the first step; with --optimizer-state before every step.
    STATE = "optimizer.state"


class TensorKind(str, Enum):
    """Which tensors of a module a digest covers."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    STATE = "state"
    GRADIENTS = "gradients"
    # Parameters that DDP does not synchronise on the user's request.
    IGNORED = "ignored"


@record(
    "digest",
    BlockTable(
        ("module", "stage", "of", "optimizer", "width"),
        {"root": TextEncoding.HEX, "leaves": TextEncoding.BASE64},
    ),
)
@dataclass(frozen=True)
class DigestRecord(Record):
    """Digests of a module's tensors at one stage: the full root, and each leaf truncated to `width` bytes."""

    module: int
    stage: str
    step: int
    root: str
    leaves: str
    width: int
    of: str = TensorKind.PARAMETERS.value
    time: float = 0.0
    optimizer: int | None = None
    # Training forwards of this module so far: distinguishes a skipped step from a divergence.
    forward: int | None = None
    # Short digest of the optimizer's hyperparameters at this step.
    hyper: str = ""
    # For a write outside the optimizer: the `WriteWindow`, or the outcome of the backward before it.
    how: str = ""


@record("detail")
@dataclass(frozen=True)
class DetailRecord(Record):
    """Full leaves and the first values of every tensor, written where this rank saw a disagreement."""

    module: int
    stage: str
    step: int
    of: str
    optimizer: int | None
    leaves: str
    width: int
    # Base64 of the first values of each tensor, each preceded by one byte with their length in bytes.
    samples: str


@record("capture")
@dataclass(frozen=True)
class CaptureRecord(Record):
    """Full tensors of a disagreement were written to `file` (safetensors) in the run folder."""

    module: int
    stage: str
    step: int
    of: str
    optimizer: int | None
    file: str
    tensors: list[int]
    # Tensors beyond the size limit: only their first values were written.
    cut: list[int] = field(default_factory=list)
