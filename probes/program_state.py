"""Records modes and settings in effect at training forwards: train/eval, autocast, precision, frozen parameters."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.modules import ModuleRole
from ddpcheck.records.kinds.state import StateRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# Settings of dropout and normalisation, by the names that torch and common libraries use.
SETTINGS = (
    "p",
    "drop_prob",
    "drop_rate",
    "dropout",
    "dropout_p",
    "dropout_rate",
    "dropout_prob",
    "attention_dropout",
    "hidden_dropout",
    "layerdrop",
    "eps",
    "momentum",
    "track_running_stats",
)
_PLAIN = (bool, int, float, type(None))
# Everything is read in the first steps, in which most faults appear, and at powers of two.
FIRST_STEPS = 4
# Settings of the process take about as long to read as this many attributes.
_PROCESS_ENTRIES = 128
# Attributes that may be read per step on average.
_ENTRIES_PER_STEP = 16
# Bounds the records of a job that changes its state all the time.
MOST_RECORDS = 256
# A model may have more modules than that in eval mode or with a setting of their own.
MOST_ENTRIES = 5000
# Variables that override the precision of matrix products.
_OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
# In paths of modules inside FSDP1.
_FSDP1_CHILD = f"{torch_compat.WRAPPED_BY_FSDP.name}."
# Combinations of the quickly read values that are kept.
MOST_READINGS = 16


class ModuleState(NamedTuple):
    """The state at one forward. Equal states are one object."""

    # Settings of the process, and of the modules, by key.
    values: dict[str, Any]
    where: str


class ModuleTable:
    """The attributes of all submodules that are read, listed once per structure of the module."""

    def __init__(self, tracked: TrackedModule) -> None:
        self.revision = tracked.revision
        self.paths: list[str] = []
        # Attributes may refer to anything, such as the wrapper: nothing here may keep a module alive.
        self.modules: list[weakref.ref[torch.nn.Module]] = []
        # Position of the module, and the attribute.
        self.keys: list[tuple[int, str]] = []
        self.names: list[str] = []
        module = tracked.module()
        for path, child in module.named_modules() if module is not None else ():
            attributes = vars(child)
            # A scripted module has its attributes elsewhere.
            if type(attributes.get("training")) is not bool or len(self.paths) >= MOST_ENTRIES:
                continue
            path = path.replace(_FSDP1_CHILD, "")
            self.paths.append(path)
            self.modules.append(weakref.ref(child))
            for name in SETTINGS:
                if name in attributes and type(attributes[name]) in _PLAIN and len(self.names) < MOST_ENTRIES:
                    self.keys.append((len(self.modules) - 1, name))
                    self.names.append(f"{path}:{name}")
        self.frozen = [slot.name for slot in tracked.parameters if not slot.holder[slot.key].requires_grad][
            :MOST_ENTRIES
        ]

    def read(self) -> tuple[list[bool], list[Any]]:
        modules = [module() for module in self.modules]
        return (
            [getattr(module, "training", True) for module in modules],
            [getattr(modules[index], name, None) for index, name in self.keys],
        )


class Reading(NamedTuple):
    """One complete reading. `raw` is what a later one is compared with."""

    raw: tuple[Any, ...]
    snapshot: ModuleState
    due: int


class TrackedState:
    """What is known of one module's state."""

    def __init__(self) -> None:
        self.table: ModuleTable | None = None
        # Where the module is, for one revision of it.
        self.revision = -1
        self.device_type = "cpu"
        # By the values that are compared at every forward: programs that change between two modes are read once.
        self.readings: dict[tuple[Any, ...], Reading] = {}
        self.current: ModuleState | None = None
        # The last step at which everything was to be read, and the interval of such steps.
        self.due = -1
        self.every = 1
        # Snapshots of the current step's forwards that a backward followed.
        self.step = 0
        self.effective: list[ModuleState] = []
        self.written: list[ModuleState] = []
        self.values: dict[str, Any] = {}
        self.records = 0


class ProgramStateProbe(Probe):
    """A few values are compared at every forward; everything is read when one has changed, and at some steps.

    These steps follow from the number of the step and the size of the module, so all ranks read at the same ones. A
    forward counts if a backward follows it: what a rank evaluates between two steps has no effect on the training.
    """

    name = "program_state"
    # Until the first state of each module is written.
    on_demand: ClassVar[frozenset[str]] = frozenset({"after_step"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._states: dict[int, TrackedState] = {}
        self._awaits_first = False

    def before_forward(self, tracked: TrackedModule) -> None:
        state = self._states.get(tracked.index)
        if state is None:
            state = self._states[tracked.index] = TrackedState()
            if not self._awaits_first:
                self._awaits_first = True
                self.context.call(self, Probe.after_step)
        step = tracked.steps
        if step != state.step:
            # Nearly always the same object as in the step before.
            if state.effective != state.written:
                self._write(tracked.index, state)
            state.step, state.effective = step, []
        if step != state.due and (step < FIRST_STEPS or step % state.every == 0 or step & (step - 1) == 0):
            state.due = step
        if state.revision != tracked.revision:
            state.revision, state.device_type = tracked.revision, _device_type(tracked)
        # What changes most often between two steps, and costs least to read.
        quick = getattr(tracked.module(), "training", None), _autocast(state.device_type), tracked.revision
        reading = state.readings.get(quick)
        if reading is None or reading.due != state.due:
            reading = self._read(tracked, state, reading)
            if len(state.readings) >= MOST_READINGS:
                state.readings.clear()
            state.readings[quick] = reading
        state.current = reading.snapshot
        if tracked.backward is None and tracked.role is not ModuleRole.ROOT:
            _count(state)

    def root_forward(self, tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.before_forward(tracked)

    def backward_begun(self, tracked: TrackedModule) -> None:
        state = self._states.get(tracked.index)
        if state is not None:
            _count(state)

    unsynced_backward_begun = root_backward = backward_begun

    def wrapper_released(self, tracked: TrackedModule) -> None:
        state = self._states.pop(tracked.index, None)
        if state is not None:
            self._write(tracked.index, state)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        # The first state is written at once: a job that hangs later has it in its records.
        for tracked in (*optimizer.modules, *optimizer.roots):
            state = self._states.get(tracked.index)
            if state is not None and not state.written:
                self._write(tracked.index, state)
        if all(state.written for state in self._states.values()):
            self._awaits_first = False
            self.context.stop_calling(self, Probe.after_step)

    def before_exit(self) -> None:
        for index, state in self._states.items():
            self._write(index, state)

    def _write(self, index: int, state: TrackedState) -> None:
        """Write what has changed since the last record; usually nothing."""
        effective = state.effective
        if not effective or state.records >= MOST_RECORDS:
            return
        if len(effective) == len(state.written) and all(map(is_, effective, state.written)):
            return
        state.written = effective
        values = _merge([snapshot.values for snapshot in effective])
        changed = {key: value for key, value in values.items() if state.values.get(key, state) != value}
        changed |= dict.fromkeys(state.values.keys() - values.keys())
        state.values = values
        if not changed:
            return
        state.records += 1
        last = state.records == MOST_RECORDS
        self.context.write(StateRecord(index, state.step, changed, effective[0].where, state.every, last))

    def _read(self, tracked: TrackedModule, state: TrackedState, before: Reading | None) -> Reading:
        """Read everything. The snapshot stays the same object if nothing has changed."""
        step, table = tracked.steps, state.table
        # Submodules without parameters may be replaced without a new revision.
        if table is None or table.revision != tracked.revision or step & (step - 1) == 0:
            table = state.table = ModuleTable(tracked)
            entries = len(table.modules) + len(table.keys) + _PROCESS_ENTRIES
            state.every = 1 << (entries // _ENTRIES_PER_STEP).bit_length()
        modes, settings = table.read()
        process = process_settings(_device_type(tracked))
        raw = (process, modes, settings, table.frozen, table.paths, table.names)
        if before is not None and raw == before.raw:
            return before._replace(due=state.due)
        snapshot = ModuleState(_values(table, modes, settings, process), user_callsite())
        return Reading(raw, snapshot, state.due)


def _count(state: TrackedState) -> None:
    """A backward follows the current forward."""
    current, effective = state.current, state.effective
    if current is not None and not (effective and any(each is current for each in effective)):
        effective.append(current)


def _device_type(tracked: TrackedModule) -> str:
    slots = tracked.parameters
    return slots[0].holder[slots[0].key].device.type if slots else "cpu"


def _values(
    table: ModuleTable, modes: list[bool], settings: list[Any], process: dict[str, Any]
) -> dict[str, Any]:
    whole = modes[0] if modes else True
    values: dict[str, Any] = {**process, ":training": whole}
    for path, mode in zip(table.paths, modes, strict=True):
        if mode is not whole:
            values[f"{path}:training"] = mode
    for name, value in zip(table.names, settings, strict=True):
        values[name] = _plain(value)
    for name in table.frozen:
        values[f"{name}:requires_grad"] = False
    return values


def _plain(value: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        return repr(value)
    return value if type(value) in _PLAIN else type(value).__name__


def _merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state; where the forwards of a step had different values, the list of them."""
    if len(states) == 1:
        return states[0]
    merged = {}
    for key in dict.fromkeys(key for state in states for key in state):
        values = [_resolve(state, key) for state in states]
        distinct = [value for number, value in enumerate(values) if value not in values[:number]]
        merged[key] = distinct[0] if len(distinct) == 1 else distinct
    return merged


def _resolve(state: dict[str, Any], key: str) -> Any:
    """The value of a key, with the defaults of a record."""
    if key not in state and key.endswith(":training"):
        key = ":training"
    return state.get(key, True if key.endswith(":requires_grad") else None)


# Older versions of torch ask for the CPU and for other devices by functions without an argument.
try:
    torch.is_autocast_enabled("cpu")
    _ASKS_BY_DEVICE = True
except TypeError:
    _ASKS_BY_DEVICE = False


def _autocast(device_type: str) -> bool:
    if _ASKS_BY_DEVICE:
        return torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def _autocast_dtype(device_type: str) -> torch.dtype:
    if _ASKS_BY_DEVICE:
        return torch.get_autocast_dtype(device_type)
    return torch.get_autocast_cpu_dtype() if device_type == "cpu" else torch.get_autocast_gpu_dtype()


def process_settings(device_type: str) -> dict[str, Any]:
    """Settings of the process that change the results of a forward or backward."""
    backends: Any = torch.backends
    values: dict[str, Any] = {"autocast": _autocast(device_type)}
    if values["autocast"]:
        values["autocast.dtype"] = _text(_autocast_dtype(device_type))
        values["autocast.cache"] = torch.is_autocast_cache_enabled()
    # Without a fixed one, each process has its own, and sets of texts another order: that is the same setting.
    values["hash_seed"] = os.environ.get("PYTHONHASHSEED", "random") or "random"
    values["default_dtype"] = _text(torch.get_default_dtype())
    values["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    values["float32_matmul_precision"] = _readable(torch.get_float32_matmul_precision)
    if device_type == "cpu":
        values["threads"] = torch.get_num_threads()
    else:
        values["matmul.allow_tf32"] = _readable(lambda: backends.cuda.matmul.allow_tf32)
        precision = _readable(lambda: backends.cuda.matmul.fp32_precision)
        # What was never set is "none", and computes what "ieee" computes.
        values["matmul.fp32_precision"] = "ieee" if precision == "none" else precision
        values["cudnn.allow_tf32"] = _readable(lambda: backends.cudnn.allow_tf32)
        values["cudnn.deterministic"] = _readable(lambda: backends.cudnn.deterministic)
        values["cudnn.benchmark"] = _readable(lambda: backends.cudnn.benchmark)
        values["cudnn.enabled"] = _readable(lambda: backends.cudnn.enabled)
        values["matmul.allow_bf16_reduced_precision_reduction"] = _readable(
            lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        )
        values["matmul.allow_fp16_reduced_precision_reduction"] = _readable(
            lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        )
        values.update((name, os.environ.get(name, "")) for name in _OVERRIDES)
    return values


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _readable(read: Callable[[], Any]) -> Any:
    """torch refuses to read settings of its older interface once the newer one was used, and may lack either."""
    try:
        return read()
    except (RuntimeError, AttributeError):
        return None
