"""The records of a rank: one frozen dataclass a kind, written as one JSON line each.

Standard library only: this is imported inside ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

# Version of the record files. Readers accept every version listed here.
# 1 (2026-11): first version.
SCHEMA = 1

RANK_FILES = "rank-*.jsonl"
# In the name of a communication hook that lets replicas differ between averagings.
LOOSE = "post_localSGD"
# Statistics of torch's normalisation layers.
STATISTICS = ("running_mean", "running_var")


class Stage(str, Enum):
    """The moments at which tensors are looked at; the first at which ranks disagree is the root cause."""

    INIT_BEFORE = "init.before"
    INIT_AFTER = "init.after"
    BUFFERS = "buffers"
    # When the job ends, and only where buffers were written since the last step.
    BUFFERS_END = "buffers.end"
    # Before an optimizer step, and only where the parameters were written since the step before.
    REWRITTEN = "rewritten"
    PARAMS = "params"
    # The gradient as this rank computed it, as DDP reduced it, and as the optimizer applies it.
    LOCAL = "local"
    REDUCED = "reduced"
    APPLIED = "applied"
    # What the optimizer keeps per parameter, before its first step; with --optimizer-state before every one.
    STATE = "optimizer.state"


class TensorKind(str, Enum):
    """Which tensors of a module a digest covers."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    STATE = "state"
    GRADIENTS = "gradients"
    # Parameters that DDP was told to leave alone.
    IGNORED = "ignored"


class StartupStage(str, Enum):
    """The stretches of a rank's way from its process to its first step."""

    INTERPRETER = "interpreter"
    TORCH = "torch"
    GROUP = "group"
    LOAD = "load"
    COPY = "copy"
    WRAP = "wrap"
    # Within `wrap`: DDP compares the shapes of all ranks, and so waits for the last one to come.
    MEET = "meet"
    # Within `wrap`: the broadcast alone, once all ranks have come to it.
    BROADCAST = "broadcast"
    BATCH = "batch"
    STEP = "step"


@dataclass(frozen=True)
class RankHeader:
    """First line of a file: who writes it."""

    kind: ClassVar[str] = "rank"
    rank: int
    world_size: int
    host: str
    pid: int
    # Start of the process in clock ticks since boot: with the pid it names a process beyond reuse.
    ticks: int
    # The same on all ranks of one start of the job, and on no other.
    session: str
    time: float
    local_rank: int | None = None
    restart: int = 0
    python: str = ""
    torch: str = ""
    backend: str = ""
    device: str = ""
    algorithm: str = ""
    argv: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True)
class ModuleRecord:
    """A DDP module as it was wrapped, or as it stands after its set of parameters changed."""

    kind: ClassVar[str] = "module"
    module: int
    name: str
    # Global ranks of its process group, and how many modules were wrapped in it before: the same on all.
    group: list[int]
    ordinal: int
    # [name, dtype, shape, trainable]
    parameters: list[list[Any]]
    buffers: list[list[Any]]
    ignored: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    # The line of the user's that wrapped it, as file:line.
    where: str = ""


@dataclass(frozen=True)
class DigestRecord:
    """Digests of a module's tensors at one moment: the root whole, each leaf cut to `width` bytes."""

    kind: ClassVar[str] = "digest"
    module: int
    stage: str
    step: int
    root: str
    leaves: str
    width: int
    of: str = TensorKind.PARAMETERS.value
    time: float = 0.0
    optimizer: int | None = None
    # Training forwards of this module so far: tells a skipped step from a diverged one.
    forward: int | None = None
    # Short digest of the optimizer's hyperparameters in force at this step.
    hyper: str = ""
    # Of a write that no optimizer made: when it came, or what became of the backward before it.
    how: str = ""


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer that steps parameters of a DDP module."""

    kind: ClassVar[str] = "optimizer"
    optimizer: int
    name: str
    module: int
    # Per group, the places of its parameters in the module's list (-1: not the module's).
    groups: list[list[int]]
    # The line of the user's that led to this step, as file:line.
    where: str = ""


@dataclass(frozen=True)
class HyperRecord:
    """Hyperparameters that changed at a step, by "group.name"."""

    kind: ClassVar[str] = "hyper"
    optimizer: int
    step: int
    changed: dict[str, Any]


@dataclass(frozen=True)
class SkipRecord:
    """GradScaler left out an optimizer step, as it does on overflow."""

    kind: ClassVar[str] = "skip"
    optimizer: int | None
    module: int | None
    step: int
    forward: int
    scale: float | None = None


@dataclass(frozen=True)
class StructureRecord:
    """A parameter was added, replaced, removed or unfrozen after wrapping."""

    kind: ClassVar[str] = "structure"
    module: int
    change: str
    parameter: str
    step: int
    forward: int


@dataclass(frozen=True)
class JoinRecord:
    """The module trains inside `join()`: ranks may rightly take different numbers of steps."""

    kind: ClassVar[str] = "join"
    module: int
    step: int


@dataclass(frozen=True)
class CommHookRecord:
    """The user registered a communication hook: gradients are no longer reduced in DDP's own way."""

    kind: ClassVar[str] = "comm_hook"
    module: int
    hook: str
    step: int


@dataclass(frozen=True)
class BackwardRecord:
    """Sketches of the gradients of one backward that DDP reduced."""

    kind: ClassVar[str] = "backward"
    module: int = field(default=0, kw_only=True)
    # Reduced backwards of this module count from 1; the same on all ranks.
    number: int
    step: int
    # Packed sketches of all parameters' own gradients.
    local: str
    # Of the reduced ones, which should be the same on all ranks, this rank's share: see shares.py.
    reduced: str
    # Digest of all reduced gradients, cut short.
    root: str
    # Values that are not finite, by place.
    local_nonfinite: dict[str, int] = field(default_factory=dict)
    reduced_nonfinite: dict[str, int] = field(default_factory=dict)
    # Places without a reduced gradient: nobody used the parameter, it was applied already, or the reducer
    # does not know it.
    absent: list[int] = field(default_factory=list)
    # -1: the sum is divided by the ranks that took part, not by the size of the group.
    divisor: int = 0
    # When DDP had finished it, by this host's clock; 0: that was not seen.
    time: float = 0.0


@dataclass(frozen=True)
class AppliedRecord:
    """The gradients an optimizer is about to apply, and the backwards they came from."""

    kind: ClassVar[str] = "applied"
    # Compared across ranks like a digest, whose leaves are written only where ranks disagree.
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
    # Whether anything wrote to the gradients after DDP had reduced them.
    moved: bool = False
    synced: int = 1
    unsynced: int = 0
    reason: str = ""
    waiting: list[int] = field(default_factory=list)
    nonfinite: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DetailRecord:
    """Whole leaves and the first values of every tensor at a moment at which this rank saw a disagreement."""

    kind: ClassVar[str] = "detail"
    module: int
    stage: str
    step: int
    of: str
    optimizer: int | None
    leaves: str
    width: int
    # Base64 of the first values of each tensor, each behind one byte that tells how many bytes they take.
    samples: str


@dataclass(frozen=True)
class CaptureRecord:
    """Full tensors of a disagreeing moment were written to `file` (safetensors) in the run folder."""

    kind: ClassVar[str] = "capture"
    module: int
    stage: str
    step: int
    of: str
    optimizer: int | None
    file: str
    tensors: list[int]
    # Tensors over the budget: only their beginning was written.
    cut: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class BatchRecord:
    """What a rank trained on in one forward: enough to compare ranks, nothing of the data itself."""

    kind: ClassVar[str] = "batch"
    forward: int
    module: int = 0
    # The optimizer step it belongs to; None: the same number as the forward's.
    step: int | None = None
    digest: str = ""
    # How many different values the digest rests on; many, where it is not told.
    variety: int = 64
    rows: int = 0
    # Labels that count in the loss, and tokens that are no padding, where the batch tells.
    tokens: int = 0
    attended: int = 0
    # Digest of the random generators from which numbers were drawn between this forward and the step.
    drew: str = ""
    # The same between the last step and this forward; and where any were, a short digest of each tensor of the
    # batch, empty for one that holds too little to tell it from another.
    drew_before: str = ""
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoaderRecord:
    """A data loader whose batches were trained on, and what its sampler says of itself."""

    kind: ClassVar[str] = "loader"
    loader: int
    # Samples of the dataset; -1: not known.
    length: int
    sampler: str
    # Only samples whose number this divides are in the maps of the epochs.
    stride: int = 1
    iterable: bool = False
    shuffle: bool | None = None
    replacement: bool = False
    replicas: int | None = None
    share: int | None = None
    seed: int | None = None
    # Digest of the dataset's own attributes: equal, where the dataset is. Empty: they tell too little.
    mark: str = ""
    # Of each attribute that names every sample, as a list of files or of indices does.
    columns: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EpochRecord:
    """One pass over a loader: which samples this rank drew, and in what order."""

    kind: ClassVar[str] = "epoch"
    loader: int
    epoch: int
    drawn: int
    module: int = 0
    step: int = 0
    batches: int = 0
    largest: int = 0
    # Batches that were handed out, and those of them that a training forward followed.
    yielded: int = 0
    fed: int = 0
    # Whether the sampler was followed from its first draw to its end.
    complete: bool = False
    # Base64 of a compressed bitmap, one bit for each sample that the loader's stride divides.
    map: str = ""
    repeated: int = 0
    order: str = ""
    # Digest of the first indices only, for passes that are left early.
    head: str = ""
    # The sampler's own epoch, as `set_epoch` sets it.
    at: int | None = None


@dataclass(frozen=True)
class StackRecord:
    """Where the training thread stands: the answer to a question of the launcher, in a job that is quiet."""

    kind: ClassVar[str] = "standing"
    # Number of the question.
    look: int
    time: float
    # The innermost call first: [file, line, function], and nothing of what they hold.
    frames: list[list[Any]]
    # The optimizer step under way, and the last moment that a probe was told of.
    step: int = 0
    moment: str = ""
    # The training thread's id, as the system knows it.
    thread: int = 0
    # Collectives issued so far, by process group, where the backend counts them.
    collectives: dict[str, int] = field(default_factory=dict)
    # The rank has closed its process group.
    left: bool = False


@dataclass(frozen=True)
class ClockRecord:
    """How long each part of some steps took on this rank, in microseconds, one number a step."""

    kind: ClassVar[str] = "clocks"
    # The first of the steps, which follow each other.
    step: int
    # From the end of one step to the end of the next, without what ddpcheck itself took.
    total: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    # For communication, where it was not hidden behind the backward.
    wait: list[int] = field(default_factory=list)
    optimizer: list[int] = field(default_factory=list)
    # What ddpcheck itself took.
    watching: list[int] = field(default_factory=list)
    # How long the training thread stood in line for a processor, whatever it was about to do; -1: not known.
    queued: list[int] = field(default_factory=list)
    # Page faults of the training thread, and what it spent in the kernel for whatever reason; -1: not known.
    faults: list[int] = field(default_factory=list)
    kernel: list[int] = field(default_factory=list)
    # The same parts as a GPU went through them, -1 where its clock was not read in time.
    device: dict[str, list[int]] = field(default_factory=dict)
    # DDP's own averages, once at the end.
    ddp: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LossRecord:
    """What backward was called on, summed up to each of some steps that follow each other."""

    kind: ClassVar[str] = "loss"
    optimizer: int
    # The first of them.
    step: int
    # null: no scalar, or one that could not be read; "nan", "inf" and "-inf" are written as text.
    values: list[float | str | None]


@dataclass(frozen=True)
class MemoryRecord:
    """Memory this rank held after a step, in bytes; written at once where it changed, else now and then."""

    kind: ClassVar[str] = "memory"
    step: int
    # Pages of the process that no file is behind, after the step and at the first gradient of its last backward.
    host: int = 0
    high: int = 0
    # torch's own statistics of its device: allocated and reserved after the step, most allocated so far.
    allocated: int = 0
    reserved: int = 0
    peak: int = 0


@dataclass(frozen=True)
class MemoryPartsRecord:
    """What a module and its optimizer hold, in bytes; written when it changed."""

    kind: ClassVar[str] = "memory_parts"
    module: int
    optimizer: int
    step: int
    # The device that holds the parameters: "cpu", "cuda:0", ...
    device: str = "cpu"
    parameters: int = 0
    buffers: int = 0
    # Where gradients are views of DDP's buckets, `gradients` counts what lies outside of them.
    gradients: int = 0
    buckets: int = 0
    views: bool = False
    state: int = 0
    # Gradients of before that were still there when the backward began.
    kept: int = 0
    # What the process, or torch on its device, held beside parameters and buffers when it came to be wrapped.
    base: int = 0
    # By device, what this rank holds on others than its own.
    elsewhere: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StartupRecord:
    """One stretch of a rank's way to its first step."""

    kind: ClassVar[str] = "startup"
    stage: str
    # When it began, and how long it took.
    time: float
    seconds: float = 0.0
    # What was called: torch.load, from_pretrained, Module.to, ...
    via: str = ""
    # Bytes of the files, copied to a device or broadcast.
    bytes: int = 0
    # [path, bytes, "read", "mapped" or "cufile"]
    files: list[list[Any]] = field(default_factory=list)
    # Bytes the process read by system calls meanwhile, and those it made the system fetch from storage.
    read: int = 0
    storage: int = 0
    # What the process held afterwards, and how far above what it held before it may have come meanwhile.
    host: int = 0
    staged: int = 0
    # torch's memory on the device afterwards, and how much it grew.
    device: int = 0
    moved: int = 0


@dataclass(frozen=True)
class TraceRecord:
    """A profile of some steps was written to `file`; without one, the user's own profiler was in the way."""

    kind: ClassVar[str] = "trace"
    # In the run folder, or, where the user's program wrote it, as a whole path.
    file: str
    own: bool = True
    # The first step in it and the one after the last, where it is our own.
    first: int = 0
    end: int = 0
    # For how long threads of this rank were ready to run meanwhile and had no processor.
    held_up_ns: int = 0


@dataclass(frozen=True)
class ReadyRecord:
    """When each gradient of one reduced backward was ready, in a step that is being profiled."""

    kind: ClassVar[str] = "ready"
    module: int
    number: int
    step: int
    # When the first one was, in nanoseconds since 1970, and how long after it the others came.
    begin_ns: int
    order: list[int]
    after_us: list[int]
    # When DDP had finished the backward.
    done_us: int
    # Sizes in bytes at which DDP closes its buckets; the last one holds for all that follow.
    limits: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class NodeMismatchRecord:
    """Another node's digest of the same moment, read from the job's store, is not this rank's."""

    kind: ClassVar[str] = "apart"
    module: int
    stage: str
    of: str
    step: int
    root: str
    other_root: str
    other_rank: int
    other_host: str
    optimizer: int | None = None


@dataclass(frozen=True)
class NodesRecord:
    """Ranks that are on other nodes and seen by other launchers, as the job's store tells: their hosts by rank."""

    kind: ClassVar[str] = "nodes"
    others: dict[str, str]
    # At the end: looks that were laid beside those of other nodes.
    compared: int = 0


@dataclass(frozen=True)
class FaultRecord:
    """ddpcheck itself failed somewhere and switched that part off."""

    kind: ClassVar[str] = "fault"
    probe: str
    entry: str
    error: str
    where: str
    pid: int = 0
    # Where known and not told by the file: faults of a process that never opened one.
    rank: int | None = None


@dataclass(frozen=True)
class EndRecord:
    """Last line of a file that was closed in an orderly way."""

    kind: ClassVar[str] = "end"
    reason: str
    time: float
    error: str = ""
    where: str = ""
    # Records that were lost because the disk could not keep up.
    dropped: int = 0


Record = (
    RankHeader
    | ModuleRecord
    | DigestRecord
    | OptimizerRecord
    | HyperRecord
    | SkipRecord
    | StructureRecord
    | JoinRecord
    | CommHookRecord
    | BackwardRecord
    | AppliedRecord
    | DetailRecord
    | CaptureRecord
    | BatchRecord
    | LoaderRecord
    | EpochRecord
    | StackRecord
    | ClockRecord
    | LossRecord
    | MemoryRecord
    | MemoryPartsRecord
    | StartupRecord
    | TraceRecord
    | ReadyRecord
    | NodeMismatchRecord
    | NodesRecord
    | FaultRecord
    | EndRecord
)

KINDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (
        RankHeader,
        ModuleRecord,
        DigestRecord,
        OptimizerRecord,
        HyperRecord,
        SkipRecord,
        StructureRecord,
        JoinRecord,
        CommHookRecord,
        BackwardRecord,
        AppliedRecord,
        DetailRecord,
        CaptureRecord,
        BatchRecord,
        LoaderRecord,
        EpochRecord,
        StackRecord,
        ClockRecord,
        LossRecord,
        MemoryRecord,
        MemoryPartsRecord,
        StartupRecord,
        TraceRecord,
        ReadyRecord,
        NodeMismatchRecord,
        NodesRecord,
        FaultRecord,
        EndRecord,
    )
}
_FIELDS = {
    kind: [(f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(cls)]
    for kind, cls in KINDS.items()
}


def to_line(record: Record) -> bytes:
    """One JSON line; fields at their default are left out, which keeps step records small."""
    raw: dict[str, Any] = {"kind": record.kind}
    for name, default in _FIELDS[record.kind]:
        value = getattr(record, name)
        if name == "schema" or value != default:
            raw[name] = value
    return json.dumps(raw, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def from_mapping(raw: Mapping[str, Any]) -> Record | None:
    """The record in `raw`, or None where its kind is unknown or a needed field is missing.

    Unknown fields are left out: a file written by a newer ddpcheck is read as far as it is understood.
    """
    cls = KINDS.get(str(raw.get("kind")))
    if cls is None:
        return None
    names = {name for name, _ in _FIELDS[cls.kind]}
    try:
        return cls(**{key: value for key, value in raw.items() if key in names})
    except TypeError:
        return None
