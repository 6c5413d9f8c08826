"""The interface of a probe: it observes the events of one rank and writes records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVarTuple, Unpack

    from ddpcheck.agent.budget import Budget
    from ddpcheck.agent.shard_reduction import ShardReduction
    from ddpcheck.agent.shm_exchange import ShmExchange
    from ddpcheck.agent.tracked_module import ParamSetChange, TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.config import Config
    from ddpcheck.probes.live_compare.node import NodeCompare
    from ddpcheck.records.registry import Record

    # The arguments of an event, without the probe. Not in typing before Python 3.11, and used in annotations only.
    Args = TypeVarTuple("Args")


class Phase(IntEnum):
    """When a probe handles an event. Within a phase the order has no meaning."""

    # Reads the clock before other probes spend time that is not the job's.
    CLOCK = 0
    # Ends a profiler step before other probes do their work for it.
    PROFILER = 1
    DEFAULT = 2


class BudgetItem(IntEnum):
    """What the budget can do less often, in the order in which it does."""

    # Verify the AllReduce by sketches of local and reduced gradients, and fingerprint batches.
    SKETCH = 0
    # Digest the gradients that the optimizer applies.
    APPLIED = 1
    # Digest the parameters after the step.
    PARAMS = 2


Method = TypeVar("Method", bound=Callable[..., None])

# Every event, in the order of declaration. An event is a method of `Probe`, and the method is its only name.
EVENTS: list[Callable[..., None]] = []


def event(method: Method) -> Method:
    """Declare a method of `Probe` as an event that the agent emits."""
    EVENTS.append(method)
    return method


class Emit(Protocol):
    """Calls every probe that handles an event: `emit(Probe.before_wrap, tracked)`."""

    def __call__(self, event: Callable[[Probe, Unpack[Args]], None], *args: Unpack[Args]) -> None: ...


class ProbeContext(Protocol):
    """What a probe knows of the rank it runs in."""

    config: Config
    session: str
    rank: int
    world_size: int
    # Of its launcher, if both run on one machine.
    host: str
    # Shared with the launcher and the ranks of this node; None if it could not be created.
    exchange: ShmExchange | None
    # Live comparison with the ranks of this node, where there is an exchange.
    node_compare: NodeCompare | None
    # Whether the record file is closed.
    over: bool
    # Decides which budget_items are part of which step.
    budget: Budget
    # Nanoseconds that ddpcheck has spent on the training thread so far.
    own_ns: int

    def probe_ns(self) -> dict[str, int]:
        """The same by probe."""

    def entry_point(self, probe: Probe, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body` for calls from the program outside of events: guarded, and its time counts as the probe's."""

    def job_ns(self) -> int:
        """A clock that does not advance while ddpcheck runs."""

    def forwards_captured(self) -> bool:
        """Whether a graph holds a forward: its replays are not counted."""

    def call_last(self, probe: Probe) -> None:
        """From now on, also call the methods of the probe's `after_others`."""

    def call(self, probe: Probe, *events: Callable[..., None]) -> None:
        """From now on, also call these handlers of the probe, which are among its `on_demand`."""

    def stop_calling(self, probe: Probe, *events: Callable[..., None]) -> None:
        """The probe needs these events no more."""

    def write(self, record: Record) -> None: ...

    def write_later(self, make: Callable[[], Record]) -> None:
        """Write the record that `make` returns. Another thread calls it: what it reads must not change any more."""


class Probe:
    """Base class: every event does nothing by default, and a probe overrides those it handles.

    Probes share no state: none writes what another one reads. The agent calls each handler through the guard: an
    exception switches off this probe and nothing else.
    """

    name: ClassVar[str] = ""
    phase: ClassVar[Phase] = Phase.DEFAULT
    # Methods to call when all other probes have handled an event, by its name and with its arguments.
    after_others: ClassVar[Mapping[str, str]] = {}
    # Events that the probe handles only after it has asked for them: in most jobs it never does.
    on_demand: ClassVar[frozenset[str]] = frozenset()
    # Events whose time belongs to something that the budget can do less often.
    budget_items: ClassVar[Mapping[str, BudgetItem]] = {}

    def __init__(self, context: ProbeContext) -> None:
        self.context = context

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Whether this run needs the probe; a probe that is not needed costs nothing."""
        return True

    @event
    def before_wrap(self, tracked: TrackedModule) -> None:
        """DDP's constructor is about to run."""

    @event
    def after_wrap(self, tracked: TrackedModule) -> None:
        """DDP's constructor has returned; its broadcast is done."""

    @event
    def unwrapped_found(self, tracked: TrackedModule) -> None:
        """Parameters outside of all DDP modules are stepped, or a module outside of them is used in training."""

    @event
    def unwrapped_due(self, tracked: TrackedModule) -> None:
        """It is time to compare a module that is used in training and not trained."""

    @event
    def module_used(self, tracked: TrackedModule, evidence: list[str]) -> None:
        """Follows `unwrapped_found`: how the module is connected with DDP's forwards and backwards."""

    @event
    def parameters_changed(self, tracked: TrackedModule, changes: list[ParamSetChange]) -> None:
        """The list of the module's tensors was renewed. Emitted before the event in which it was noticed."""

    @event
    def wrapper_changed(self, tracked: TrackedModule) -> None:
        """A forward begins, and since the last one `join()` or a communication hook of the module came into use."""

    @event
    def before_forward(self, tracked: TrackedModule) -> None:
        """A training forward through the wrapper starts."""

    @event
    def forward_inputs(self, tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follows `before_forward`, with the arguments that the user passes to the wrapper."""

    @event
    def root_found(self, tracked: TrackedModule) -> None:
        """The first training forward through a module that FSDP shards begins: the outermost such module."""

    @event
    def root_forward(self, tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward through such a module begins. No other event of a forward is emitted for it."""

    @event
    def root_backward(self, tracked: TrackedModule) -> None:
        """The first backward after such a forward is called."""

    @event
    def buffers_synced(self, tracked: TrackedModule) -> None:
        """DDP has just synchronised the buffers."""

    @event
    def forward_computed(self, tracked: TrackedModule) -> None:
        """The module of a training forward has returned; DDP now prepares for the backward."""

    @event
    def after_forward(self, tracked: TrackedModule) -> None:
        """A training forward through the wrapper has returned."""

    @event
    def backward_called(self, root: Any) -> None:
        """`backward` is called on `root`, possibly nested. None if the call passes gradient weights."""

    @event
    def backward_begun(self, tracked: TrackedModule) -> None:
        """The first gradient of a backward that DDP will reduce is accumulated."""

    @event
    def unsynced_backward_begun(self, tracked: TrackedModule) -> None:
        """The first gradient of a backward that DDP will not reduce is accumulated."""

    @event
    def gradients_ready(
        self, tracked: TrackedModule, indices: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """This rank's own gradients, accumulated and not yet reduced, in ascending order of their indices.

        Emitted once for a whole backward, with the gradients of all parameters, unless DDP changes gradients before its
        end. A later call replaces the gradient of a parameter that an earlier one had.
        """

    @event
    def gradients_computed(self, tracked: TrackedModule) -> None:
        """All gradients of that backward are accumulated; DDP waits for the rest of its AllReduce."""

    @event
    def unsynced_gradients_ready(self, tracked: TrackedModule) -> None:
        """All gradients of a backward that DDP does not reduce are accumulated."""

    @event
    def gradients_reduced(self, tracked: TrackedModule) -> None:
        """DDP has finished that backward: all gradients are reduced."""

    @event
    def unwrapped_backward(self) -> None:
        """`backward` is called, and no DDP module was wrapped yet. No other event of it is emitted."""

    @event
    def unreduced_gradients(self, tracked: TrackedModule) -> None:
        """A backward of parameters outside of DDP has ended: no one has reduced their gradients yet."""

    @event
    def shards_reducing(self, reduction: ShardReduction) -> None:
        """FSDP2 is about to reduce gradients of this backward. Keep nothing of `reduction` beyond `shards_reduced`."""

    @event
    def shards_reduced(self) -> None:
        """The backward with these reductions has returned: the shards have their gradients."""

    @event
    def backward_returned(self) -> None:
        """The innermost call of `backward` has returned."""

    @event
    def optimizer_stepped(
        self, optimizer: torch.optim.Optimizer, signature: tuple[int, ...], modules: Sequence[TrackedModule]
    ) -> None:
        """Any optimizer has stepped, also one of no DDP module; `after_step` follows only where there is one.

        `signature` changes with the parameters of the optimizer and of `modules`, which are those that are compared.
        """

    @event
    def before_step(self, optimizer: TrackedOptimizer) -> None:
        """The optimizer is about to step."""

    @event
    def after_step(self, optimizer: TrackedOptimizer) -> None:
        """The optimizer has stepped; `optimizer.steps` is still the index of this step."""

    @event
    def before_side_step(self, optimizer: TrackedOptimizer) -> None:
        """An optimizer is about to step that steps no DDP module, in a job that has DDP modules."""

    @event
    def after_side_step(self, optimizer: TrackedOptimizer) -> None:
        """That optimizer has stepped."""

    @event
    def step_skipped(self, optimizer: TrackedOptimizer) -> None:
        """GradScaler skipped a step."""

    @event
    def batch_requested(self, iterator: Any) -> None:
        """The program requests a batch from a data loader's iterator."""

    @event
    def batch_received(self, iterator: Any) -> None:
        """The iterator has returned a batch."""

    @event
    def batch_contents(self, iterator: Any, batch: Any) -> None:
        """Follows `batch_received`, with the batch."""

    @event
    def loader_exhausted(self, iterator: Any) -> None:
        """The iterator has raised StopIteration."""

    @event
    def sample_drawn(self, iterator: Any, index: Any) -> None:
        """A data loader's iterator has drawn the sample indices of its next batch."""

    @event
    def sampler_exhausted(self, iterator: Any) -> None:
        """A data loader's sampler has raised StopIteration."""

    @event
    def wrapper_released(self, tracked: TrackedModule) -> None:
        """DDP's wrapper was deleted; the wrapped module's tensors are still readable."""

    @event
    def before_exit(self) -> None:
        """The process group is about to be destroyed, or the process exits."""
