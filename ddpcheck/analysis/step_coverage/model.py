"""Coverage of a run: trained parameters that were compared after each step, and those that were not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Gap(str, Enum):
    """Why a run without findings is no proof that its replicas agree."""

    NONE = ""
    NOT_COMPARED = "not_compared"  # some or all stepped parameters are in no module that is compared
    NO_STEP_COMPARED = "no_step_compared"  # optimizers stepped, and no step was compared across ranks
    NO_STEP_SEEN = "no_step_seen"  # backwards ran, but neither a DDP module nor an optimizer step was seen
    NO_REPLICA = (
        "no_replica"  # ranks train without DDP, and no parameter is equal on all of them after a step
    )
    NOT_STEPPED = (
        "not_stepped"  # gradients of DDP modules were reduced, and optimizers stepped other parameters only
    )
    CAPTURED = "captured"  # optimizers stepped inside graphs of the device
    CHECK_LOST = "check_lost"  # a part of ddpcheck that a main check needs failed
    RECORDS_LOST = "records_lost"  # a rank could not write all of its records


@dataclass(frozen=True)
class OptimizerCoverage:
    """Optimizers of one class that step at one line, on the ranks that have them."""

    name: str
    where: str
    ranks: tuple[int, ...]
    # The highest numbers of all ranks.
    steps: int
    compared: int
    # By reason.
    not_compared: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Coverage:
    """What a verdict is based on. Parameters are counted on the rank with the most."""

    # False: the report must not be taken as a proof that replicas agree. `gap` says why.
    complete: bool
    # A value of `Gap`; a later version may have others.
    gap: str = Gap.NONE.value
    # Parameters that optimizers stepped, those that were compared after each step, and the others by reason.
    trained: int = 0
    compared: int = 0
    not_compared: Mapping[str, int] = field(default_factory=dict)
    # Steps of the optimizer with the most, and comparisons of parameters across ranks.
    steps: int = 0
    compared_steps: int = 0
    # Ranks with parameters that were not compared, or with a lost check.
    ranks: tuple[int, ...] = ()
    optimizers: tuple[OptimizerCoverage, ...] = ()
    # What distributes parameters instead of DDP, as far as it was recognised.
    seen: tuple[str, ...] = ()
    # Names of the checks that are not complete because a part of ddpcheck failed.
    lost_checks: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        return self.trained - self.compared
