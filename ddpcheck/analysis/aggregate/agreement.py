"""Compares the digests of ranks while records are read: values wait until all ranks have reported, then go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from ddpcheck.analysis.aggregate.compared_steps import ComparedSteps
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.aggregate.step_evidence import SYNCED, AppliedWindows
from ddpcheck.analysis.aggregate.use import ParameterUse, Reunions
from ddpcheck.analysis.timeseries.collector import AgreementSeries
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord

Key = TypeVar("Key")
Value = TypeVar("Value")


class PendingValues(Generic[Key, Value]):
    """Values by key and rank, in the order in which the first rank reported each key."""

    def __init__(self) -> None:
        # The values by rank, and the ranks that are missing. One table: hashing a key is the main cost of `add`.
        self._entries: dict[Key, tuple[dict[int, Value], set[int]]] = {}
        # Ranks that report nothing more.
        self._ended: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def add(self, key: Key, group: Collection[int], rank: int, value: Value) -> bool:
        """Add the value of a rank. True if all ranks of the group have reported now, except those that ended."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = ({}, set(group) - self._ended)
        values, missing = entry
        values[rank] = value
        missing.discard(rank)
        return not missing

    def active(self, ranks: Collection[int]) -> set[int]:
        """Those of `ranks` that have not ended."""
        return set(ranks) - self._ended

    def end_rank(self, rank: int) -> list[Key]:
        """The rank reports nothing more. Returns the keys that waited only for it."""
        self._ended.add(rank)
        complete = []
        for key, (_, missing) in self._entries.items():
            if rank in missing:
                missing.discard(rank)
                if not missing:
                    complete.append(key)
        return complete

    def take(self, key: Key) -> dict[int, Value]:
        """Remove and return the values of a key, by rank."""
        return self._entries.pop(key)[0]

    def reported(self, key: Key) -> Mapping[int, Value]:
        """The values of a key so far, by rank."""
        return self._entries[key][0]

    def oldest(self) -> Key:
        return next(iter(self._entries))


# At most this many comparisons wait for further ranks: a rank may never report. Ranks that train together, and whose
# files are read in turns, are never that many comparisons ahead of each other.
MOST_PENDING = 4096
# Kept comparisons of optimizer state that only some ranks have: with a sharded optimizer every step has one.
MOST_PARTIAL = 256
# Averagings after which replicas that differ in between count as trained by local SGD.
FEWEST_AVERAGINGS = 2
# Reading an enum's value is slow, and these are needed for every record.
_STATE, _REWRITTEN = TensorKind.STATE.value, Stage.REWRITTEN.value
# Steps after which ranks differed, and of which it is not known yet whether they differ in use.
_MOST_UNCONFIRMED = 4096
_PARAMS, _APPLIED, _USED = Stage.PARAMS.value, Stage.APPLIED.value, Stage.USED.value
_GRADIENTS, _PARAMETERS = TensorKind.GRADIENTS.value, TensorKind.PARAMETERS.value
_IN_SERIES = (Stage.INIT_AFTER.value, Stage.PARAMS.value)

# The digests of some ranks at a step, by its position.
DigestsOfStep = Callable[[int], Sequence[DigestRecord]]
# A record that is compared across ranks.
RankDigest = DigestRecord | AppliedRecord
_Value = TypeVar("_Value")


class ComparisonKey(NamedTuple):
    """Identifies the digests of all ranks at the same point of the job."""

    module: ModuleKey
    stage: str
    of: str
    step: int
    optimizer: int = -1
    # Only for sharded optimizer state: ranks with different parts are not comparable.
    part: str = ""


@dataclass(frozen=True)
class Disagreement:
    """A comparison in which ranks had different digests."""

    key: ComparisonKey
    digests: Mapping[int, RankDigest]

    @property
    def digested(self) -> bool:
        """False if the records only describe a step whose tensors were not digested."""
        return any(record.root for record in self.digests.values())

    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Ranks grouped by identical digests, the largest group first."""
        return groups_of({rank: record.root for rank, record in self.digests.items() if record.root})

    def outlier_ranks(self) -> tuple[int, ...]:
        groups = [ranks for _, ranks in self.groups()]
        return outlier_ranks(groups) if groups else tuple(sorted(self.digests))


def groups_of(roots: Mapping[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    """Ranks grouped by identical roots, the largest group first."""
    by_root: dict[str, list[int]] = {}
    for rank in sorted(roots):
        by_root.setdefault(roots[rank], []).append(rank)
    ordered = sorted(by_root.items(), key=lambda item: (-len(item[1]), item[1]))
    return [(root, tuple(ranks)) for root, ranks in ordered]


def comparable(values: Mapping[int, _Value], hashes: Mapping[int, str]) -> Mapping[int, _Value]:
    """The values of ranks with the most common hash algorithm: digests of different algorithms cannot be compared."""
    if len(set(hashes.values())) < 2:
        return values
    _, ranks = groups_of({rank: hashes.get(rank, "") for rank in values})[0]
    return {rank: values[rank] for rank in ranks}


def outlier_ranks(groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    """All ranks outside the majority; all ranks where there is no majority."""
    everyone = sorted(rank for group in groups for rank in group)
    largest = max(groups, key=len)
    if 2 * len(largest) <= len(everyone):
        return tuple(everyone)
    return tuple(rank for rank in everyone if rank not in largest)


@dataclass
class ComparisonStats:
    """Results of all comparisons of one module, stage and kind of tensors."""

    compared: int = 0
    differing: int = 0
    first: Disagreement | None = None
    # By optimizer, the steps at which all ranks had the same digest.
    agreed: dict[int, ComparedSteps] = field(default_factory=dict)

    def agreed_before(self, key: ComparisonKey) -> int:
        """The last step before `key` at which all ranks had the same digest; -1: none, or only after wrapping."""
        own = self.agreed.get(key.optimizer)
        last = None if own is None else own.last_before(key.step)
        if last is not None:
            return last
        # An optimizer that replaces another one continues its count.
        others = [steps.last_before(key.step) for steps in self.agreed.values()]
        return max((step for step in others if step is not None), default=-1)

    def agreed_from(self, first: int, key: ComparisonKey) -> bool:
        """Whether all ranks had the same digest at every step from `first` to that of `key`."""
        own = self.agreed.get(key.optimizer)
        return own is not None and own.covers(first, key.step)


@dataclass
class Agreement:
    """All comparisons of one attempt. Memory does not grow with the number of steps."""

    stats: dict[tuple[ModuleKey, str, str], ComparisonStats] = field(default_factory=dict)
    # The first step at which the hyperparameters, or the number of forwards before the step, differed.
    hyper: dict[ModuleKey, Disagreement] = field(default_factory=dict)
    forwards: dict[ModuleKey, Disagreement] = field(default_factory=dict)
    rewritten: dict[ModuleKey, Disagreement] = field(default_factory=dict)
    # All ranks wrote different values, but their parameters before the write had not been compared.
    rewritten_differently: dict[ModuleKey, Disagreement] = field(default_factory=dict)
    # Applied gradients that were not digested, since the last comparison of parameters.
    windows: AppliedWindows = field(default_factory=AppliedWindows)
    # Modules of which all ranks applied the same gradients although DDP had not reduced them: the job does it itself.
    reduced_by_job: set[ModuleKey] = field(default_factory=set)
    # Optimizer state that only some ranks have: loaded on these ranks only, or sharded.
    partial_state: list[Disagreement] = field(default_factory=list)
    # Agreement on each module's parameters over the steps.
    series: dict[ModuleKey, AgreementSeries] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    # Hash algorithm by rank.
    hashes: dict[int, str] = field(default_factory=dict)
    # Ranks on which a probe is switched off: their digests are valid, other fields of the records may be outdated.
    impaired: set[int] = field(default_factory=set)
    _pending: PendingValues[ComparisonKey, RankDigest] = field(default_factory=PendingValues)
    _rewrites: dict[ComparisonKey, dict[int, DigestRecord]] = field(default_factory=dict)
    _agreed: dict[ModuleKey, DigestRecord] = field(default_factory=dict)
    # By rank, the last step with a digest of parameters.
    _latest: dict[int, int] = field(default_factory=dict)
    # Modules whose replicas differed after a step: how often they were equal again when they were used.
    reunions: dict[ModuleKey, Reunions] = field(default_factory=dict)
    # Steps of modules that some ranks step with an optimizer and others receive: how many were compared, and differed.
    received: dict[ModuleKey, list[int]] = field(default_factory=dict)
    # Modules on a device, where a write between steps may go unnoticed: that nothing is recorded does not mean that the
    # values of a step are used as they are. Only what all ranks record of the same use does.
    unsampled: set[ModuleKey] = field(default_factory=set)
    _unsampled_use: dict[ComparisonKey, dict[int, str]] = field(default_factory=dict)
    _partial_steps: dict[tuple[ModuleKey, int], dict[int, DigestRecord]] = field(default_factory=dict)
    _use: ParameterUse[ComparisonKey] = field(default_factory=ParameterUse)
    # Differences after a step that count only if they are still there when the parameters are used.
    _unconfirmed: dict[ComparisonKey, Disagreement] = field(default_factory=dict)
    # Different gradients of steps after which it is not known yet whether the parameters differ where they are used.
    _held: dict[tuple[ModuleKey, int], list[Disagreement]] = field(default_factory=dict)
    _reunited: dict[tuple[ModuleKey, int], ComparedSteps] = field(default_factory=dict)

    def add(self, rank: int, module: ModuleKey, record: RankDigest) -> None:
        part = record.hyper if isinstance(record, DigestRecord) and record.of == _STATE else ""
        optimizer = -1 if record.optimizer is None else record.optimizer
        key = ComparisonKey(module, record.stage, record.of, record.step, optimizer, part)
        if isinstance(record, DigestRecord) and record.of == _PARAMETERS:
            if module not in self.unsampled or self._has_diverged(module):
                for settled in self._use.add(rank, module, key, record):
                    self._compare_pending(settled)
            # Also after a divergence: other ranks may have been read further by then, and jobs average replicas again.
            if record.stage == _USED and module in self.unsampled:
                self._add_unsampled_use(rank, key, record)
            if record.stage == _USED:
                return
        if isinstance(record, DigestRecord) and record.stage == _REWRITTEN:
            self._rewrites.setdefault(key, {})[rank] = record
            return
        if record.stage == _PARAMS:
            self._latest[rank] = record.step
        if record.stage == _APPLIED and isinstance(record, AppliedRecord):
            self._keep_window(key, rank, record)
            if not record.root:
                return
        if self._pending.add(key, module[0], rank, record):
            self._finish(key)
        elif len(self._pending) > MOST_PENDING:
            self._finish(self._pending.oldest())

    def is_undisturbed(self, module: ModuleKey) -> bool:
        """Whether nothing of the module is undecided, so that steps at which ranks agree can be added at once."""
        return module not in self.unsampled and not any(
            key.module == module for keys in (self._rewrites, self._unconfirmed) for key in keys
        )

    def add_agreed(self, module: ModuleKey, steps: Sequence[int], last: Mapping[int, RankDigest]) -> None:
        """Add consecutive steps at which all ranks wrote equal digests. `last`: the records of the last step."""
        record = next(iter(last.values()))
        optimizer = -1 if record.optimizer is None else record.optimizer
        key = ComparisonKey(module, record.stage, record.of, record.step, optimizer)
        stats = self.stats.setdefault((module, key.stage, key.of), ComparisonStats())
        stats.compared += len(steps)
        agreed = stats.agreed.setdefault(optimizer, ComparedSteps())
        for step in steps:
            agreed.add(step)
        for rank, one in last.items():
            if isinstance(one, AppliedRecord):
                self._keep_window(key, rank, one)
            elif key.of == _PARAMETERS:
                for settled in self._use.add(rank, module, key, one):
                    self._compare_pending(settled)
            if key.stage == _PARAMS:
                self._latest[rank] = one.step
        self._note_agreement(key, last)
        if key.of == _PARAMETERS and key.stage in _IN_SERIES:
            self.series.setdefault(module, AgreementSeries()).note_agreement(steps)
        self._use.forget(key)
        if self._held.get((module, optimizer)):
            for step in steps:
                self._release(key._replace(step=step))

    def can_skip(self, module: ModuleKey) -> bool:
        """Whether steps after a divergence may be added with `add_different`."""
        return (
            module not in self.unsampled
            and not any(key.module == module for key in self._rewrites)
            and self._has_diverged(module)
        )

    def add_different(
        self, key: ComparisonKey, steps: Sequence[int], outliers: tuple[int, ...], digests: DigestsOfStep
    ) -> None:
        """Add steps at which a majority of the ranks and `outliers` had different parameters.

        The step before them and the one after them must be such steps too, and be added one by one before: a step
        decides what becomes of the difference of the step before.
        """
        stats = self.stats[key.module, key.stage, key.of]
        stats.compared += len(steps)
        stats.differing += len(steps)
        self.reunions.setdefault(key.module, Reunions()).add_difference()
        self.series.setdefault(key.module, AgreementSeries()).note_difference(steps, outliers, digests)

    def end_rank(self, rank: int) -> None:
        """The rank reports nothing more: comparisons that waited only for it are complete."""
        self.ended.add(rank)
        settled = self._use.end_rank(rank)
        for key in sorted(self._pending.end_rank(rank)):
            self._finish(key)
        for key in settled:
            self._compare_pending(key)

    def end_all(self) -> None:
        """No rank reports anything more."""
        for rank in self.hashes:
            self._use.end_rank(rank)
        for key in sorted(self._pending):
            self._finish(key)
        for key in sorted(self._unconfirmed):
            self._compare_pending(key, complete=True)
        for held in self._held.values():
            for disagreement in held:
                self._count(disagreement)
        self._held.clear()

    def averaged(self, module: ModuleKey) -> bool:
        """Whether replicas train apart and are averaged from time to time: local SGD, written by hand."""
        reunions = self.reunions.get(module)
        return (
            reunions is not None
            and len(reunions.averaged) >= FEWEST_AVERAGINGS
            and self._has_diverged(module)
        )

    def stats_of(self, module: ModuleKey, stage: Stage, of: TensorKind) -> ComparisonStats:
        return self.stats.get((module, stage.value, of.value), ComparisonStats())

    def _finish(self, key: ComparisonKey) -> None:
        reported = self._pending.take(key)
        digests = comparable(reported, self.hashes)
        if key.stage == Stage.PARAMS.value:
            self._compare_rewrites(key, digests)
        if key.of == TensorKind.STATE.value and len(reported) < len(key.module[0]):
            self._keep_partial(Disagreement(key, digests))
        if key.stage == _PARAMS and key.of == _PARAMETERS and len(reported) < len(key.module[0]):
            self._compare_received(key, digests)
        if len(digests) < 2:
            return
        stats = self.stats.setdefault((key.module, key.stage, key.of), ComparisonStats())
        stats.compared += 1
        missing = self._missing(key, reported)
        disagreement = Disagreement(key, digests)
        differ = len({record.root for record in digests.values()}) > 1
        if differ and key.stage == _PARAMS and key.of == _PARAMETERS and key.optimizer >= 0:
            self._unconfirmed[key] = disagreement
            self._compare_pending(key)
            if len(self._unconfirmed) > _MOST_UNCONFIRMED:
                self._compare_pending(min(self._unconfirmed), complete=True)
        elif differ and key.stage == _APPLIED and key.of == _GRADIENTS:
            self._hold(disagreement)
        elif differ:
            self._count(disagreement)
        elif not missing:
            stats.agreed.setdefault(key.optimizer, ComparedSteps()).add(key.step)
            self._note_agreement(key, digests)
        if not differ or key.optimizer < 0:
            self._note_series(key, digests, missing)
            self._use.forget(key)
            self._release(key)
        if key.stage == Stage.PARAMS.value:
            valid = list(
                _digest_records({r: record for r, record in digests.items() if r not in self.impaired})
            )
            if len({record.hyper for record in valid}) > 1:
                self.hyper.setdefault(key.module, disagreement)
            if len({record.forward for record in valid}) > 1:
                self.forwards.setdefault(key.module, disagreement)

    def _compare_received(self, key: ComparisonKey, digests: Mapping[int, RankDigest]) -> None:
        """Compare ranks that step with an optimizer and ranks without one, which receive the result of each step."""
        step = self._partial_steps.setdefault((key.module, key.step), {})
        step.update({rank: record for rank, record in digests.items() if isinstance(record, DigestRecord)})
        if len(step) < len(key.module[0]) or len({record.optimizer is None for record in step.values()}) < 2:
            if len(self._partial_steps) > MOST_PENDING:
                del self._partial_steps[next(iter(self._partial_steps))]
            return
        del self._partial_steps[key.module, key.step]
        result = self.received.setdefault(key.module, [0, 0])
        result[0] += 1
        if len({record.root for record in step.values()}) > 1:
            result[1] += 1
            return
        stats = self.stats.setdefault((key.module, key.stage, key.of), ComparisonStats())
        stats.compared += 1
        self._note_series(key, step, ())

    def _compare_pending(
        self, key: ComparisonKey, complete: bool = False, used: Mapping[int, str] | None = None
    ) -> None:
        """Decide whether ranks that differed after a step still differ where their parameters are used.

        `complete`: nothing more is known of ranks that have not reported it.
        """
        disagreement = self._unconfirmed.get(key)
        if disagreement is None:
            if key not in self._pending:
                self._use.forget(key)
            return
        if used is None and not complete and len(self._use.known(key)) < len(disagreement.digests):
            return
        after_step = {rank: record.root for rank, record in disagreement.digests.items()}
        used = self._use.of(key, after_step) if used is None or not used.keys() >= after_step.keys() else used
        if used is None:
            if not complete:
                return
            used = {**after_step, **{r: root for r, root in self._use.known(key).items() if r in after_step}}
        del self._unconfirmed[key]
        self._use.forget(key)
        digests: Mapping[int, RankDigest] = disagreement.digests
        if len(set(used.values())) == 1:
            self.reunions.setdefault(key.module, Reunions()).add(key.step, after_step, used)
            self._reunited.setdefault((key.module, key.optimizer), ComparedSteps()).add(key.step)
            digests = {rank: replace(record, root=used[rank]) for rank, record in digests.items()}
            stats = self.stats[key.module, key.stage, key.of]
            stats.agreed.setdefault(key.optimizer, ComparedSteps()).add(key.step)
            self._note_agreement(key, digests)
        else:
            self.reunions.setdefault(key.module, Reunions()).add_difference()
            self._count(disagreement)
        self._note_series(key, digests, self._missing(key, digests))
        self._release(key)

    def _add_unsampled_use(self, rank: int, key: ComparisonKey, record: DigestRecord) -> None:
        """Decide about all steps up to a use that every rank of the module has recorded."""
        by_forward = key._replace(optimizer=-1, part=f"{record.forward}")
        used = self._settle_unsampled(rank, key, record.root)
        if used.keys() >= self._unsampled_use.get(by_forward, {rank: ""}).keys():
            self._unsampled_use.pop(by_forward, None)
        else:
            # Ranks that step other parts of the module may step it last with other optimizers.
            self._settle_unsampled(rank, by_forward, record.root, record.forward or 0)

    def _settle_unsampled(
        self, rank: int, key: ComparisonKey, root: str, forward: int = -1
    ) -> dict[int, str]:
        """The digests of all ranks at this use, or nothing if some are missing."""
        used = self._unsampled_use.setdefault(key, {})
        used[rank] = root
        if not used.keys() >= {*key.module[0]} & self.hashes.keys() - self.ended:
            if len(self._unsampled_use) > MOST_PENDING:
                del self._unsampled_use[next(iter(self._unsampled_use))]
            return {}
        del self._unsampled_use[key]
        if forward >= 0:
            self._finish_before(key, forward)
        for open_key in sorted(self._unconfirmed):
            if open_key.module == key.module and open_key.step <= key.step:
                self._compare_pending(open_key, used=used)
        return used

    def _finish_before(self, key: ComparisonKey, forward: int) -> None:
        """Compare steps of optimizers that step the module on some of the ranks only: no other rank reports them."""
        if not self._pending.active(key.module[0]) <= self.hashes.keys():
            return
        parameters = (key.module, _PARAMS, _PARAMETERS)
        for each in [each for each in self._pending if (each.module, each.stage, each.of) == parameters]:
            records = self._pending.reported(each).values()
            # A later step of the same number may still be reported.
            if each.step <= key.step and all((record.forward or 0) <= forward for record in records):
                self._finish(each)

    def _count(self, disagreement: Disagreement) -> None:
        key = disagreement.key
        stats = self.stats[key.module, key.stage, key.of]
        stats.differing += 1
        if stats.first is None or key.step < stats.first.key.step:
            stats.first = disagreement

    def _note_series(
        self, key: ComparisonKey, digests: Mapping[int, RankDigest], missing: Collection[int]
    ) -> None:
        # The ranks of other nodes may leave out steps that those of this node compare.
        left_out = bool(missing) and all(self._latest.get(rank, -1) > key.step for rank in missing)
        if key.of == _PARAMETERS and key.stage in _IN_SERIES and not left_out:
            series = self.series.setdefault(key.module, AgreementSeries())
            roots = {rank: record.root for rank, record in digests.items()}
            series.note(key.step, key.module[0], roots)
            series.differing.note(key.step, list(_digest_records(digests)))

    def _hold(self, disagreement: Disagreement) -> None:
        """Different gradients matter if the parameters differ afterwards. Those of devices may be recorded late."""
        key = disagreement.key
        if key.step in self._reunited.get((key.module, key.optimizer), ()):
            return
        params = self.stats_of(key.module, Stage.PARAMS, TensorKind.PARAMETERS)
        if params.first is not None or key.step in params.agreed.get(key.optimizer, ()):
            self._count(disagreement)
        else:
            self._held.setdefault((key.module, key.optimizer), []).append(disagreement)

    def _release(self, key: ComparisonKey) -> None:
        """The parameters after a step are known to agree or to differ: so do the gradients up to this step."""
        held = self._held.get((key.module, key.optimizer))
        if not held or key.stage != _PARAMS or key.of != _PARAMETERS:
            return
        reunited = key.step in self._reunited.get((key.module, key.optimizer), ())
        for disagreement in held:
            if disagreement.key.step <= key.step and not reunited:
                self._count(disagreement)
        held[:] = [each for each in held if each.key.step > key.step]

    def _missing(self, key: ComparisonKey, reported: Mapping[int, RankDigest]) -> set[int]:
        """Ranks of the module that have records here, but no digest of this comparison."""
        group = key.module[0]
        return set() if len(reported) == len(group) else {*group} & self.hashes.keys() - reported.keys()

    def _note_agreement(self, key: ComparisonKey, digests: Mapping[int, RankDigest]) -> None:
        if key.of == TensorKind.PARAMETERS.value:
            self._agreed[key.module] = next(_digest_records(digests))
            if key.stage == Stage.PARAMS.value and not self._has_diverged(key.module):
                self.windows.forget(key.module, key.step, key.optimizer)
        elif key.stage == Stage.APPLIED.value and not all(map(_is_reduced, digests.values())):
            self.reduced_by_job.add(key.module)

    def _keep_window(self, key: ComparisonKey, rank: int, record: AppliedRecord) -> None:
        """Keep how the gradients of a step came about until the parameters after it are compared."""
        params = self.stats.get((key.module, _PARAMS, TensorKind.PARAMETERS.value))
        if params is not None:
            # Records of a device may arrive after those of the parameters.
            if params.first is not None and key.step > params.first.key.step:
                return
            if not record.root and key.step in params.agreed.get(key.optimizer, ()):
                return
        self.windows.add(key.module, rank, record)

    def _keep_partial(self, disagreement: Disagreement) -> None:
        if len(self.partial_state) < MOST_PARTIAL:
            self.partial_state.append(disagreement)

    def _compare_rewrites(self, key: ComparisonKey, digests: Mapping[int, RankDigest]) -> None:
        """Compare parameters before this step. A rank without a rewrite has the values on which all last agreed."""
        due = sorted(
            before
            for before in self._rewrites
            if (before.module, before.optimizer) == (key.module, key.optimizer) and before.step <= key.step
        )
        for before in due:
            rewrites = self._rewrites.pop(before)
            if key.module in self.rewritten or self._has_diverged(key.module):
                continue
            last = self._agreed.get(key.module)
            # Not every step is digested: the values of a rank without a rewrite are then unknown.
            is_current = last is not None and (last.step == before.step - 1 or last.step < 0)
            current = {rank: rewrites.get(rank, last if is_current else None) for rank in digests}
            known = {rank: record for rank, record in current.items() if record is not None}
            if len({record.root for record in known.values()}) > 1 or len(known) < len(digests):
                disagreement = Disagreement(before, known)
                if is_current or len(known) < len(digests):
                    self.rewritten[key.module] = disagreement
                else:
                    self.rewritten_differently.setdefault(key.module, disagreement)

    def _has_diverged(self, module: ModuleKey) -> bool:
        return self.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS).first is not None


def _digest_records(digests: Mapping[int, RankDigest]) -> Iterator[DigestRecord]:
    return (record for record in digests.values() if isinstance(record, DigestRecord))


def _is_reduced(record: RankDigest) -> bool:
    return not isinstance(record, AppliedRecord) or record.last == SYNCED
