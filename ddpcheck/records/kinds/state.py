"""Records about the state in which a rank trains: modes, settings and precision, and old gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddpcheck.records.registry import Record, record


class GradientStart(str, Enum):
    """How the gradients that an optimizer steps begin a step."""

    CLEARED = "cleared"
    # Those of the step before, untouched: in some of the parameters, or in all.
    PARTLY_OLD = "partly_old"
    OLD = "old"


@record("state")
@dataclass(frozen=True)
class StateRecord(Record):
    """The state in effect at the training forwards of a step, where it differs from that of the step before.

    Keys are `path:attribute` for modules and parameters, with an empty path for the whole module, and plain names for
    settings of the process. A mode that is not listed is that of the whole module, a parameter that is not listed is
    trained.
    """

    module: int
    step: int
    # What is new since the last record; null: no longer there. A list where forwards of the step differ.
    changed: dict[str, Any] = field(default_factory=dict)
    # Call site of the forward in the user's code, as file:line.
    where: str = ""
    # Modules and their settings are read at least at every step that is a multiple of this.
    every: int = 1
    # Whether the rank writes no further record of this module: too many changes.
    last: bool = False


@record("gradient_start")
@dataclass(frozen=True)
class GradientStartRecord(Record):
    """What the first backward of a step found in the gradients, if it differs from the step before.

    Without a record, steps start from cleared gradients.
    """

    module: int
    step: int
    # A value of `GradientStart`.
    start: str
    # Call site of the backward in the user's code, as file:line.
    where: str = ""
    # Whether the rank writes no further record of this module: too many changes.
    last: bool = False


@record("loss_form")
@dataclass(frozen=True)
class LossFormRecord(Record):
    """How the losses of a step are computed, once it was the same in several steps and differs from the record before.

    One entry for each term: the function, how it is reduced over the batch, and the constant factor of the term.
    """

    optimizer: int
    step: int
    functions: list[str] = field(default_factory=list)
    reductions: list[str] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    # Call site of the backward in the user's code, as file:line.
    where: str = ""
    # Whether the rank writes no further record of this optimizer: too many changes.
    last: bool = False


@record("loss_settings")
@dataclass(frozen=True)
class LossSettingsRecord(Record):
    """Arguments of the loss functions of a step, once they were the same in several steps and differ from before.

    One entry for each term: the function, and its arguments by name. Weights of classes are a digest, empty for none.
    """

    optimizer: int
    step: int
    functions: list[str] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    # Call site of the backward in the user's code, as file:line.
    where: str = ""
    # Whether the rank writes no further record of this optimizer: too many changes.
    last: bool = False
