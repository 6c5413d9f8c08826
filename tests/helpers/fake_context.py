"""A rank for tests of the probes: one process, no process group, records kept in a list."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.agent.budget import Budget
from ddpcheck.agent.dispatcher import Dispatcher
from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.config import Config
from ddpcheck.probes.live_compare.node import NodeCompare
from ddpcheck.probes.probe import BudgetItem, Probe
from ddpcheck.probes.registry import PROBES
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.registry import Record

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ddpcheck.probes.probe import Args

Kind = TypeVar("Kind", bound=Record)


class FakeContext:
    """What a probe may know of its rank; also replaces the session, without its guard."""

    def __init__(
        self, folder: Path = Path("/nonexistent"), rank: int = 0, exchange: Any = None, **config: Any
    ) -> None:
        # No stack is requested, unless a test does so.
        self.config = Config(run_dir=str(folder), run_id="test", **{"hang_timeout": 0.0, **config})
        self.session = "0123456789abcdef"
        self.rank = rank
        self.world_size = 2
        self.host = "host"
        self.own_ns = 0
        self.budget = Budget(self.config, exchange, self.write, self)
        self.over = False
        # Whether a graph holds a forward.
        self.captured = False
        self.records: list[Record] = []
        self.exchange = exchange
        self.node_compare = NodeCompare(self, exchange) if exchange is not None else None
        self.probes: list[Probe] = []
        # What probes have asked for, by probe and event: others handle all events but those on demand.
        self._called: dict[tuple[Probe, str], bool] = {}

    def write(self, record: Record) -> None:
        self.records.append(record)

    def write_later(self, make: Callable[[], Record]) -> None:
        self.write(make())

    def flush(self) -> None:
        """Records are in a list."""

    def forwards_captured(self) -> bool:
        return self.captured

    def call_last(self, probe: Probe) -> None:
        """`emit` always does."""

    def call(self, probe: Probe, *events: Callable[..., None]) -> None:
        for event in events:
            assert not self._is_called(probe, event), f"{probe.name}: {event.__name__} would be called twice"
            self._called[probe, event.__name__] = True

    def stop_calling(self, probe: Probe, *events: Callable[..., None]) -> None:
        self._called.update(((probe, event.__name__), False) for event in events)

    def _is_called(self, probe: Probe, event: Callable[..., None]) -> bool:
        return self._called.get((probe, event.__name__), event.__name__ not in probe.on_demand)

    def job_ns(self) -> int:
        return perf_counter_ns() - self.own_ns

    def probe_ns(self) -> dict[str, int]:
        return {}

    def item_ns(self) -> list[int]:
        return [0] * len(BudgetItem)

    def step_done(self) -> None:
        """Nothing is timed."""

    def entry_point(self, probe: Probe, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        return body

    def guarded(self, probe: str, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        return body

    def emit(self, event: Callable[[Probe, Unpack[Args]], None], *args: Unpack[Args]) -> None:
        for probe in [each for each in self.probes if self._is_called(each, event)]:
            getattr(probe, event.__name__)(*args)
        for probe in self.probes:
            if event.__name__ in probe.after_others:
                getattr(probe, probe.after_others[event.__name__])(*args)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [record for record in self.records if isinstance(record, kind)]

    def digests(self, stage: Stage) -> list[DigestRecord]:
        return [record for record in self.of(DigestRecord) if record.stage == stage.value]


def watch(module: torch.nn.Module, ignored: Sequence[str] = (), index: int = 0) -> TrackedModule:
    """`module` as if DDP had wrapped it."""
    return TrackedModule(
        index=index,
        ordinal=index,
        group=(0, 1),
        module=weakref.ref(module),
        ddp=weakref.ref(module),
        ignored=frozenset(ignored),
        name=type(module).__name__,
    )


class Job:
    """A module trained under the probes; the module replaces its own DDP wrapper."""

    def __init__(
        self,
        module: torch.nn.Module,
        context: FakeContext,
        probes: Sequence[type[Probe]] = PROBES,
        index: int = 0,
    ) -> None:
        self.module = module
        self.context = context
        if not context.probes:
            context.probes = [probe(context) for probe in sorted(probes, key=lambda probe: probe.phase)]
        self.dispatcher = Dispatcher(context, DistributedDataParallel.__init__)  # type: ignore[arg-type]
        self.tracked = watch(module, index=index)
        self.dispatcher._modules[id(module)] = self.tracked
        self.dispatcher._in_order.append(self.tracked)
        self.dispatcher._numbers[self.tracked.group] = 1
        self.dispatcher._count = index + 1
        context.emit(Probe.before_wrap, self.tracked)

    def wrapped(self) -> Job:
        self.dispatcher.after_wrap(self.module)
        return self

    def forward(self, *inputs: torch.Tensor) -> Any:
        self.dispatcher.before_forward(self.module)
        self.dispatcher.buffers_synced(self.module)
        return self.module(*inputs) if inputs else None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.dispatcher.before_step(optimizer)
        optimizer.step()
        self.dispatcher.after_step(optimizer)

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
        """Steps with gradients made up here: what they are does not matter to the probes."""
        for _ in range(steps):
            self.forward()
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 0.25)
            self.step(optimizer)
