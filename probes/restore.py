"""Compares what was loaded from checkpoints with what modules and optimizers hold when they first train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.checkpoints.tracker import (
    CHECKPOINTS,
    CheckpointFile,
    ModuleLoad,
    OptimizerLoad,
    StoredTensor,
    Target,
)
from ddpcheck.probes.checkpoints.values import (
    SampledValues,
    are_cast,
    are_equal,
    correlation,
    is_distinctive,
    sample_values,
)
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.records.kinds.checkpoints import (
    OptimizerRestoreRecord,
    OptimizerState,
    RestoreRecord,
    StateKind,
)
from ddpcheck.records.kinds.modules import ModuleRole

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

MOST_EXAMPLES = 5
MOST_PENDING = 16


class PendingComparison(NamedTuple):
    """A comparison that is complete when values have arrived from a device."""

    held: SampledValues
    files: list[CheckpointFile]
    finish: Callable[[list[torch.Tensor | None]], None]

    def ready(self) -> bool:
        return self.held.ready() and all(file.ready() for file in self.files)


class RestoreProbe(Probe):
    """Reads a few values of each tensor, at the first forward after a load and at the first step of an optimizer."""

    name = "restore"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        # By module: how many loads there were at its last forward, and how many of them were compared.
        self._seen: dict[int, int] = {}
        self._compared: dict[int, int] = {}
        # By module: the file that most of its tensors came from.
        self._files: dict[int, CheckpointFile] = {}
        self._optimizers: set[int] = set()
        self._stepped = (0, 0)
        self._pending: list[PendingComparison] = []
        # Most jobs load nothing: then these events are left out, until something is loaded.
        self._watches = True
        CHECKPOINTS.on_loaded = self._loaded

    def _loaded(self) -> None:
        if not self._watches:
            self._watches = True
            self.context.call(self, Probe.before_forward, Probe.optimizer_stepped)

    def before_forward(self, tracked: TrackedModule) -> None:
        if self._seen.get(tracked.index) == CHECKPOINTS.loads:
            return
        self._seen[tracked.index] = CHECKPOINTS.loads
        loads = CHECKPOINTS.modules[self._compared.get(tracked.index, 0) :]
        self._compared[tracked.index] = len(CHECKPOINTS.modules)
        if loads and tracked.role is ModuleRole.DDP:
            self._compare_module(tracked, loads)

    def _compare_module(self, tracked: TrackedModule, loads: list[ModuleLoad]) -> None:
        slots = [*tracked.parameters, *(tracked.buffers[index] for index in tracked.checkpointed_buffers())]
        tensors = tracked.tensors(slots)
        names = {id(tensor): slot.name for slot, tensor in zip(slots, tensors, strict=True)}
        loaded: dict[int, tuple[Target, ModuleLoad]] = {}
        misnamed: dict[int, tuple[Target, ModuleLoad]] = {}
        for load in loads:
            for targets, kept in ((load.loaded_into(tensors), loaded), (load.misnamed, misnamed)):
                for target in targets:
                    key = id(target.ref())
                    if key in names:
                        kept[key] = (target, load)
        files = {target.stored.file.number: target.stored.file for target, _ in loaded.values()}
        files.update((target.stored.file.number, target.stored.file) for target, _ in misnamed.values())
        if not files:
            return
        for number, file in files.items():
            of_file = sum(target.stored.file.number == number for target, _ in loaded.values())
            if 2 * of_file >= len(tensors):
                self._files[tracked.index] = file
        # Weights that are exchanged for an evaluation change again: values are only known to stay at the start.
        first = not tracked.forwards
        module, step, order = tracked.index, tracked.steps, [id(tensor) for tensor in tensors]

        def finish(held: list[torch.Tensor | None]) -> None:
            values = dict(zip(order, held, strict=True))
            for file in files.values():
                comparison = ModuleComparison(file, names, values)
                comparison.compare(loaded, misnamed, first)
                if first:
                    comparison.find_left(loaded.keys() | misnamed.keys())
                self.context.write(comparison.record(module, step))

        self._add(PendingComparison(sample_values(tensors), list(files.values()), finish))

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        if self._pending:
            self._drain()
        if optimizer.index in self._optimizers:
            return
        loaded = bool(CHECKPOINTS.files or CHECKPOINTS.optimizers)
        if not loaded and not optimizer.steps:
            # torch.distributed.checkpoint fills a state that there is: programs step once before they load.
            return
        self._optimizers.add(optimizer.index)
        torch_optimizer = optimizer.ref()
        modules = [tracked for tracked in optimizer.modules if tracked.role is ModuleRole.DDP]
        if torch_optimizer is not None and modules and loaded:
            self._compare_optimizer(optimizer, torch_optimizer, modules)

    def _compare_optimizer(
        self,
        optimizer: TrackedOptimizer,
        torch_optimizer: torch.optim.Optimizer,
        modules: list[TrackedModule],
    ) -> None:
        file = self._files.get(modules[0].index)
        load = _load_of(torch_optimizer)
        state = OptimizerState.OTHER if any(torch_optimizer.state.values()) else OptimizerState.EMPTY
        if load is not None:
            state = OptimizerState.LOADED
        elif state is OptimizerState.EMPTY:
            load = _load_elsewhere(torch_optimizer)
            state = OptimizerState.ELSEWHERE if load is not None else state
        contents = load.contents if load is not None else None
        asked = next((each for each in reversed(CHECKPOINTS.files) if each.not_requested), None)
        if asked is not None and not optimizer.steps and not any(torch_optimizer.state.values()):
            self.context.write(
                OptimizerRestoreRecord(
                    optimizer=optimizer.index,
                    module=modules[0].index,
                    step=0,
                    file=asked.path,
                    state=OptimizerState.NOT_REQUESTED.value,
                    name=optimizer.name,
                    where=asked.where,
                    entries=asked.not_requested,
                )
            )
            return
        if contents is None and file is not None and state is OptimizerState.EMPTY and not optimizer.steps:
            missed = [each for each in file.optimizers if each.entries]
            loaded_since = any(load.files >= file.number for load in CHECKPOINTS.optimizers)
            contents = missed[0] if missed and not loaded_since else None
        if contents is None or not contents.entries:
            return
        since = CHECKPOINTS.files.index(file) if file in CHECKPOINTS.files else 0
        settings = {name for group in torch_optimizer.param_groups for name in group}
        record = OptimizerRestoreRecord(
            optimizer=optimizer.index,
            module=modules[0].index,
            step=optimizer.steps,
            file=file.path if file is not None else "",
            state=state.value,
            name=optimizer.name,
            where=load.where if load is not None else file.where if file is not None else "",
            entries=contents.entries,
            # A scheduler adds the initial learning rate.
            same_settings=settings - {"initial_lr"} == contents.settings - {"initial_lr"},
            resumed=sorted({kind.value for kind, files in CHECKPOINTS.restored if files > since}),
        )
        if state is not OptimizerState.LOADED or load is None:
            self.context.write(record)
            return
        if file is not None:
            # What else the file has, and the job uses and did not load.
            used = {
                StateKind.SCHEDULER: torch_compat.has_scheduler(torch_optimizer),
                StateKind.SCALER: optimizer.scaled,
                StateKind.RNG: True,
            }
            left = [kind.value for kind, is_used in used.items() if is_used and kind in file.holds]
            record = replace(record, not_restored=[kind for kind in left if kind not in record.resumed])
        self._compare_loaded(record, load, torch_optimizer, modules)

    def _compare_loaded(
        self,
        record: OptimizerRestoreRecord,
        load: OptimizerLoad,
        optimizer: torch.optim.Optimizer,
        modules: list[TrackedModule],
    ) -> None:
        """The state was loaded: as it was, and for parameters that were loaded too?"""
        parameters = [tensor for tracked in modules for tensor in tracked.tensors(tracked.parameters)]
        stored = {
            id(target.ref()): target.stored
            for each in CHECKPOINTS.modules
            for target in each.loaded_into(parameters)
        }
        narrowed = [
            (parameter, name, before, now)
            for ref, name, before, now in load.narrowed
            if (parameter := ref()) is not None
        ]
        if narrowed:
            _, name, before, now = narrowed[0]
            kept = [stored.get(id(parameter)) for parameter, *_ in narrowed]
            record = replace(
                record,
                cast=len(narrowed),
                cast_example=[name, _type(before), _type(now)],
                weights_cast=any(
                    each is None or each.dtype.itemsize > parameter.dtype.itemsize
                    for each, (parameter, *_) in zip(kept, narrowed, strict=True)
                ),
            )
        record = replace(record, rounded=_rounded(load, optimizer, stored))
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if optimizer.state.get(parameter)
        ]
        names = {
            id(tensor): slot.name
            for tracked in modules
            for slot, tensor in zip(tracked.parameters, tracked.tensors(tracked.parameters), strict=True)
        }
        labels = [names.get(id(parameter), f"parameter {n}") for n, parameter in enumerate(parameters)]
        # Loaded by load_state_dict: what it is now was compared at the forward.
        known = [id(parameter) in stored for parameter in parameters]
        files = list(CHECKPOINTS.files)

        def finish(held: list[torch.Tensor | None]) -> None:
            contents = FileValues(files)
            matched, fresh = 0, []
            for label, values, is_known in zip(labels, held, known, strict=True):
                if is_known or (values is not None and contents.hold(values)):
                    matched += 1
                elif is_distinctive(values):
                    fresh.append(label)
            self.context.write(
                replace(record, found=matched, fresh=len(fresh), fresh_examples=fresh[:MOST_EXAMPLES])
            )

        self._add(PendingComparison(sample_values(parameters), files, finish))

    def optimizer_stepped(
        self, optimizer: torch.optim.Optimizer, signature: tuple[int, ...], modules: object
    ) -> None:
        """An optimizer that steps uses the state that was loaded into it."""
        if not CHECKPOINTS.loads:
            self._watches = False
            self.context.stop_calling(self, Probe.before_forward, Probe.optimizer_stepped)
            return
        key = (id(optimizer), len(CHECKPOINTS.optimizers))
        if key == self._stepped:
            return
        self._stepped = key
        for load in CHECKPOINTS.optimizers:
            load.stepped = load.stepped or load.optimizer() is optimizer

    def before_exit(self) -> None:
        self._drain(wait=True)

    def _add(self, comparison: PendingComparison) -> None:
        if comparison.ready():
            comparison.finish(comparison.held.result())
        elif len(self._pending) < MOST_PENDING:
            self._pending.append(comparison)

    def _drain(self, wait: bool = False) -> None:
        """Finish what has arrived; never waits in the training loop."""
        while self._pending and (wait or self._pending[0].ready()):
            comparison = self._pending.pop(0)
            comparison.finish(comparison.held.result())


class ModuleComparison:
    """The tensors of a module against those of one file."""

    def __init__(
        self, file: CheckpointFile, names: dict[int, str], held: dict[int, torch.Tensor | None]
    ) -> None:
        self._file, self._names, self._held = file, names, held
        self._where = file.where
        self._equal: list[tuple[int, StoredTensor]] = []
        self._cast: list[StoredTensor] = []
        self._cast_types: list[str] = []
        self._changed: list[str] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._misnamed: list[list[str]] = []
        self._left: list[str] = []

    def compare(
        self,
        loaded: dict[int, tuple[Target, ModuleLoad]],
        misnamed: dict[int, tuple[Target, ModuleLoad]],
        first: bool,
    ) -> None:
        for key, (target, load) in loaded.items():
            if target.stored.file is self._file:
                self._where = load.where
                self._compare(key, target.stored, first)
        for key, (target, load) in misnamed.items():
            stored, held = target.stored.values(), self._held[key]
            if target.stored.file is not self._file or key in loaded or stored is None or held is None:
                continue
            if not (are_equal(stored, held) or are_cast(stored, held)):
                self._where = load.where
                self._misnamed.append([target.name, self._names[key]])

    def _compare(self, key: int, source: StoredTensor, first: bool) -> None:
        stored, held = source.values(), self._held[key]
        if stored is None or held is None:
            return
        if are_equal(stored, held):
            self._equal.append((key, source))
        elif are_cast(stored, held):
            self._equal.append((key, source))
            self._cast.append(source)
            self._cast_types = self._cast_types or [_type(source.dtype), _type(held.dtype)]
        elif first:
            self._changed.append(self._names[key])
            if is_distinctive(stored) and is_distinctive(held):
                self._pairs.append((stored, held))

    def find_left(self, known: Collection[int]) -> None:
        """Tensors that were not loaded, although the file has others for them: buffers, a layer."""
        prefixes = self._usual_prefixes()
        if prefixes is None:
            return
        in_file, in_module = prefixes
        states = Counter(source.state for _, source in self._equal)
        in_state = self._file.by_name(states.most_common(1)[0][0])
        for key, name in self._names.items():
            if key in known or not name.startswith(in_module):
                continue
            own, held = in_state.get(in_file + name[len(in_module) :]), self._held[key]
            stored = own.values() if own is not None else None
            if own is None or stored is None or held is None or stored.shape != held.shape:
                continue
            if not (are_equal(stored, held) or are_cast(stored, held)):
                self._left.append(name)

    def _usual_prefixes(self) -> tuple[str, str] | None:
        """What most names begin with in the file and in the module, without what they have in common."""
        prefixes = Counter(_prefixes(source.name, self._names[key]) for key, source in self._equal)
        return prefixes.most_common(1)[0][0] if prefixes else None

    def _swapped(self) -> list[list[str]]:
        """Tensors that have the values of another name, where the file has their own name too."""
        named = [(self._names[key], source) for key, source in self._equal]
        prefixes = self._usual_prefixes()
        if prefixes is None:
            return []
        in_file, in_module = prefixes
        by_state: dict[str, dict[str, StoredTensor]] = {}
        swapped = []
        for name, source in named:
            if not name.startswith(in_module):
                continue
            expected = in_file + name[len(in_module) :]
            if source.name == expected:
                continue
            names = by_state.setdefault(source.state, self._file.by_name(source.state))
            own = names.get(expected)
            if own is None or own.shape != source.shape:
                continue
            own_values, values = own.values(), source.values()
            if own_values is None or values is None or are_equal(own_values, values):
                continue
            swapped.append([source.name, name])
        return swapped

    def record(self, module: int, step: int) -> RestoreRecord:
        swapped = self._swapped()
        since = CHECKPOINTS.files.index(self._file) if self._file in CHECKPOINTS.files else 0
        loaded = {kind.value for kind, files in CHECKPOINTS.restored if files > since}
        if any(load.files > since for load in CHECKPOINTS.optimizers):
            loaded.add(StateKind.OPTIMIZER.value)
        related = correlation(self._pairs)
        return RestoreRecord(
            module=module,
            step=step,
            file=self._file.path,
            where=self._where,
            holds=sorted(kind.value for kind in self._file.holds),
            loaded=sorted(loaded),
            tensors=len(self._names),
            equal=len(self._equal),
            cast=len(self._cast),
            cast_types=self._cast_types,
            changed=len(self._changed),
            changed_example=self._changed[0] if self._changed else "",
            correlation=None if related is None else round(related, 3),
            misnamed=len(self._misnamed),
            misnamed_example=self._misnamed[0] if self._misnamed else [],
            swapped=len(swapped),
            swapped_examples=swapped[:MOST_EXAMPLES],
            left=len(self._left),
            left_examples=self._left[:MOST_EXAMPLES],
        )


class FileValues:
    """Looks up values in all files, as they are stored or converted to another dtype."""

    def __init__(self, files: list[CheckpointFile]) -> None:
        self._stored = [values for file in files for values in file.values if values is not None]
        self._keys: dict[torch.dtype, set[tuple[torch.Size, bytes]]] = {}

    def hold(self, values: torch.Tensor) -> bool:
        keys = self._keys.get(values.dtype)
        if keys is None:
            keys = self._keys[values.dtype] = {
                _key(stored.to(values.dtype)) for stored in self._stored if stored.is_floating_point()
            }
        return _key(values) in keys


def _key(values: torch.Tensor) -> tuple[torch.Size, bytes]:
    return values.shape, bytes(values.contiguous().reshape(-1).view(torch.uint8).tolist())


def _load_of(optimizer: torch.optim.Optimizer) -> OptimizerLoad | None:
    """The last load of a state into this optimizer."""
    loads = [load for load in CHECKPOINTS.optimizers if load.optimizer() is optimizer]
    return loads[-1] if loads else None


def _load_elsewhere(optimizer: torch.optim.Optimizer) -> OptimizerLoad | None:
    """A load into another optimizer that never stepped, of the same parameters or of a copy of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for load in reversed(CHECKPOINTS.optimizers):
        if load.stepped or not load.contents.entries:
            continue
        alive = {key: ref() for key, ref in load.parameters.items()}
        same = sum(alive.get(id(parameter)) is parameter for parameter in parameters)
        replaced = not any(parameter is not None for parameter in alive.values())
        if 2 * same > len(parameters) or (replaced and load.contents.sizes == len(parameters)):
            return load
    return None


def _rounded(
    load: OptimizerLoad, optimizer: torch.optim.Optimizer, stored: dict[int, StoredTensor]
) -> list[str]:
    """The dtypes in the file, if it holds most weights with fewer bits than their states, and than they have now."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    widest = max(load.contents.dtypes.values(), key=lambda dtype: dtype.itemsize, default=None)
    sources = [(stored.get(id(parameter)), parameter) for parameter in parameters]
    narrow = [
        source
        for source, parameter in sources
        if source is not None
        and widest is not None
        and source.dtype.is_floating_point
        and source.dtype.itemsize < min(parameter.dtype.itemsize, widest.itemsize)
    ]
    if widest is None or 2 * len(narrow) <= len(parameters):
        return []
    return [_type(narrow[0].dtype), _type(widest)]


def _prefixes(stored: str, held: str) -> tuple[str, str]:
    """What is left of two names without their common end."""
    one, other = stored.split("."), held.split(".")
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
    return ".".join([*one, ""]) if one else "", ".".join([*other, ""]) if other else ""


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
