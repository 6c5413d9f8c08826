"""The context of one rank, from the creation of its process group to its exit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import profiler

from ddpcheck import torch_compat
from ddpcheck.agent.budget import REQUESTED, Budget
from ddpcheck.agent.graph_tracker import GraphTracker
from ddpcheck.agent.identity import header, job_store, session_id
from ddpcheck.agent.shm_exchange import ShmExchange, join_exchange
from ddpcheck.agent.writer import BLOCK_SECONDS, RecordWriter
from ddpcheck.config import Config
from ddpcheck.guard import GUARD, EntryPoint
from ddpcheck.machine_identity import host_name
from ddpcheck.probes.digest import make_digester
from ddpcheck.probes.live_compare.node import NodeCompare
from ddpcheck.probes.live_compare.store import StoreCompare
from ddpcheck.probes.probe import EVENTS, BudgetItem, Phase, Probe
from ddpcheck.probes.registry import PROBES
from ddpcheck.records.kinds.rank import EndRecord, FaultRecord
from ddpcheck.records.reasons import NO_EXCHANGE
from ddpcheck.records.registry import Record

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ddpcheck.probes.probe import Args

T = TypeVar("T")
R = TypeVar("R")

SPAN_NAME = "ddpcheck"
# How long a constructor of DDP may wait for a slow disk.
FLUSH_SECONDS = 0.5
# Handlers on which the budget does not depend are timed at every step at first, and then at every n-th, as estimates:
# to read the clock takes as long as many of them. An odd number, since rare work is done at multiples of powers of two.
TIMED_STEPS, TIMED_EVERY = 64, 9


def in_profiler_span(entry: Callable[..., R]) -> Callable[..., R]:
    """`entry`, inside a profiler span while a profiler records."""

    def call(*args: Any) -> R:
        if not getattr(profiler, torch_compat.PROFILING.name, True):
            return entry(*args)
        with profiler.record_function(SPAN_NAME):
            return entry(*args)

    return call


class RankContext:
    """Holds the record file, the exchange and the probes of this rank."""

    def __init__(self, config: Config, number: int) -> None:
        distributed: Any = torch.distributed
        self.config = config
        self.rank: int = distributed.get_rank()
        self.world_size: int = distributed.get_world_size()
        self.session = session_id(number)
        self._pid = os.getpid()
        self._closed = False
        self._ended = False
        self.over = False
        # Counted by the guard and by `emit`.
        self.own_ns = 0
        self.entered = 0
        # Steps so far, and how many steps the times of the current one stand for; 0: only what is always timed is.
        self._steps = 0
        self._weight = 1
        self._writer = _open_writer(
            Path(config.run_dir),
            self.rank,
            make_folder=not config.own_launcher,
            # The launcher that stops the job reads along.
            block_seconds=0.0 if config.fail_fast else BLOCK_SECONDS,
        )
        algorithm = make_digester("cpu").algorithm
        self.host = host_name(config.launcher_host, config.launcher_boot)
        self.write(header(self.session, algorithm, self.host))
        self.exchange = self._open_exchange(config)
        GUARD.report_to(self._fault)
        GUARD.clock = self
        self._graphs = GraphTracker(self.write)
        GUARD.skipped = self._graphs.skipped
        torch_compat.report_to(self._missing_name)
        self.node_compare: NodeCompare | None = None
        if self.exchange is not None:
            # Guarded separately: if no thread can be started, the comparison within the node still works.
            store_compare = GUARD.protect("across_nodes", "begin", self._open_store_compare)(
                self.exchange, algorithm
            )
            self.node_compare = NodeCompare(self, self.exchange, store_compare)
        # All entry points whose time is counted: those of each probe, and those of each item of the budget.
        self._entries: dict[str, list[EntryPoint]] = {}
        self._item_entries: list[list[EntryPoint]] = [[] for _ in BudgetItem]
        self.budget = Budget(config, self.exchange, self.write, self)
        self._handlers: dict[Callable[..., None], list[EntryPoint]] = {event: [] for event in EVENTS}
        probes = [kind(self) for kind in sorted(PROBES, key=lambda kind: kind.phase) if kind.wanted(config)]
        for probe in probes:
            self._register(probe)

    def call_last(self, probe: Probe) -> None:
        """From now on, also call the methods of `after_others`. Jobs without a device never need them."""
        for event, method in probe.after_others.items():
            self._add_handler(probe, getattr(Probe, event), f"{event}.last", getattr(probe, method))

    def call(self, probe: Probe, *events: Callable[..., None]) -> None:
        """From now on, also call these handlers of the probe, which are among its `on_demand`."""
        for event in events:
            self._add_handler(probe, event, event.__name__, getattr(probe, event.__name__))
            if probe.phase is not Phase.DEFAULT:
                # Before the handlers of other probes.
                *others, own = self._handlers[event]
                self._handlers[event] = [own, *others]

    def stop_calling(self, probe: Probe, *events: Callable[..., None]) -> None:
        """The probe needs these events no more."""
        for event in events:
            kept = [
                entry
                for entry in self._handlers[event]
                if (entry.probe, entry.name) != (probe.name, event.__name__)
            ]
            # A new list: the old one may be in use.
            self._handlers[event] = kept

    def _register(self, probe: Probe) -> None:
        """Register the events that the probe overrides; others are not called."""
        self._entries.setdefault(probe.name, [])
        for event in EVENTS:
            name = event.__name__
            if getattr(type(probe), name) is event or name in probe.on_demand:
                continue
            self._add_handler(probe, event, name, getattr(probe, name))

    def _add_handler(
        self, probe: Probe, event: Callable[..., None], name: str, handler: Callable[..., None]
    ) -> None:
        # The probe that starts and stops the profiler cannot run inside a span of that profiler.
        if self.config.profile and probe.phase is not Phase.PROFILER:
            handler = in_profiler_span(handler)
        entry = GUARD.register(probe.name, name, handler)
        entry.always_timed = name in probe.budget_items or probe.name in REQUESTED
        self._entries[probe.name].append(entry)
        if name in probe.budget_items:
            self._item_entries[probe.budget_items[name]].append(entry)
        # A new list: an event under way does not call it.
        self._handlers[event] = [*self._handlers[event], entry]

    def probe_ns(self) -> dict[str, int]:
        """Nanoseconds that each probe has taken on the training thread; the rest of `own_ns` is the agent's.

        In part estimated from some steps.
        """
        return {probe: sum(entry.ns for entry in entries) for probe, entries in self._entries.items()}

    def item_ns(self) -> list[int]:
        """Nanoseconds that each item of the budget has taken on the training thread."""
        return [sum([entry.ns for entry in entries]) for entries in self._item_entries]

    def _open_exchange(self, config: Config) -> ShmExchange | None:
        if not config.exchange_file:
            return None
        try:
            return join_exchange(config, self.rank)
        except OSError as error:
            # The rank runs in another container, or all slots are taken. Digests are still compared, from the files.
            self.write(FaultRecord(NO_EXCHANGE, "open", f"{type(error).__name__}: {error}", "", os.getpid()))
            return None

    def _open_store_compare(self, exchange: ShmExchange, algorithm: str) -> StoreCompare | None:
        """None if all ranks share one exchange, or if the job's store cannot be used."""
        if self.world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size):
            return None
        store = job_store()
        return None if store is None else StoreCompare(self, store, str(exchange.path), algorithm)

    def guarded(self, probe: str, name: str, body: Callable[[T], R]) -> Callable[[T], R | None]:
        """`body` for the dispatcher: an error switches off `probe`, and its time counts as time of that probe."""
        entry = GUARD.register(probe, name, in_profiler_span(body) if self.config.profile else body)
        self._entries.setdefault(probe, []).append(entry)
        off = GUARD.off

        def timed(argument: T) -> R | None:
            if probe in off:
                return None
            began = perf_counter_ns()
            try:
                result: R = entry.body(argument)
            except Exception as error:
                GUARD.switch_off(entry, error)
                return None
            entry.ns += perf_counter_ns() - began
            return result

        return timed

    def entry_point(self, probe: Probe, name: str, body: Callable[..., T]) -> Callable[..., T | None]:
        """`body` for calls from the program outside of events: guarded, and its time counts as the probe's."""
        protected = GUARD.protect(probe.name, name, body, timed=True)
        self._entries.setdefault(probe.name, []).append(GUARD.entry_points[f"{probe.name}.{name}"])
        return protected

    def forwards_captured(self) -> bool:
        """Whether a graph holds a forward: its replays are not counted."""
        return self._graphs.forwards_captured

    def job_ns(self) -> int:
        """The time that the job has taken, without ddpcheck's own: it does not advance during an entry."""
        return (self.entered or perf_counter_ns()) - self.own_ns

    def emit(self, event: Callable[[Probe, Unpack[Args]], None], *args: Unpack[Args]) -> None:
        """Call the handlers of `event`, and count the time that each of them takes.

        About 30 handlers run in a step, so the guard is part of this loop instead of a call around each of them.
        """
        if GUARD.capture_checks and GUARD.capturing():
            GUARD.skipped(event.__name__)
            return
        called = self._handlers[event]
        if not called:
            return
        entered = 0
        if not self.entered:
            self.entered = entered = perf_counter_ns()
        off, weight = GUARD.off, self._weight
        handlers = iter(called)
        while True:
            try:
                for entry in handlers:
                    if off and entry.probe in off:
                        continue
                    if weight or entry.always_timed:
                        began = perf_counter_ns()
                        entry.body(*args)
                        spent = perf_counter_ns() - began
                        entry.ns += spent if entry.always_timed else weight * spent
                    else:
                        entry.body(*args)
                break
            except Exception as error:
                # Continues with the handler after this one.
                GUARD.switch_off(entry, error)
        if entered:
            self.own_ns += perf_counter_ns() - entered
            self.entered = 0

    def step_done(self) -> None:
        """An optimizer of the job has stepped."""
        self._steps += 1
        if self._steps >= TIMED_STEPS:
            self._weight = 0 if self._steps % TIMED_EVERY else TIMED_EVERY

    def write(self, record: Record) -> None:
        self._writer.write(record)
        self._report_write_error()

    def write_later(self, make: Callable[[], Record]) -> None:
        """Write the record that `make` returns; the writer's thread calls it."""
        self._writer.write_later(make)
        self._report_write_error()

    def flush(self) -> None:
        """Wait until all records so far are written, for a bounded time."""
        self._writer.flush(seconds=FLUSH_SECONDS)

    def _report_write_error(self) -> None:
        if self._writer.failed and self.exchange is not None:
            self.exchange.report_write_error(self._writer.failed)

    def _missing_name(self, name: str, message: str) -> None:
        self.write(FaultRecord("torch_compat", name, message, "", os.getpid()))

    def _fault(self, probe: str, entry: str, error: str, where: str) -> None:
        self.write(FaultRecord(probe, entry, error, where, os.getpid()))
        # The process may not exit in an orderly way.
        self._writer.flush()

    def end(self) -> None:
        """Called before the process group is destroyed: emits `before_exit`, once."""
        if not self._ended:
            self._ended = True
            self.emit(Probe.before_exit)
            self.budget.close()
            self._graphs.close()

    def close(self, reason: str, error: str = "", where: str = "", left: bool = False) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.end()
        # Release the probes and all objects that they hold.
        self.over = True
        self._handlers = {event: [] for event in EVENTS}
        self._writer.close(EndRecord(reason, time.time(), error, where, self._writer.dropped, left))
        if self.exchange is not None:
            if self._writer.failed:
                self.exchange.report_write_error(self._writer.failed)
            # One that ranks have made in the run folder is not locked; the launcher removes it.
            if self.exchange.path == Path(self.config.exchange_file):
                self.exchange.remove_if_abandoned()

    def abandon(self) -> None:
        """Called in a forked child, which is not a rank."""
        self._closed = True
        self._writer.abandon()


def _open_writer(
    folder: Path, rank: int, *, make_folder: bool = False, block_seconds: float = BLOCK_SECONDS
) -> RecordWriter:
    """Create a new file. After a restart the first names exist already."""
    if make_folder:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for attempt in range(10_000):
        suffix = f".{attempt}" if attempt else ""
        try:
            return RecordWriter(folder / f"rank-{rank:05d}{suffix}.jsonl", block_seconds)
        except FileExistsError:
            continue
    raise FileExistsError(f"no free name for rank {rank} in {folder}")
