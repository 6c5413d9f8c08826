"""One of the two runs: its attempt, record files, summary and steps; checks that both train the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpcheck.analysis.run_reader import by_start, read_description
from ddpcheck.diff.record_diff import local_sketches, reduced_sketches
from ddpcheck.errors import NotComparable
from ddpcheck.records.codecs import Packed, shares
from ddpcheck.records.folding import FoldList
from ddpcheck.records.kinds.data import BatchRecord, LoaderRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.modules import CommHookRecord, HyperRecord, ModuleRecord, OptimizerRecord
from ddpcheck.records.kinds.rank import DeviceRecord, RankHeader
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import RANK_FILES, Record


@dataclass(frozen=True)
class RunInput:
    """One attempt of a job; `files` and `headers` by rank."""

    label: str
    folder: Path
    attempt: int
    description: dict[str, Any]
    files: dict[int, Path] = field(default_factory=dict)
    headers: dict[int, RankHeader] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return max(header.world_size for header in self.headers.values())

    @property
    def first_rank(self) -> int:
        """The rank that represents the run: 0, unless its file is missing."""
        return min(self.headers)

    def header(self) -> RankHeader:
        return self.headers[self.first_rank]

    def algorithms(self) -> set[str]:
        """The digest algorithms of the modules. Runs without device records have those of the headers."""
        algorithms: set[str] = set()
        for rank, header in self.headers.items():
            on_devices: set[str] = set()
            for record in self.records(rank):
                if isinstance(record, DeviceRecord) and record.algorithm:
                    on_devices.add(record.algorithm)
                elif isinstance(record, DigestRecord) and record.step >= 0:
                    # Devices are described when a module is wrapped, before its first step.
                    break
            algorithms |= on_devices or {header.algorithm}
        return algorithms

    def records(self, rank: int) -> Iterator[Record]:
        """All records; the file is read in chunks."""
        folds = FoldList(self.folder)
        folds.refresh()
        yield from RecordFile(self.files[rank], folds).all()

    def setting(self, name: str, default: Any) -> Any:
        """An option of the `ddpcheck run` that recorded the run."""
        config = self.description.get("config")
        return config.get(name, default) if isinstance(config, dict) else default

    @property
    def recorded_by(self) -> str:
        return str(self.description.get("ddpcheck", ""))


def read_run(label: str, folder: Path, attempt: int | None) -> RunInput:
    """Read an attempt; by default the last one, as in reports."""
    description = read_description(folder)
    attempts = _attempts(folder)
    if not attempts:
        raise NotComparable(
            f"no rank reported in {folder}: there is nothing to compare. A job with one rank is recorded as well, "
            "if it creates a process group and wraps its model in DDP (torchrun --nproc-per-node 1)"
        )
    number = len(attempts) - 1 if attempt is None else attempt
    if number >= len(attempts):
        known = "only attempt 0" if len(attempts) == 1 else f"attempts 0 to {len(attempts) - 1}"
        raise NotComparable(f"{folder} has no attempt {number}: it has {known}")
    headers = {rank: header for rank, (_, header) in sorted(attempts[number].items())}
    files = {rank: path for rank, (path, _) in attempts[number].items()}
    return RunInput(label, folder, number, description, files, headers)


def _attempts(folder: Path) -> list[dict[int, tuple[Path, RankHeader]]]:
    """Files by attempt, the oldest first; attempts are separated as in reports."""
    attempts: dict[str, dict[int, tuple[Path, RankHeader]]] = {}
    for path in sorted(folder.glob(RANK_FILES), key=by_start):
        header = _header(path)
        if header is None:
            continue
        while header.rank in attempts.setdefault(header.session, {}):
            header = replace(header, session=f"+{header.session}")
        attempts[header.session][header.rank] = (path, header)
    return sorted(attempts.values(), key=lambda files: min(header.time for _, header in files.values()))


def _header(path: Path) -> RankHeader | None:
    first = RecordFile(path).read(most=1)
    return first[0] if first and isinstance(first[0], RankHeader) else None


@dataclass
class RunSummary:
    """Modules, optimizers, loaders and counts, from the first rank."""

    # As wrapped, by number.
    modules: dict[int, ModuleRecord] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    loaders: dict[int, LoaderRecord] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
    steps: int = 0
    sketched: bool = False
    # Whether a GradScaler is used: gradients are then computed in half precision.
    scaled: bool = False
    # Whether random numbers are drawn in training: dropout, noise.
    draws: bool = False


def summarize(run: RunInput) -> RunSummary:
    summary = RunSummary()
    for record in run.records(run.first_rank):
        match record:
            case ModuleRecord():
                summary.modules.setdefault(record.module, record)
            case OptimizerRecord():
                summary.optimizers.setdefault(record.optimizer, record.name)
            case LoaderRecord():
                summary.loaders.setdefault(record.loader, record)
            case CommHookRecord():
                summary.hooks.append(record.hook)
            case DigestRecord() if record.stage == Stage.PARAMS.value:
                summary.steps = max(summary.steps, record.step + 1)
            case BackwardRecord():
                summary.sketched = summary.sketched or bool(record.local)
            case HyperRecord():
                summary.scaled = summary.scaled or "GradScaler.scale" in record.changed
            case BatchRecord():
                summary.draws = summary.draws or bool(record.drew)
    return summary


def check_models(a: RunSummary, b: RunSummary) -> None:
    """Raise NotComparable with the first difference between the models."""
    if not a.modules or not b.modules:
        which = "A" if not a.modules else "B"
        raise NotComparable(f"no DDP module was wrapped in run {which}: there is nothing to compare")
    if len(a.modules) != len(b.modules):
        raise NotComparable(
            f"the runs train different models: run A wraps {len(a.modules)} in DDP, run B {len(b.modules)}"
        )
    for number, (one, other) in enumerate(zip(a.modules.values(), b.modules.values(), strict=True)):
        _check_parameters(number, one, other)


def _check_parameters(number: int, a: ModuleRecord, b: ModuleRecord) -> None:
    shapes_a = {str(row[0]): row[2] for row in a.parameters}
    shapes_b = {str(row[0]): row[2] for row in b.parameters}
    for name in [*shapes_a, *shapes_b]:
        texts = [_shape(shapes.get(name)) for shapes in (shapes_a, shapes_b)]
        if texts[0] != texts[1]:
            raise NotComparable(
                f"the runs train different models: parameter {name} of module {number} "
                f"is {texts[0]} in run A and {texts[1]} in run B"
            )


def _shape(shape: list[int] | None) -> str:
    if shape is None:
        return "missing"
    return "x".join(map(str, shape)) or "a scalar"


# Records of a step may be written up to this many steps later.
LATE = 16
ModuleKey = tuple[tuple[int, ...], int]


@dataclass
class RankStepRecord:
    """One rank's step of one module."""

    step: int
    backward: BackwardRecord | None = None
    rows: int = 0
    forwards: int = 0
    moved: bool = False
    rewritten: bool = False
    # By optimizer.
    hyper: dict[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStep:
    """One step over all ranks that recorded it."""

    step: int
    ranks: Mapping[int, RankStepRecord]
    # By parameter: the reduced gradient, and the ranks' own ones.
    reduced: Mapping[str, Packed]
    local: Mapping[str, Mapping[int, Packed]]

    def size(self, name: str) -> float:
        """The mean of the ranks' norms, to which rounding is relative."""
        parts = [one.norm for one in self.local.get(name, {}).values() if one.known]
        return sum(parts) / len(parts) if parts else 0.0

    def rows(self) -> int:
        return sum(one.rows for one in self.ranks.values())


def run_steps(run: RunInput, module: ModuleRecord) -> Iterator[RunStep]:
    """Steps in order; only a few steps of each file are in memory."""
    key = (tuple(module.group), module.ordinal)
    names = [str(row[0]) for row in module.parameters]
    streams = {rank: _rank_steps(run, rank, key) for rank in module.group if rank in run.files}
    heads = {rank: step for rank, stream in streams.items() if (step := next(stream, None)) is not None}
    while heads:
        number = min(head.step for head in heads.values())
        taking = {rank: head for rank, head in heads.items() if head.step == number}
        yield _combined(number, taking, names, shares(module))
        for rank in taking:
            following = next(streams[rank], None)
            if following is None:
                del heads[rank]
            else:
                heads[rank] = following


def _combined(
    step: int, ranks: dict[int, RankStepRecord], names: list[str], shares_by_rank: dict[int, tuple[int, ...]]
) -> RunStep:
    reduced: dict[str, Packed] = {}
    local: dict[str, dict[int, Packed]] = {}
    for rank, one in ranks.items():
        if one.backward is not None:
            reduced.update(reduced_sketches(one.backward, names, shares_by_rank.get(rank, ())))
            for name, sketch in local_sketches(one.backward, names).items():
                local.setdefault(name, {})[rank] = sketch
    return RunStep(step, ranks, reduced, local)


def _rank_steps(run: RunInput, rank: int, key: ModuleKey) -> Iterator[RankStepRecord]:
    number = -1
    hyper: dict[int, dict[str, Any]] = {}
    steps: dict[int, RankStepRecord] = {}

    def at(step: int) -> RankStepRecord:
        return steps.setdefault(step, RankStepRecord(step))

    for record in run.records(rank):
        match record:
            case ModuleRecord() if (tuple(record.group), record.ordinal) == key:
                number = record.module
            case OptimizerRecord():
                hyper[record.optimizer] = {**hyper.get(record.optimizer, {}), "class": record.name}
            case HyperRecord():
                hyper[record.optimizer] = {**hyper.get(record.optimizer, {}), **record.changed}
            case BackwardRecord() if record.module == number and record.local:
                # The last backward of a step holds the accumulated gradients.
                at(record.step).backward = record
            case AppliedRecord() if record.module == number and record.root:
                at(record.step).moved = record.moved
            case BatchRecord() if record.module == number:
                one = at(record.forward if record.step is None else record.step)
                one.rows += record.rows
                one.forwards += 1
            case DigestRecord() if record.module == number and record.stage == Stage.REWRITTEN.value:
                at(record.step).rewritten = True
            case DigestRecord() if record.module == number and record.stage == Stage.PARAMS.value:
                if record.optimizer is not None:
                    at(record.step).hyper[record.optimizer] = hyper.get(record.optimizer, {})
                # Batches are recorded after their step, and gradients of a device arrive late.
                for done in sorted(step for step in steps if step < record.step - LATE):
                    yield steps.pop(done)
    for done in sorted(steps):
        yield steps.pop(done)
