"""Observes checkpoints in other formats than that of `torch.save`: safetensors and torch.distributed.checkpoint.

Programs import these libraries after torch, and often by name, so what is patched is what their functions look up when
they are called. They are patched when a process group is created, or when they are imported after that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ddpcheck.guard import GUARD
from ddpcheck.injection import DdpImportFinder
from ddpcheck.patches import Patches, calling, returning
from ddpcheck.records.kinds.checkpoints import StateKind

SAFETENSORS = "safetensors.torch"
DISTRIBUTED = "torch.distributed.checkpoint"
# The file in the folder of a distributed checkpoint that says what is in it: written last.
METADATA = ".metadata"

# Called with the tensors by name and the path of a file.
FileLoaded = Callable[[dict[str, Any], str], None]


class LoadPlan:
    """A load of a distributed checkpoint: what was asked for, and what there is."""

    def __init__(self, requested: dict[str, Any], metadata: Any) -> None:
        # Filled in place while it is loaded.
        self.requested = requested
        stored = getattr(metadata, "state_dict_metadata", None)
        self._stored: Mapping[str, Any] = stored if isinstance(stored, Mapping) else {}

    def dtype(self, path: str) -> torch.dtype | None:
        """The dtype of a tensor in the checkpoint."""
        dtype = getattr(getattr(self._stored.get(path), "properties", None), "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else None

    def optimizer_entries(self, path: str) -> int:
        """How many parameters have a state, with a value per element, in the checkpoint's optimizer at `path`."""
        prefix = f"{path}.state." if path else "state."
        return len(
            {
                name.rpartition(".")[0]
                for name, entry in self._stored.items()
                if isinstance(name, str)
                and name.startswith(prefix)
                and len(getattr(entry, "size", ()))
                and self.dtype(name) is not None
            }
        )


# Called with a plan that was carried out, and the path of the checkpoint.
PlanLoaded = Callable[[LoadPlan, str], None]
Saved = Callable[[Any, str], None]


class FormatObserver:
    """Patches the libraries that are imported, and waits for the others."""

    def __init__(self, patches: Patches, loaded: FileLoaded, planned: PlanLoaded, saved: Saved) -> None:
        self._patches = patches
        self._plan: LoadPlan | None = None
        self._plan_loaded = planned
        self._finder: LaterImports | None = None
        protect = GUARD.protect
        self._file_loaded = protect("checkpoints", "tensors_loaded", loaded)
        self._load_planned = protect("checkpoints", "load_planned", self._planned)
        self._load_done = protect("checkpoints", "plan_loaded", self._loaded)
        self._saved = protect("checkpoints", "folder_saved", saved)

    def install(self) -> None:
        """Repeated calls have no effect."""
        patches = {SAFETENSORS: self._patch_safetensors, DISTRIBUTED: self._patch_distributed}
        later: dict[str, Callable[[], object]] = {}
        for name, patch in patches.items():
            if name in sys.modules:
                patch()
            else:
                later[name] = GUARD.protect("checkpoints", "imported", patch)
        if later and self._finder is None:
            self._finder = LaterImports(later)
            sys.meta_path.insert(0, self._finder)

    def remove(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None

    def _patch_safetensors(self) -> None:
        # `load_file` and `load_model` call it.
        self._patches.replace(sys.modules[SAFETENSORS], "safe_open", self._opening)

    def _opening(self, original: Any) -> Callable[..., Any]:
        def safe_open(*args: Any, **kwargs: Any) -> Any:
            path = args[0] if args else kwargs.get("filename")
            return ObservedFile(original(*args, **kwargs), path, self._file_loaded)

        return safe_open

    def _patch_distributed(self) -> None:
        package = sys.modules[DISTRIBUTED]
        planner = getattr(sys.modules.get(f"{DISTRIBUTED}.default_planner"), "DefaultLoadPlanner", None)
        if planner is None:
            return
        self._patches.replace(
            planner, "set_up_planner", lambda original: calling(original, self._load_planned, None)
        )
        for name, after in (("load", self._load_done), ("save", self._folder_saved)):
            for owner in (package, sys.modules.get(getattr(getattr(package, name, None), "__module__", ""))):
                if owner is not None:
                    self._patches.replace(owner, name, _then(after))

    def _planned(self, planner: Any, state_dict: Any, metadata: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(state_dict, dict):
            self._plan = LoadPlan(state_dict, metadata)

    def _loaded(self, _: Any, *args: Any, **kwargs: Any) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            self._plan_loaded(plan, _folder(kwargs, "storage_reader"))

    def _folder_saved(self, _: Any, *args: Any, **kwargs: Any) -> None:
        self._saved(args[0] if args else kwargs.get("state_dict"), _folder(kwargs, "storage_writer"))


def _then(after: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: returning(original, after)


def _folder(arguments: Mapping[str, Any], storage: str) -> str:
    """The folder of a distributed checkpoint; empty if it is not in a file system."""
    folder = arguments.get("checkpoint_id")
    if folder is None:
        folder = getattr(arguments.get(storage), "path", None)
    return os.path.abspath(os.fspath(folder)) if isinstance(folder, (str, os.PathLike)) else ""


def kinds_of(thing: Any) -> set[StateKind]:
    """The kinds of objects in a state dict that make their own state dicts when it is saved."""
    values = thing.values() if isinstance(thing, Mapping) else ()
    kinds = set()
    for value in values:
        if isinstance(value, torch.nn.Module):
            kinds.add(StateKind.MODEL)
        elif isinstance(value, torch.optim.Optimizer):
            kinds.add(StateKind.OPTIMIZER)
    return kinds


class ObservedFile:
    """An open file of safetensors; notes the tensors that are read from it."""

    def __init__(self, file: Any, path: Any, loaded: Callable[..., object]) -> None:
        self._file, self._path, self._observed = file, path, loaded
        self._tensors: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> ObservedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        if self._tensors and error[0] is None:
            tensors, self._tensors = self._tensors, {}
            self._observed(tensors, self._path)
        return self._file.__exit__(*error)

    def get_tensor(self, name: str) -> Any:
        tensor = self._file.get_tensor(name)
        self._tensors[name] = tensor
        return tensor

    def get_tensors(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self._file.get_tensors(*args, **kwargs)
        if isinstance(tensors, dict):
            self._tensors.update(tensors)
        return tensors


class LaterImports(DdpImportFinder):
    """Calls a function after the import of each of some modules; only in ranks."""

    def __init__(self, then: dict[str, Callable[[], object]]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        then = self._then.pop(name, None)
        if then is None:
            return None
        spec = self._find_regular_spec(name, path, target)
        if spec is not None:
            self._observe_import(spec, lambda: (then(), None)[1])
        return spec
