"""Keeps ddpcheck's own time below a share of the step, by checking at fewer steps.

Every rank measures what its checks cost and publishes the schedule that it needs in the shared memory of its node; all
ranks of the node then use the sparsest one. The schedule changes only at multiples of EPOCH steps. A rank that begins
such a step has finished the AllReduce of the step before, so all others have finished the one before that, in which
they published: no collective is needed to agree. Nodes decide on their own. All intervals are powers of two, so what
the node with the sparsest schedule checks, all others check too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ddpcheck.config import FIRST_STEPS_OF_BUDGET, parse_budget
from ddpcheck.probes.probe import BudgetItem
from ddpcheck.records.kinds.timing import CostRecord

if TYPE_CHECKING:
    from ddpcheck.agent.shm_exchange import ShmExchange
    from ddpcheck.config import Config
    from ddpcheck.records.registry import Record

# Steps with the same schedule. The first ones are checked completely.
EPOCH = FIRST_STEPS_OF_BUDGET
# A sparser schedule is needed above the budget; a denser one again is used only if it is clearly below.
MARGIN = 0.8
# What a check costs beyond the time that is measured around it: the job finds its data evicted from the caches, and the
# writer's thread takes processor time. Benchmarks showed 1.4 times the measured time.
UNMEASURED = 1.5
# Probes whose cost the user has chosen: no check is left out for it.
REQUESTED = ("audit",)
# The largest share of a step where a device has no kernel and operators of torch read its tensors.
SLOW_READS_SHARE = 0.05


class Schedule(NamedTuple):
    """Every how many steps each item runs."""

    sketch: int = 1
    applied: int = 1
    params: int = 1

    def runs(self, item: BudgetItem, step: int) -> bool:
        return step % self[item] == 0


def _schedules() -> list[Schedule]:
    """From dense to sparse."""
    return [
        *(Schedule(2**power) for power in range(9)),
        *(Schedule(256, 2**power) for power in range(1, 7)),
        *(Schedule(256, 64, 2**power) for power in range(1, 7)),
    ]


SCHEDULES = _schedules()
# Continued for a device without a kernel, where one pass over all parameters may take longer than a step.
_SPARSEST = SCHEDULES[-1]
ALL_SCHEDULES = [*SCHEDULES, *(Schedule(*(every << power for every in _SPARSEST)) for power in range(1, 11))]
# The densest one that checks a single step of the first epoch: its cost decides about the next ones.
FIRST_SLOW_LEVEL = next(level for level, each in enumerate(ALL_SCHEDULES) if min(each) >= EPOCH)
# Iterating over an enum class takes a microsecond.
_ITEMS = tuple(BudgetItem)
_EVERYTHING = [True] * len(_ITEMS)
LAST_WITH_ALL_PARAMETERS = max(schedule for schedule in SCHEDULES if schedule.params == 1)


class TimeSpent(Protocol):
    """Nanoseconds that ddpcheck has taken on the training thread so far."""

    own_ns: int

    def probe_ns(self) -> dict[str, int]:
        """By probe."""

    def item_ns(self) -> list[int]:
        """By item of the budget."""


@dataclass
class Measurement:
    """What was measured in the steps since the last record."""

    began: int
    own: int
    spent: dict[str, int]
    device: int = 0
    first_step: int = -1
    steps: int = 0
    # By item: its time in the steps in which it ran, and the number of those.
    busy: list[int] = field(default_factory=lambda: [0] * len(BudgetItem))
    runs: list[int] = field(default_factory=lambda: [0] * len(BudgetItem))


class Budget:
    """The schedule of one rank, and what its checks have cost."""

    def __init__(
        self,
        config: Config,
        exchange: ShmExchange | None,
        write: Callable[[Record], None],
        spent: TimeSpent,
    ) -> None:
        self._share = parse_budget(config.budget)
        self._exchange = exchange
        self._write = write
        self._spent = spent
        self._items_before = [0] * len(BudgetItem)
        self._optimizer: int | None = None
        self._epoch = 0
        self._level = 0
        self._wanted = 0
        self._off = self._share is None
        # Whether operators of torch read tensors of a device, and time of ddpcheck's kernels on the device so far.
        self._slow_reads = False
        self._device_ns = 0
        # Device time of the checks relative to their time on the host.
        self._device_ratio = 0.0
        # The step that was asked for last, and what is part of it.
        self._asked: int | None = None
        self._answers = _EVERYTHING
        self._answered = SCHEDULES[0]
        # What the last steps with an item cost: kept for epochs in which it did not run.
        self._costs = [0.0] * len(BudgetItem)
        self._since = self._begin()

    def _begin(self) -> Measurement:
        return Measurement(perf_counter_ns(), self._spent.own_ns, self._spent.probe_ns(), self._device_ns)

    @property
    def schedule(self) -> Schedule:
        return ALL_SCHEDULES[self._level]

    def limit_slow_reads(self) -> None:
        """A device has no kernel: check one step, and then as many as its cost allows. Call before the first step.

        `--budget off` still checks every step.
        """
        if self._share is None or self._slow_reads:
            return
        self._record()
        self._slow_reads = True
        self._share = min(self._share, SLOW_READS_SHARE)
        self._level = self._wanted = max(self._level, FIRST_SLOW_LEVEL)
        # Until a step was measured on the device, assume that operators take as long there as their launches do here.
        self._device_ratio = 1.0

    def add_device_time(self, nanoseconds: int) -> None:
        """What ddpcheck's kernels of one step took on the device."""
        self._device_ns += nanoseconds

    def runs(self, item: BudgetItem, step: int) -> bool:
        """Whether `item` is part of this step; all ranks of a node get the same answer."""
        return (self._answers if step == self._asked else self._ask(step))[item]

    def _ask(self, step: int) -> list[bool]:
        self._asked = step
        if self._off:
            self._answers, self._answered = _EVERYTHING, SCHEDULES[0]
            return _EVERYTHING
        if step // EPOCH > self._epoch:
            self._advance(step // EPOCH)
        schedule = self._answered = self.schedule
        self._answers = [step % every == 0 for every in schedule]
        return self._answers

    def runs_beside(self, item: BudgetItem, step: int) -> bool:
        """The same for an optimizer that takes no part in the steps of the job, and counts its own."""
        return self._off or self.schedule.runs(item, step)

    def check_everything(self) -> None:
        """Ranks differ: from now on everything is checked, whatever it costs; but a slow read may take seconds."""
        if self._slow_reads:
            return
        if self._level:
            self._record()
        self._off, self._level, self._asked = True, 0, None

    def _advance(self, epoch: int) -> None:
        peers = [] if self._exchange is None else self._exchange.budget_levels(epoch)
        level = max([self._wanted, *(level for level in peers if level < len(ALL_SCHEDULES))])
        self._epoch = epoch
        if level != self._level:
            self._record()
            self._level = level

    def step_done(self, optimizer: int, step: int) -> None:
        """Called after each step. If several optimizers share an iteration, those of the first count."""
        if self._optimizer is None:
            self._optimizer = optimizer
            # What came before the end of the first step, such as start-up, is not part of any step.
            self._since = self._begin()
            self._items_before = self._spent.item_ns()
            if self._slow_reads:
                # The only step of this epoch that is checked. It also made tables, so later ones take less.
                self._costs = [float(spent) for spent in self._items_before]
            return
        if optimizer != self._optimizer:
            return
        since = self._since
        if since.first_step < 0:
            since.first_step = step
        since.steps += 1
        answers = self._answers if step == self._asked else self._ask(step)
        position = step % EPOCH
        # Adding up takes longer than a step with nothing to check, so only the steps that check something are measured.
        # Of all intervals, that of the parameters is the shortest.
        if True in answers or (step + 1) % self._answered.params == 0 or position == EPOCH - 1:
            before, self._items_before = self._items_before, self._spent.item_ns()
            for item, ran in enumerate(answers):
                if ran:
                    since.busy[item] += self._items_before[item] - before[item]
                    since.runs[item] += 1
        if position == EPOCH - 2 and not self._off:
            self._wanted = self._needed()
            if self._exchange is not None:
                self._exchange.publish_budget_level(step // EPOCH + 1, self._wanted)
        elif position == EPOCH - 1:
            self._record()

    def _needed(self) -> int:
        """The densest schedule whose expected cost is within the budget."""
        since = self._since
        wall = perf_counter_ns() - since.began
        own = self._spent.own_ns - since.own
        probes = self._spent.probe_ns()
        requested = sum(probes.get(name, 0) - since.spent.get(name, 0) for name in REQUESTED)
        if self._share is None or not since.steps or wall <= 0:
            return self._level
        for item in BudgetItem:
            if since.runs[item]:
                self._costs[item] = since.busy[item] / since.runs[item]
        busy = sum(since.busy)
        device = self._device_ns - since.device
        if busy and device:
            self._device_ratio = device / busy
        fixed = max(0.0, own - requested - busy) / since.steps
        step = max(1.0, (wall - own) / since.steps)
        # A job that is limited by its host pays for launches, another one for kernels: both are counted.
        scale = 1.0 + self._device_ratio
        levels = ALL_SCHEDULES if self._slow_reads else SCHEDULES
        for level, schedule in enumerate(levels):
            checks = scale * sum(self._costs[item] / schedule[item] for item in BudgetItem)
            allowed = self._share * step / UNMEASURED * (1.0 if level >= self._level else MARGIN)
            if checks + (fixed if schedule.params == 1 else 0.0) <= allowed:
                return level
            # Parameters are compared less often only for what that costs itself: nothing makes up for a fixed cost.
            if schedule == LAST_WITH_ALL_PARAMETERS and checks <= allowed:
                return level
        return len(levels) - 1

    def _record(self) -> None:
        since, self._since = self._since, self._begin()
        if not since.steps:
            return
        spent = {name: (ns - since.spent.get(name, 0)) // 1000 for name, ns in self._spent.probe_ns().items()}
        own = (self._spent.own_ns - since.own) // 1000
        total = sum(spent.values())
        if total > own:
            # Times of some probes are estimates.
            spent = {name: us * own // total for name, us in spent.items()}
        spent["agent"] = max(0, own - total)
        self._write(
            CostRecord(
                step=since.first_step,
                steps=since.steps,
                wall=(perf_counter_ns() - since.began) // 1000,
                spent={name: us for name, us in spent.items() if us},
                sketch_every=self.schedule.sketch,
                applied_every=self.schedule.applied,
                params_every=self.schedule.params,
                device=(self._device_ns - since.device) // 1000,
            )
        )

    def close(self) -> None:
        """Called at the end: writes what was measured since the last record."""
        self._record()
