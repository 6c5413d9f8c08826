"""What a probe is: an observer of a rank that is told of each moment and writes records, nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from ddpcheck.agent.shm_exchange import ShmExchange
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.config import Config
    from ddpcheck.probes.live_compare.node import NodeCompare
    from ddpcheck.records.schema import Record


class ProbeContext(Protocol):
    """What a probe may know of the rank it runs in."""

    config: Config
    session: str
    rank: int
    world_size: int
    # Shared with the launcher and the ranks of this node, where it could be made.
    board: ShmExchange | None
    # Live comparison with the ranks of this node, where there is a board.
    disagreements: NodeCompare | None
    # Whether its file is closed: nothing more can be written.
    over: bool
    # Nanoseconds that probes have taken from the training thread so far.
    own_ns: int

    def write(self, record: Record) -> None: ...


class Probe:
    """Every moment does nothing by default; a probe overrides those it cares for.

    Each is called through the guard: an exception switches this probe off and nothing else.
    """

    name = ""

    def __init__(self, scene: ProbeContext) -> None:
        self.scene = scene

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Whether this run has any use for it; what is not wanted costs nothing."""
        return True

    def entering(self, watched: TrackedModule) -> None:
        """DDP's constructor is about to run."""

    def wrapped(self, watched: TrackedModule) -> None:
        """DDP's constructor has run: the broadcast is done."""

    def forward(self, watched: TrackedModule) -> None:
        """A training forward through the wrapper begins."""

    def inputs(self, watched: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same moment, with what the user passes to the wrapper."""

    def buffers_synced(self, watched: TrackedModule) -> None:
        """DDP has just synchronised the buffers."""

    def forward_done(self, watched: TrackedModule) -> None:
        """A training forward through the wrapper is over."""

    def backward_called(self, root: Any = None) -> None:
        """Somebody calls backward on `root`, perhaps from inside another one; None: with weights, which we leave."""

    def backward_begun(self, watched: TrackedModule) -> None:
        """The first gradient of a backward that DDP is going to reduce is there."""

    def stray_begun(self, watched: TrackedModule) -> None:
        """The first gradient of a backward that DDP is not going to reduce is there."""

    def gradient_ready(self, watched: TrackedModule, place: int, gradient: torch.Tensor) -> None:
        """This rank's own gradient of one parameter, accumulated and not yet reduced."""

    def computed(self, watched: TrackedModule) -> None:
        """All gradients of that backward are there; DDP now waits for the rest of its reduction."""

    def reduced(self, watched: TrackedModule) -> None:
        """DDP has finished that backward: all gradients are reduced."""

    def backward_returned(self) -> None:
        """The backward that was called last is over."""

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        """The optimizer is about to step."""

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        """The optimizer has stepped; its count still names this step."""

    def skipped(self, optimizer: TrackedOptimizer) -> None:
        """GradScaler left a step out."""

    def asking(self, iterator: Any) -> None:
        """A data loader's iterator is asked for a batch."""

    def got(self, iterator: Any) -> None:
        """It has given one."""

    def ran_out(self, iterator: Any) -> None:
        """It has no more to give."""

    def drawn(self, iterator: Any, index: Any) -> None:
        """A data loader's iterator has drawn the indices of its next batch."""

    def exhausted(self, iterator: Any) -> None:
        """A data loader's sampler has nothing more to give."""

    def forgetting(self, watched: TrackedModule) -> None:
        """The user let DDP's wrapper go; its tensors are still there."""

    def ending(self) -> None:
        """The process group is going away or the process ends."""


MOMENTS = (
    "entering",
    "wrapped",
    "forward",
    "inputs",
    "buffers_synced",
    "forward_done",
    "backward_called",
    "backward_begun",
    "stray_begun",
    "gradient_ready",
    "computed",
    "reduced",
    "backward_returned",
    "before_step",
    "after_step",
    "skipped",
    "asking",
    "got",
    "ran_out",
    "drawn",
    "exhausted",
    "forgetting",
    "ending",
)
