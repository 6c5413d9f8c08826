"""Observes loads and saves of checkpoints in this process: which tensors came from which file, and where they went.

A process may load before it is a rank, so this begins when torch is imported. Files are looked into when they are
loaded; what a module or an optimizer holds is compared later, by a probe. No tensor of the program is kept alive.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcheck.guard import GUARD
from ddpcheck.patches import Patches, calling, hide_from_compiler, returning
from ddpcheck.privacy import mask_text
from ddpcheck.probes.checkpoints.contents import (
    FoundState,
    OptimizerContents,
    find_states,
    named_tensors,
)
from ddpcheck.probes.checkpoints.formats import METADATA, FormatObserver, LoadPlan, kinds_of
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.checkpoints import StateKind

if TYPE_CHECKING:
    from ddpcheck.probes.checkpoints.values import SampledValues

# Limits for programs that load their data with torch.load, or a checkpoint again and again.
MOST_LOADS = 256
MOST_FILES = 32
MOST_MODULE_LOADS = 64
MOST_OPTIMIZER_LOADS = 64
# Tensors of a state dict that are looked up to see whether it came from a file.
MOST_LOOKED_UP = 8
# Levels of names that wrappers add: `module.`, `_orig_mod.module.`, `state_dict.model.`.
MOST_PREFIXES = 3


class StoredTensor:
    """A tensor of a loaded file. `index` is its position among the sampled values of the file."""

    __slots__ = ("dtype", "file", "index", "name", "ref", "shape", "state")

    def __init__(self, file: CheckpointFile, state: str, index: int, name: str, tensor: torch.Tensor) -> None:
        # `state`: the keys that lead to its state dict.
        self.file, self.state, self.index, self.name = file, state, index, name
        self.ref = weakref.ref(tensor)
        self.dtype, self.shape = tensor.dtype, tensor.shape

    def values(self) -> torch.Tensor | None:
        return self.file.values[self.index]


class CheckpointFile:
    """What `torch.load` returned, or another format: `plan` is the load of a distributed checkpoint."""

    def __init__(
        self, number: int, path: str, states: list[FoundState], plan: LoadPlan | None = None
    ) -> None:
        # Not at the top: it needs more of torch than there is when this module is imported.
        from ddpcheck.probes.checkpoints.values import sample_values

        self.number = number
        self.path = mask_text(path)
        self.where = user_callsite()
        self.key = file_key(path if plan is None else os.path.join(path, METADATA) if path else "")
        self.holds = {entry.kind for entry in states}
        self.optimizers = [
            OptimizerContents(entry.state) for entry in states if entry.kind is StateKind.OPTIMIZER
        ]
        # Parameters with a state in the distributed checkpoint, which was not asked for: nothing was loaded.
        self.not_requested = 0
        if plan is not None:
            self.not_requested = max(
                (
                    plan.optimizer_entries(entry.path)
                    for entry in states
                    if entry.kind is StateKind.OPTIMIZER and not entry.state["state"]
                ),
                default=0,
            )
        self.tensors: list[StoredTensor] = []
        tensors: list[torch.Tensor] = []
        for entry in states:
            if entry.kind is StateKind.MODEL:
                for name, tensor in named_tensors(entry.state).items():
                    stored = StoredTensor(self, entry.path, len(tensors), name, tensor)
                    if plan is not None:
                        # It was converted when it was copied into the tensor of the program.
                        path_of_tensor = f"{entry.path}.{name}" if entry.path else name
                        stored.dtype = plan.dtype(path_of_tensor) or stored.dtype
                    self.tensors.append(stored)
                    tensors.append(tensor)
        self._sampled: SampledValues = sample_values(tensors)

    def by_name(self, state: str) -> dict[str, StoredTensor]:
        return {stored.name: stored for stored in self.tensors if stored.state == state}

    def ready(self) -> bool:
        return self._sampled.ready()

    @property
    def values(self) -> list[torch.Tensor | None]:
        return self._sampled.result()


class FilledMemory:
    """Memory that a load has filled. While this exists, no other storage has its identity; its memory is not kept."""

    __slots__ = ("_offset", "_storage", "stored")

    def __init__(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        self._storage, self._offset = _weak_storage(tensor), int(tensor.storage_offset())
        self.stored = stored

    def key(self) -> tuple[int, int] | None:
        return None if self._storage.expired() else (self._storage.cdata, self._offset)


def memory_key(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Identifies the memory of a tensor among those that exist; None for a tensor without a storage of its own."""
    # Subclasses may hide their data.
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return _weak_storage(tensor).cdata, int(tensor.storage_offset())


def _weak_storage(tensor: torch.Tensor) -> Any:
    # Not at the top: it needs more of torch than there is when this module is imported.
    from torch.multiprocessing import reductions

    return reductions.StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class Target(NamedTuple):
    """A tensor of a module that a state dict has, or should have had, a value for."""

    ref: weakref.ref[torch.Tensor]
    # In the state dict.
    name: str
    stored: StoredTensor


class ModuleLoad(NamedTuple):
    """One call of `Module.load_state_dict` with tensors of a file, or a load into tensors of the program."""

    file: CheckpointFile
    where: str
    loaded: list[Target]
    # Tensors that were not loaded, although the state dict has them under a name with or without a prefix.
    misnamed: list[Target]
    # Memory that was filled in place. Whose it is shows when a module is used.
    filled: Sequence[FilledMemory] = ()

    def loaded_into(self, tensors: Sequence[torch.Tensor]) -> list[Target]:
        """The targets among these tensors."""
        targets = list(self.loaded)
        if self.filled:
            by_memory = {key: filled.stored for filled in self.filled if (key := filled.key()) is not None}
            for tensor in tensors:
                key = memory_key(tensor)
                stored = by_memory.get(key) if key is not None else None
                if stored is not None and stored.shape == tensor.shape:
                    targets.append(Target(weakref.ref(tensor), stored.name, stored))
        return targets


class OptimizerLoad:
    """One call of `Optimizer.load_state_dict`."""

    def __init__(self, optimizer: torch.optim.Optimizer, contents: OptimizerContents, number: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.contents = contents
        # How many files had been loaded before.
        self.files = number
        self.where = user_callsite()
        self.stepped = False
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.parameters = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        # States that have fewer bits now: name, dtype in the file, dtype now; and the parameter's own dtype.
        self.narrowed: list[tuple[weakref.ref[torch.Tensor], str, torch.dtype, torch.dtype]] = []
        for (position, name), before in contents.dtypes.items():
            if position >= len(parameters):
                continue
            parameter = parameters[position]
            now = getattr(optimizer.state.get(parameter, {}).get(name), "dtype", before)
            if now.is_floating_point and now.itemsize < before.itemsize:
                self.narrowed.append((weakref.ref(parameter), name, before, now))


class CheckpointTracker:
    """Keeps a bounded list of files and of what was loaded from them; one per process."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._formats = FormatObserver(self._patches, self._loaded, self._plan_loaded, self._folder_saved)
        self._rest_patched = False
        self._rng_patched = False
        self._examined = 0
        self._off = False
        # How often anything was loaded from a file: changes only then.
        self.loads = 0
        self.files: list[CheckpointFile] = []
        self.modules: list[ModuleLoad] = []
        self.optimizers: list[OptimizerLoad] = []
        # Schedulers and scalers that were restored, with the number of files loaded before.
        self.restored: list[tuple[StateKind, int]] = []
        self._stored: dict[int, StoredTensor] = {}
        # Called after a checkpoint was saved, with the path and the kinds of its states.
        self.on_saved: Callable[[str, set[StateKind]], None] | None = None
        # Called after anything was loaded.
        self.on_loaded: Callable[[], None] | None = None
        GUARD.early.add("checkpoints")

    def install(self) -> None:
        """Called while torch is imported: the rest is patched when something is loaded or saved."""
        loaded = GUARD.protect("checkpoints", "loaded", self._loaded)
        saved = GUARD.protect("checkpoints", "saved", self._saved)
        module_loaded = GUARD.protect("checkpoints", "module_loaded", self._module_loaded)
        for owner in (sys.modules["torch.serialization"], torch):
            self._patches.replace(owner, "load", lambda original: returning(original, loaded))
            self._patches.replace(owner, "save", lambda original: calling(original, None, saved))
        modules = sys.modules["torch.nn.modules.module"].Module
        self._patches.replace(
            modules, "load_state_dict", lambda original: calling(original, None, module_loaded)
        )

    def remove(self) -> None:
        """Remove all patches, also from the names that torch imported from a patched module."""
        self._formats.remove()
        for name in ("load", "save", "set_rng_state"):
            self._patches.unbind(torch, name)
        self._patches.remove()

    def switch_off(self) -> None:
        """In a process that is no rank, such as a worker of a data loader."""
        self._off = True

    def patch_formats(self) -> None:
        """Called when the process becomes a rank: patch the libraries of other formats, now or when imported."""
        if not self._off:
            self._formats.install()

    def patch_optimizers(self) -> None:
        """Patch what torch imports later than its modules. Some schedulers do not call the method they override."""
        if self._rest_patched:
            return
        self._rest_patched = True
        from torch.optim import Optimizer, lr_scheduler

        optimizer_loaded = GUARD.protect("checkpoints", "optimizer_loaded", self._optimizer_loaded)
        self._patches.replace(
            Optimizer, "load_state_dict", lambda original: calling(original, None, optimizer_loaded)
        )
        schedulers = [
            value
            for value in vars(lr_scheduler).values()
            if isinstance(value, type) and "load_state_dict" in vars(value)
        ]
        for owner in schedulers:
            self._observe_restore(owner, "load_state_dict", StateKind.SCHEDULER)
        scaler = getattr(sys.modules.get("torch.amp.grad_scaler"), "GradScaler", None)
        if scaler is not None:
            self._observe_restore(scaler, "load_state_dict", StateKind.SCALER)

    def _observe_restore(self, owner: Any, name: str, kind: StateKind) -> None:
        def restored(*args: Any, **kwargs: Any) -> None:
            if len(self.restored) < MOST_OPTIMIZER_LOADS and self.files:
                self.restored.append((kind, len(self.files)))

        guarded = hide_from_compiler(GUARD.protect("checkpoints", f"{kind.value}_loaded", restored))
        self._patches.replace(owner, name, lambda original: calling(original, None, guarded))

    def _loaded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self._add_file(result, path_of(args[0] if args else kwargs.get("f")))

    def _plan_loaded(self, plan: LoadPlan, path: str) -> None:
        file = self._add_file(plan.requested, path, plan)
        if file is None or len(self.modules) >= MOST_MODULE_LOADS:
            return
        filled = [
            FilledMemory(tensor, stored)
            for stored in file.tensors
            if (tensor := stored.ref()) is not None and memory_key(tensor) is not None
        ]
        if filled:
            self.modules.append(ModuleLoad(file, file.where, [], [], filled))
            self._count_load()

    def _add_file(self, result: Any, path: str, plan: LoadPlan | None = None) -> CheckpointFile | None:
        if self._off or self._examined >= MOST_LOADS:
            return None
        self._examined += 1
        states = find_states(result)
        if not states:
            return None
        self.patch_optimizers()
        if len(self.files) >= MOST_FILES:
            self._forget()
        loaded = CheckpointFile(self._examined, path, states, plan)
        if StateKind.RNG in loaded.holds and not self._rng_patched:
            self._rng_patched = True
            for owner in (torch, torch.random):
                self._observe_restore(owner, "set_rng_state", StateKind.RNG)
        self.files.append(loaded)
        for stored in loaded.tensors:
            self._stored[id(stored.ref())] = stored
        return loaded

    def _forget(self) -> None:
        """Forget the oldest file from which nothing was loaded, such as a file of samples."""
        used = {load.file.number for load in self.modules}
        oldest = next((file for file in self.files if file.number not in used), self.files[0])
        self.files.remove(oldest)
        self._stored = {key: stored for key, stored in self._stored.items() if stored.file is not oldest}

    def stored(self, tensor: Any) -> StoredTensor | None:
        """The tensor of a file that is this very object."""
        known = self._stored.get(id(tensor))
        return known if known is not None and known.ref() is tensor else None

    def _saved(self, thing: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._off or self.on_saved is None:
            return
        path = path_of(args[0] if args else kwargs.get("f"))
        kinds = {entry.kind for entry in find_states(thing)}
        if path and kinds:
            self.on_saved(path, kinds)

    def _folder_saved(self, thing: Any, path: str) -> None:
        if self._off or self.on_saved is None:
            return
        kinds = {entry.kind for entry in find_states(thing)} | kinds_of(thing)
        if path and kinds:
            self.on_saved(os.path.join(path, METADATA), kinds)

    def _module_loaded(self, module: torch.nn.Module, state_dict: Any = None, *_: Any, **__: Any) -> None:
        if self._off or not self._stored or len(self.modules) >= MOST_MODULE_LOADS:
            return
        if not isinstance(state_dict, dict):
            return
        named = _with_nested(state_dict)
        # Called at every step by programs that copy one module to another: most state dicts came from no file.
        if not any(map(self.stored, list(named.values())[:MOST_LOOKED_UP])):
            return
        sources = {
            name: stored for name, tensor in named.items() if (stored := self.stored(tensor)) is not None
        }
        targets: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        targets.update(module.named_buffers(remove_duplicate=False))
        loaded = [
            Target(weakref.ref(targets[name]), name, stored)
            for name, stored in sources.items()
            if name in targets
        ]
        unknown = {name: stored for name, stored in sources.items() if name not in targets}
        missing = {
            name: tensor for name, tensor in targets.items() if name not in state_dict and tensor.numel()
        }
        misnamed = [
            Target(weakref.ref(missing[target]), name, unknown[name])
            for target, name in _by_prefix(unknown, missing, bare=bool(loaded))
        ]
        file = next(iter(sources.values())).file
        self.modules.append(ModuleLoad(file, user_callsite(), loaded, misnamed))
        self._count_load()

    def _optimizer_loaded(self, optimizer: torch.optim.Optimizer, state_dict: Any, *_: Any) -> None:
        if self._off or len(self.optimizers) >= MOST_OPTIMIZER_LOADS or not isinstance(state_dict, dict):
            return
        contents = OptimizerContents(state_dict)
        self.optimizers.append(OptimizerLoad(optimizer, contents, len(self.files)))
        self._count_load()

    def _count_load(self) -> None:
        self.loads += 1
        if self.on_loaded is not None:
            self.on_loaded()


def _with_nested(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict; if it is a whole checkpoint, those of the state dicts in it."""
    named = named_tensors(state_dict)
    for key, value in state_dict.items():
        if isinstance(value, dict) and "param_groups" not in value:
            named.update(named_tensors(value, f"{key}."))
    return named


def _by_prefix(
    unknown: dict[str, StoredTensor], missing: dict[str, torch.Tensor], bare: bool
) -> list[tuple[str, str]]:
    """Pairs of a missing and an unknown name of tensors of one shape: they differ by one prefix, the same for all.

    `bare`: one of the two names has no prefix at all. A new head may have the shapes of the old one under another name.
    """
    by_rest: dict[str, list[tuple[str, str]]] = {}
    for name in missing:
        for prefix, rest in _splits(name):
            by_rest.setdefault(rest, []).append((prefix, name))
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, stored in unknown.items():
        for prefix, rest in _splits(name):
            for other, missing_name in by_rest.get(rest, ()):
                if bare and prefix and other:
                    continue
                if missing[missing_name].shape == stored.shape:
                    pairs.setdefault((prefix, other), []).append((missing_name, name))
    return max(pairs.values(), key=len, default=[])


def _splits(name: str) -> list[tuple[str, str]]:
    parts = name.split(".")
    return [
        (".".join(parts[:count]), ".".join(parts[count:]))
        for count in range(min(len(parts), MOST_PREFIXES + 1))
    ]


def path_of(file: Any) -> str:
    """The full path of a file or of an open file; empty for anything else."""
    path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.path.abspath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else ""


def file_key(path: str) -> str:
    """Identifies a file that was not written again since, also after it was renamed; empty if there is none."""
    try:
        status = os.stat(path) if path else None
    except OSError:
        return ""
    return f"{status.st_size:x}-{status.st_mtime_ns:x}" if status is not None else ""


CHECKPOINTS = CheckpointTracker()
