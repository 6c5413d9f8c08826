"""What one rank wrote about itself, its modules and its optimizers, and the key of a module across ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ddpcheck.analysis.aggregate.compared_steps import ComparedSteps
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, DigestRecord
from ddpcheck.records.kinds.gradients import AppliedRecord
from ddpcheck.records.kinds.modules import (
    FIRST_ROOT,
    FIRST_SHARDED,
    FIRST_UNWRAPPED,
    FIRST_WITHOUT_REPLICA,
    HyperRecord,
    ModuleRecord,
    OptimizerRecord,
    SkipRecord,
    StructureRecord,
)
from ddpcheck.records.kinds.rank import EndRecord, FaultRecord, NodeMismatchRecord, RankHeader, StackRecord

# Identifies a module across ranks: the ranks of its process group, and its number among the modules of that group. It
# is the key of nearly every table. With thousands of ranks it is a long tuple, so there is one object per module, which
# computes its hash once.
ModuleKey = tuple[tuple[int, ...], int]


class _Key(tuple):  # type: ignore[type-arg]
    """A tuple that caches its hash."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


@lru_cache(maxsize=1024)
def _key(group: tuple[int, ...], ordinal: int) -> ModuleKey:
    return _Key((group, ordinal))


def module_key(group: Iterable[int], ordinal: int) -> ModuleKey:
    return _key(tuple(group), ordinal)


def is_unwrapped(module: ModuleKey) -> bool:
    """Whether these are parameters outside of DDP, which ranks compare like a module."""
    return module[1] >= FIRST_UNWRAPPED


def is_sharded(module: ModuleKey) -> bool:
    """Whether these are shards of parameters."""
    return FIRST_SHARDED <= module[1] < FIRST_UNWRAPPED


def has_no_replica(module: ModuleKey) -> bool:
    """Whether these are parameters of which each rank holds another part: they are described, not compared."""
    return FIRST_WITHOUT_REPLICA <= module[1] < FIRST_UNWRAPPED


def is_sharded_root(module: ModuleKey) -> bool:
    """Whether this is the outermost module that FSDP shards, of which forwards and buffers are compared."""
    return FIRST_ROOT <= module[1] < FIRST_SHARDED


@lru_cache(maxsize=1024)
def members(module: ModuleKey) -> frozenset[int]:
    return frozenset(module[0])


MOST_HYPER_CHANGES = 10_000
# A rank writes no more digests after a fault in one of these.
DIGEST_PROBES = ("agent", "parameters", "sharded")
# A rank writes no more gradient sketches after a fault in one of these.
SKETCH_PROBES = ("agent", "backward", "gradients")


@dataclass
class RankData:
    """Records of one rank that rules use directly. `RankCollector` fills it."""

    header: RankHeader
    modules: dict[int, ModuleKey] = field(default_factory=dict)
    latest: dict[ModuleKey, ModuleRecord] = field(default_factory=dict)
    as_wrapped: dict[ModuleKey, ModuleRecord] = field(default_factory=dict)
    # The latest descriptions of each module, by revision.
    revisions: dict[ModuleKey, dict[int, ModuleRecord]] = field(default_factory=dict)
    optimizers: dict[tuple[int, ModuleKey], OptimizerRecord] = field(default_factory=dict)
    hyper: deque[HyperRecord] = field(default_factory=deque)
    # Hyperparameters by optimizer after the changes that were dropped from `hyper`.
    hyper_before: dict[int, dict[str, Any]] = field(default_factory=dict)
    skips: int = 0
    first_skip: SkipRecord | None = None
    structure: list[tuple[ModuleKey, StructureRecord]] = field(default_factory=list)
    # The part of a step in which parameters were written outside the optimizer, where known.
    writes: dict[ModuleKey, str] = field(default_factory=dict)
    # The latest digest of the parameters.
    final: dict[ModuleKey, str] = field(default_factory=dict)
    # Steps before which parameters were written outside the optimizer.
    rewritten: dict[ModuleKey, ComparedSteps] = field(default_factory=dict)
    joined: set[ModuleKey] = field(default_factory=set)
    # Modules whose replicas differ between averagings on purpose.
    local_sgd: set[ModuleKey] = field(default_factory=set)
    comm_hooks: dict[ModuleKey, list[str]] = field(default_factory=dict)
    # The first applied gradients with non-finite values.
    nonfinite: dict[ModuleKey, AppliedRecord] = field(default_factory=dict)
    details: list[tuple[ModuleKey, DetailRecord]] = field(default_factory=list)
    captures: list[tuple[ModuleKey, CaptureRecord]] = field(default_factory=list)
    # Digests that differ from those of a rank on another node.
    node_mismatches: list[tuple[ModuleKey, NodeMismatchRecord]] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    end: EndRecord | None = None
    # Number of steps by module and optimizer.
    steps: dict[tuple[ModuleKey, int], int] = field(default_factory=dict)
    # By module and optimizer, how many forwards of the module had run before its first step.
    first_steps: dict[tuple[ModuleKey, int], int] = field(default_factory=dict)
    # By module, the step before which its list of parameters first changed.
    first_revision: dict[ModuleKey, int] = field(default_factory=dict)
    # By module, the first step that applied gradients which DDP had not reduced, and why.
    first_unreduced: dict[ModuleKey, AppliedRecord] = field(default_factory=dict)
    last: DigestRecord | None = None
    # The stack that the rank wrote on the launcher's last request.
    stack: StackRecord | None = None
    bad_lines: int = 0
    torn: bool = False

    def __post_init__(self) -> None:
        self.number = self.header.rank

    @property
    def counts_steps(self) -> bool:
        """Whether the records contain all steps: not after a fault of a digest probe or after lost records."""
        if self.end is None or self.end.dropped:
            return False
        return not any(fault.probe in DIGEST_PROBES for fault in self.faults)

    @property
    def wraps(self) -> bool:
        """Whether the rank has wrapped a module in DDP."""
        return not all(map(is_unwrapped, self.latest))

    def description(self, module: ModuleKey, revision: int) -> ModuleRecord:
        """The module as it was at a revision; the latest if that is not known."""
        return self.revisions.get(module, {}).get(revision, self.latest[module])

    def hooks(self, module: ModuleKey) -> list[str]:
        """The communication hooks that the user registered."""
        return self.comm_hooks.get(module, [])

    def add_hyper(self, record: HyperRecord) -> None:
        self.hyper.append(record)
        if len(self.hyper) > MOST_HYPER_CHANGES:
            oldest = self.hyper.popleft()
            self.hyper_before.setdefault(oldest.optimizer, {}).update(oldest.changed)

    def hyper_at(self, optimizer: int, step: int) -> dict[str, Any]:
        """The hyperparameters of an optimizer at a step."""
        values = dict(self.hyper_before.get(optimizer, {}))
        for record in self.hyper:
            if record.optimizer == optimizer and record.step <= step:
                values.update(record.changed)
        return values
