"""The probes of a rank, in the order in which they are told of a moment."""

from __future__ import annotations

from ddpcheck.probes.data import DataProbe
from ddpcheck.probes.gradients import GradientProbe
from ddpcheck.probes.ignored import IgnoredProbe
from ddpcheck.probes.loss import LossProbe
from ddpcheck.probes.memory import MemoryProbe
from ddpcheck.probes.optimizers import OptimizerProbe
from ddpcheck.probes.param_set import ParamSetProbe
from ddpcheck.probes.parameters import ParameterProbe
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.profile import ProfileProbe
from ddpcheck.probes.stack_dump import StackDumpProbe
from ddpcheck.probes.startup import StartupProbe
from ddpcheck.probes.step_timing import StepTimingProbe

# The clock before all others, whose time is not the job's. Then structure: it renews the list of tensors that the
# others read.
PROBES: tuple[type[Probe], ...] = (
    StepTimingProbe,
    ParamSetProbe,
    # Before those that take time: a step ends where their work for it begins.
    ProfileProbe,
    OptimizerProbe,
    ParameterProbe,
    IgnoredProbe,
    GradientProbe,
    DataProbe,
    StackDumpProbe,
    MemoryProbe,
    LossProbe,
    StartupProbe,
)
