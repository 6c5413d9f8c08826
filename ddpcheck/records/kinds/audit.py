"""Records of the audit: local gradients that other ranks computed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.registry import Record, record

# The folder, in the run folder, through which ranks hand micro-batches over. The launcher removes it at the end.
AUDIT_FOLDER = "audit"


@dataclass(frozen=True)
class GradientVote:
    """The local gradient of one micro-batch, as one rank computed it."""

    # The rank that trained on the micro-batch.
    source: int
    # Digest of the module's outputs; leaves of the gradients, 8 bytes each, as base 64: zeros without a gradient.
    outputs: str = ""
    leaves: str = ""
    # Packed sketches of the gradients.
    sketches: str = ""
    # Why there is none: a value of `AuditSkip`, and for an exception its type.
    reason: str = ""
    detail: str = ""

    def to_row(self) -> list[Any]:
        return [self.source, self.outputs, self.leaves, self.sketches, self.reason, self.detail]

    @classmethod
    def from_row(cls, row: Any) -> GradientVote | None:
        """None if the row has another form."""
        match row:
            case [
                int(source),
                str(outputs),
                str(leaves),
                str(sketches),
                str(reason),
                str(detail),
                *_,
            ]:
                return cls(source, outputs, leaves, sketches, reason, detail)
        return None


@record("audit")
@dataclass(frozen=True)
class AuditRecord(Record):
    """One audited step of a module on one rank: its own local gradient, and those that it computed for other ranks."""

    module: int = field(default=0, kw_only=True)
    step: int
    # A row of GradientVote each: first the rank's own, then one for each micro-batch that it replayed.
    votes: list[list[Any]] = field(default_factory=list)
    # Indices of parameters that are not compared: their gradient does not come through the module's outputs alone.
    excluded: list[int] = field(default_factory=list)
    # Device, libraries and settings on which the bits of a gradient depend, as a digest.
    environment: str = ""
    # Whether all kernels give the same bits each time.
    deterministic: bool = False
    # The coarsest dtype of the computation.
    dtype: str = ""
    # Size of the file handed over, and what the audit took of the training thread.
    bytes: int = 0
    microseconds: int = 0
    # The revision of the module record whose parameters the indices refer to.
    revision: int = 0
