"""One of the two runs: its attempt, record files and summary; checks that both train the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpcheck.analysis.run_reader import by_start, read_description
from ddpcheck.errors import NotComparable
from ddpcheck.records.kinds.data import BatchRecord, LoaderRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import CommHookRecord, HyperRecord, ModuleRecord, OptimizerRecord
from ddpcheck.records.kinds.rank import RankHeader
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

    def records(self, rank: int) -> Iterator[Record]:
        """All records; the file is read in chunks."""
        file = RecordFile(self.files[rank])
        while records := file.read():
            yield from records

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
