"""Records of checkpoints: what a file held, what was loaded from it, and what the job trained with afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ddpcheck.records.registry import Record, record


class StateKind(str, Enum):
    """A part of a checkpoint."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SCALER = "scaler"
    RNG = "rng"


class OptimizerState(str, Enum):
    """Where the state of an optimizer came from at its first step."""

    LOADED = "loaded"
    # There is a state that was not loaded.
    OTHER = "other"
    # No state at all.
    EMPTY = "empty"
    # No state; it was loaded into another optimizer of the same parameters, which never stepped.
    ELSEWHERE = "elsewhere"
    # No state: the state dict that was passed to the load of a distributed checkpoint had none to fill.
    NOT_REQUESTED = "not_requested"


@record("saved")
@dataclass(frozen=True)
class SaveRecord(Record):
    """A checkpoint was saved."""

    step: int
    file: str
    # Values of StateKind.
    holds: list[str] = field(default_factory=list)
    where: str = ""


@record("restored")
@dataclass(frozen=True)
class RestoreRecord(Record):
    """A file that was loaded into a module, compared with what the module held at its next training forward."""

    module: int
    step: int
    file: str
    # The call that loaded it.
    where: str = ""
    # Values of StateKind: parts of the file, and parts that were passed to `load_state_dict`.
    holds: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    # Tensors of the module, and those with the file's values; among the latter, those with another dtype.
    tensors: int = 0
    equal: int = 0
    cast: int = 0
    # [dtype in the file, dtype in the module] of one of them.
    cast_types: list[str] = field(default_factory=list)
    # Tensors that were loaded and then had other values, the first of them, and the correlation with the file's values.
    changed: int = 0
    changed_example: str = ""
    correlation: float | None = None
    # Tensors that were not loaded because their names differ, with [name in the file, name in the module] of one.
    misnamed: int = 0
    misnamed_example: list[str] = field(default_factory=list)
    # Tensors with the values that the file has under another name, with [name in the file, name in the module] of some.
    swapped: int = 0
    swapped_examples: list[list[str]] = field(default_factory=list)
    # Tensors of the module that the file has by their names, that were not loaded, and that have other values.
    left: int = 0
    left_examples: list[str] = field(default_factory=list)


@record("optimizer_restored")
@dataclass(frozen=True)
class OptimizerRestoreRecord(Record):
    """The state of an optimizer at its first step, in a process that has loaded a checkpoint."""

    optimizer: int
    module: int
    step: int
    file: str
    # A value of OptimizerState.
    state: str
    name: str = ""
    where: str = ""
    # Parameters with a state in the file, and whether its groups have the same hyperparameters.
    entries: int = 0
    same_settings: bool = False
    # What else shows that the job continues an earlier one: values of StateKind, or "epoch".
    resumed: list[str] = field(default_factory=list)
    # Parts of the file that were not loaded, although the job uses them: values of StateKind.
    not_restored: list[str] = field(default_factory=list)
    # States that loading converted to a type with fewer bits: their number and [name, dtype in the file, dtype now].
    cast: int = 0
    cast_example: list[str] = field(default_factory=list)
    # Whether the weights were converted in the same way, so that it is meant.
    weights_cast: bool = False
    # [dtype of weights, dtype of states] in the file, if the weights have fewer bits than states and parameters.
    rounded: list[str] = field(default_factory=list)
    # Parameters with a state from the file whose values are in no file, out of all with such a state.
    fresh: int = 0
    fresh_examples: list[str] = field(default_factory=list)
    found: int = 0


@record("resumed_data")
@dataclass(frozen=True)
class ResumedDataRecord(Record):
    """The first pass over the training data after a checkpoint was loaded, compared with those before it was saved."""

    module: int
    step: int
    file: str
    # When the file was saved: the sampler's epoch, finished passes, batches of the pass in progress.
    saved_epoch: int | None = None
    saved_passes: int = 0
    saved_batches: int = 0
    # The sampler's epoch now, and the earlier pass that began with the same samples: its number, or -1.
    epoch: int | None = None
    repeats: int = -1
    # Whether that pass was in progress when the file was saved.
    in_progress: bool = False
    # Batches that the program took and did not use before the first step.
    passed_over: int = 0
    # Batches of the pass in progress that were never used, because the next epoch followed.
    left_out: int = 0
