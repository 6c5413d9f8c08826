"""Patches the functions through which a process becomes a rank, and starts the agent there."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from ddpcheck import device_api, torch_compat
from ddpcheck.agent import training_thread
from ddpcheck.agent.rendezvous import RendezvousNote
from ddpcheck.config import Config
from ddpcheck.guard import GUARD, EntryPoint
from ddpcheck.injection import LaterImportFinder, write_fault_line
from ddpcheck.patches import (
    Patches,
    attempting,
    calling,
    constructing,
    hidden_entry,
    leave_out_wrappers,
    skip_frame,
)
from ddpcheck.probes.checkpoints.tracker import CHECKPOINTS
from ddpcheck.probes.process.startup_tracer import STARTUP

# Programs may import it after they have created a process group.
FSDP = "torch.distributed.fsdp"


class Agent:
    """Inactive until this process creates a process group or a DDP module, and so becomes a rank."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._patches = Patches()
        self._hooks: list[Any] = []
        self._sessions = 0
        self._dispatcher: Any = None
        # Entry points that call a method of the current dispatcher.
        self._dispatched: list[tuple[EntryPoint, Callable[..., None]]] = []
        self._ddp_init: Any = None
        self._training_patched = False
        self._searches_patched = False
        self._group_destroyed = False
        self._thread_watched = False
        # Removed when the program calls torch.compile, which recognises collectives by identity.
        self._collective_patches = Patches()

    def install(self) -> None:
        """Called while torch is imported: installs a few patches and opens no file."""
        import torch.distributed as distributed
        from torch.nn.parallel.distributed import DistributedDataParallel

        protect = GUARD.protect
        self._ddp_init = DistributedDataParallel.__init__
        before_wrap = protect("agent", "before_wrap", self._before_wrap)
        after_wrap = protect("agent", "after_wrap", self._after_wrap)
        wrap_failed = protect("agent", "wrap_failed", self._wrap_failed)
        self._patches.replace(
            DistributedDataParallel,
            "__init__",
            lambda original: constructing(original, before_wrap, after_wrap, wrap_failed),
        )
        if self._config.profile:
            from ddpcheck.probes.process.profiler_conflict import PROFILERS

            PROFILERS.watch_switches(self._patches)
        if not distributed.is_available():
            return
        opened = protect("agent", "open", self._open)
        closing = protect("agent", "group_closed", self._group_closed)
        note = RendezvousNote(self._config.run_dir)
        noted, removed = (protect("rendezvous", each.__name__, each) for each in (note.write, note.remove))

        def joining(*args: Any, **kwargs: Any) -> None:
            STARTUP.joining()
            noted(*args, **kwargs)

        def group_created(*args: Any, **kwargs: Any) -> None:
            removed()
            STARTUP.joined()
            opened()

        for owner in (distributed, sys.modules["torch.distributed.distributed_c10d"]):
            self._patches.replace(
                owner,
                "init_process_group",
                lambda original: attempting(original, joining, group_created, removed),
            )
            self._patches.replace(
                owner, "destroy_process_group", lambda original: calling(original, closing, None)
            )
        # Last, so that an error here does not affect the other patches.
        CHECKPOINTS.install()
        STARTUP.install()

    def _open(self) -> None:
        """A process group was created: this process is a rank."""
        import torch.distributed as distributed

        if not distributed.is_initialized() or (self._dispatcher is not None and not self._group_destroyed):
            return
        if self._dispatcher is not None:
            self._dispatcher.context.close("exit", left=True)
        self._group_destroyed = False
        CHECKPOINTS.patch_formats()
        from ddpcheck.agent.dispatcher import Dispatcher
        from ddpcheck.agent.rank_context import RankContext

        context = RankContext(self._config, self._sessions)
        self._sessions += 1
        self._dispatcher = Dispatcher(context, self._ddp_init, self._patch_training)
        self._dispatch_to(self._dispatcher)
        self._hook_steps()
        self._patch_fsdp()
        if self._sessions == 1:
            if FSDP not in sys.modules:
                imported = GUARD.protect("agent", "fsdp_imported", self._fsdp_imported, while_capturing=True)
                sys.meta_path.insert(0, LaterImportFinder(FSDP, imported))
            self._watch_compiler()
            os.register_at_fork(after_in_child=self._forked)
            self._patch_exits()
            self._patch_backward()

    def _before_wrap(self, *args: Any, **kwargs: Any) -> None:
        self._open()
        if self._dispatcher is not None:
            self._dispatcher.before_wrap(*args, **kwargs)
            # Directly before and after the constructor, so that the time of the probes is not included.
            STARTUP.wrapping()

    def _after_wrap(self, *args: Any, **kwargs: Any) -> None:
        if self._dispatcher is None:
            return
        STARTUP.wrapped()
        CHECKPOINTS.patch_formats()
        self._dispatcher.after_wrap(*args, **kwargs)
        self._patch_training()
        if getattr(args[0], "find_unused_parameters", False):
            self._patch_searches()
        if not self._thread_watched and training_thread.runs_in_worker_of_ray():
            self._thread_watched = True
            training_thread.watch_end(
                self._patches,
                GUARD.protect("exit", "raised", self._raised),
                GUARD.protect("exit", "returned", self._close),
            )

    def _wrap_failed(self, ddp: Any) -> None:
        if self._dispatcher is not None:
            STARTUP.wrapped()
            self._dispatcher.wrap_failed(ddp)

    def _patch_backward(self) -> None:
        """Observe backwards, also of a job that never wraps a module and never steps an optimizer of torch."""
        from ddpcheck.agent.dispatcher import Dispatcher

        # Tensor.backward goes through it too.
        self._observe(
            sys.modules["torch.autograd"],
            "backward",
            before=Dispatcher.backward_called,
            after=Dispatcher.backward_returned,
        )

    def _patch_training(self) -> None:
        """Observe forwards, scalers and loaders from now on.

        Called after the first DDP module is wrapped, or before the first step of a job that reduces gradients itself.
        """
        self._patch_fsdp()
        if self._training_patched:
            return
        self._training_patched = True
        from torch.nn.parallel.distributed import DistributedDataParallel

        from ddpcheck.agent.dispatcher import Dispatcher

        pre_forward = torch_compat.lookup(torch_compat.PRE_FORWARD) is not None
        forward = torch_compat.PRE_FORWARD.name if pre_forward else "forward"
        self._observe(DistributedDataParallel, forward, before=Dispatcher.before_forward)
        for private, after in (
            (torch_compat.SYNC_BUFFERS, Dispatcher.buffers_synced),
            (torch_compat.POST_FORWARD, Dispatcher.after_forward),
        ):
            if torch_compat.lookup(private) is not None:
                self._observe(DistributedDataParallel, private.name, after=after)
        self._observe(DistributedDataParallel, "no_sync", before=Dispatcher.no_sync_called)
        scaler = getattr(sys.modules.get("torch.amp.grad_scaler"), "GradScaler", None)
        if scaler is not None:
            self._observe(scaler, "step", before=Dispatcher.scaler_before, after=Dispatcher.scaler_after)
        self._patch_loaders()
        self._patch_collectives()

    def _fsdp_imported(self) -> None:
        compiler = sys.modules.get(torch_compat.DYNAMO_DISABLE.owner)
        if compiler is None or hasattr(compiler, torch_compat.DYNAMO_DISABLE.name):
            self._patch_fsdp()
        # Else the compiler imports it, and is not complete: patches cannot be hidden from it yet.

    def _patch_fsdp(self) -> None:
        """Observe FSDP, if the program has imported it by now."""
        from ddpcheck.agent.dispatcher import Dispatcher

        if torch_compat.lookup(torch_compat.FSDP_REDUCTION) is not None:
            owner = torch_compat.owner_of(torch_compat.FSDP_REDUCTION)
            self._observe(owner, torch_compat.FSDP_REDUCTION.name, before=Dispatcher.shards_reducing)
        for private in torch_compat.FSDP1_REDUCTIONS:
            if torch_compat.lookup(private) is not None:
                self._observe(torch_compat.owner_of(private), private.name, before=Dispatcher.flat_reducing)
        for private in (torch_compat.FSDP1_FORWARD, torch_compat.FSDP2_FORWARD):
            if torch_compat.lookup(private) is not None:
                self._observe(torch_compat.owner_of(private), private.name, before=Dispatcher.root_forward)
        for private in (torch_compat.FSDP1, torch_compat.FSDP2_PARAMETERS):
            cls = torch_compat.lookup(private)
            if cls is not None:
                self._observe(cls, "__init__", after=Dispatcher.sharding)

    def _patch_searches(self) -> None:
        """Observe where DDP begins to search for unused parameters. Called once there is a module that does."""
        if self._searches_patched or torch_compat.lookup(torch_compat.POST_FORWARD) is None:
            return
        self._searches_patched = True
        from torch.nn.parallel.distributed import DistributedDataParallel

        from ddpcheck.agent.dispatcher import Dispatcher

        name = torch_compat.POST_FORWARD.name
        self._observe(DistributedDataParallel, name, before=Dispatcher.forward_computed, on_top=True)

    def _watch_compiler(self) -> None:
        """Know when the program calls torch.compile, before anything is compiled."""
        import torch

        def compiles(*args: Any, **kwargs: Any) -> None:
            self._collective_patches.remove()
            if self._dispatcher is not None:
                self._dispatcher.unwrapped.compiler_used()

        used = GUARD.protect("agent", "compile", compiles)
        self._patches.replace(torch, "compile", lambda original: calling(original, used, None))

    def _patch_collectives(self) -> None:
        """Know whether ranks exchange activations: then each may hold other experts, classes or shards."""
        from ddpcheck.agent.dispatcher import Dispatcher

        if torch_compat.compiler_in_use():
            return
        exchanged = self._guarded(Dispatcher.exchanged)
        # A reduction inside a backward sends gradients of activations to the rank that they belong to.
        in_backward = self._guarded(Dispatcher.exchanged_in_backward)
        for private, before in (
            (torch_compat.ALL_TO_ALL, exchanged),
            (torch_compat.RESOLVE_GROUP, exchanged),
            (torch_compat.RESOLVE_GROUP_NAME, exchanged),
            (torch_compat.REDUCE, in_backward),
            (torch_compat.REDUCE_SCATTER, in_backward),
            (torch_compat.ALL_GATHER, in_backward),
        ):
            torch_compat.patch(
                self._collective_patches, private, functools.partial(calling, before=before, after=None)
            )

    def _hook_steps(self) -> None:
        """Observe the steps of all optimizers, also in a job that never wraps a module."""
        from torch.optim import optimizer

        from ddpcheck.agent.dispatcher import Dispatcher

        if not self._hooks:
            self._hooks = [
                optimizer.register_optimizer_step_pre_hook(self._guarded(Dispatcher.before_step)),
                optimizer.register_optimizer_step_post_hook(self._guarded(Dispatcher.after_step)),
            ]

    def _patch_loaders(self) -> None:
        """Observe data loaders. Indices are drawn in the process of the rank, even with workers."""
        from ddpcheck.agent.dispatcher import Dispatcher
        from ddpcheck.patches import around_next, around_next_index

        iterators = torch_compat.lookup(torch_compat.LOADER_ITERATOR)
        if iterators is None:
            return
        drawn = self._guarded(Dispatcher.sample_drawn)
        exhausted = self._guarded(Dispatcher.sampler_exhausted)
        torch_compat.patch(
            self._patches, torch_compat.NEXT_INDEX, lambda draw: around_next_index(draw, drawn, exhausted)
        )
        requested = self._guarded(Dispatcher.batch_requested)
        received = self._guarded(Dispatcher.batch_received)
        ended = self._guarded(Dispatcher.loader_exhausted)
        self._patches.replace(
            iterators, "__next__", lambda take: around_next(take, requested, received, ended)
        )

    def _observe(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
        on_top: bool = False,
    ) -> None:
        def make(original: Any) -> Any:
            wrapper = calling(
                original,
                self._guarded(before) if before is not None else None,
                self._guarded(after) if after is not None else None,
            )
            skip_frame(wrapper)
            return wrapper

        self._patches.replace(owner, name, make, on_top=on_top)

    def _guarded(self, method: Callable[..., None]) -> Any:
        """A guarded call of the current dispatcher's `method`."""
        name = method.__name__
        entry = hidden_entry("agent", name, functools.partial(method, self._dispatcher))
        self._dispatched.append((GUARD.entry_points[f"agent.{name}"], method))
        return entry

    def _dispatch_to(self, dispatcher: Any) -> None:
        """Entry points call methods of one dispatcher directly: a function in between would run ten times per step."""
        for entry, method in self._dispatched:
            entry.body = _ignore if dispatcher is None else functools.partial(method, dispatcher)

    def _group_closed(self, *args: Any, **kwargs: Any) -> None:
        """Called before a process group is destroyed. The session ends with the default group, not with a subgroup."""
        import torch.distributed as distributed

        group = args[0] if args else kwargs.get("group")
        if self._dispatcher is not None and group in (None, distributed.group.WORLD):
            self._dispatcher.close()
            self._dispatcher.context.end()
            self._group_destroyed = True

    def _patch_exits(self) -> None:
        """Patch every exit that Python can observe. After any other exit the record file has no end record."""
        # Guarded under a separate name: the file is closed even if other probes are switched off.
        close = GUARD.protect("exit", "close", self._close, while_capturing=True)
        leaving = GUARD.protect("exit", "leaving", self._leaving, while_capturing=True)
        atexit.register(close)
        self._patches.replace(sys, "exit", lambda original: calling(original, leaving, None))
        # Forked multiprocessing children exit this way, and programs that avoid a hang at exit.
        self._patches.replace(
            os, "_exit", lambda original: calling(original, lambda status=0: (leaving(status), close()), None)
        )
        hook = sys.excepthook
        noted = GUARD.protect("exit", "raised", self._raised, while_capturing=True)

        def excepthook(kind: Any, error: Any, trace: Any) -> None:
            noted(kind, error, trace)
            hook(kind, error, trace)

        sys.excepthook = excepthook

    _error = ("", "")

    def _raised(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        import traceback

        leave_out_wrappers(trace)
        frames = traceback.extract_tb(trace)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        self._error = (_quoted(f"{kind.__name__}: {error}"), where)

    def _leaving(self, status: object = None) -> None:
        if status in (None, 0) or self._error[0]:
            return
        # Launchers such as mp.spawn catch the exception of a rank and exit with a status. It is still available here.
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, SystemExit):
            self._raised(type(error), error, error.__traceback__)
        else:
            self._error = (_quoted(f"exit status {status}"), "")

    def _close(self) -> None:
        if self._dispatcher is not None:
            reason = "raised" if self._error[0] else "exit"
            self._dispatcher.close()
            self._dispatcher.context.close(reason, *self._error, left=self._group_destroyed)

    def _forked(self) -> None:
        """A forked child, usually a data loader worker, is not a rank."""
        if self._dispatcher is not None:
            self._dispatcher.context.abandon()
            self._dispatcher = None
            self._dispatch_to(None)
            STARTUP.end()
            CHECKPOINTS.switch_off()
            from ddpcheck.probes.process.profiler_conflict import PROFILERS

            PROFILERS.forked()


def _quoted(text: str) -> str:
    """The program's error message, shortened and with credentials masked."""
    from ddpcheck.privacy import mask_text

    return mask_text(text[:4000])[:500]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """A forked child is not a rank."""


reach_workers_of_ray = GUARD.protect("agent", "ray", training_thread.reach_workers_of_ray)


def install() -> None:
    """Called once torch's DDP module has been imported."""
    config = Config.from_environment(os.environ)
    if config is not None:
        GUARD.last_resort = _report_early_fault
        GUARD.surroundings = torch_compat.suspend_user_modes
        GUARD.capture_checks = device_api.CAPTURE_CHECKS
        reach_workers_of_ray()
        Agent(config).install()


def _report_early_fault(probe: str, entry: str, error: str, where: str) -> None:
    """Report a fault that occurs before there is a record file, in a file of its own."""
    import torch.distributed as distributed

    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None
    write_fault_line(probe, entry, error, where, rank)
