"""Times calls in which the program waits for other ranks or for a device, by call site."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ddpcheck.device_api import on_device
from ddpcheck.guard import GUARD
from ddpcheck.patches import Patches, around, hide_from_compiler, skip_frame
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.needless import HostWait

MOST_SITES = 32
# Methods of a tensor that copy values of a device to the host, and wait for them.
READING_METHODS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")


class CallSite:
    """Calls of one function from one line."""

    __slots__ = ("calls", "ns", "step", "steps")

    def __init__(self) -> None:
        self.calls = self.ns = self.steps = 0
        # The last step with a call.
        self.step = -1


class HostWaits:
    """Patches the functions until `end`, and counts calls of the thread that created it.

    On the CPU, reading a tensor waits for nothing: its methods are patched for devices only.
    """

    def __init__(self, probe: Probe, context: ProbeContext, devices: set[str], step: int) -> None:
        self.first = self.step = step
        self._probe, self._context = probe, context
        self._thread = get_ident()
        self._patches = Patches()
        self._sites: dict[tuple[HostWait, str, str], CallSite] = {}
        barrier = self._observer(HostWait.BARRIER, "barrier")
        for owner in (torch.distributed, sys.modules["torch.distributed.distributed_c10d"]):
            self._patches.replace(owner, "barrier", barrier)
        if not devices:
            return
        synchronize = self._observer(HostWait.DEVICE, "synchronize")
        for name in (*sorted(devices), "accelerator"):
            module = getattr(torch, name, None)
            if module is not None:
                self._patches.replace(module, "synchronize", synchronize)
        for name in READING_METHODS:
            self._patches.replace(torch.Tensor, name, self._observer(HostWait.DEVICE, name))

    def _observer(self, kind: HostWait, name: str) -> Callable[[Any], Callable[..., Any]]:
        reads = name in READING_METHODS

        def begun(*args: Any, **kwargs: Any) -> int | None:
            if get_ident() != self._thread or (reads and not on_device(args[0])):
                return None
            return self._context.job_ns()

        def ended(began: int) -> None:
            self._add(kind, name, self._context.job_ns() - began)

        begin = hide_from_compiler(self._context.entry_point(self._probe, f"{name}_begun", begun))
        end = hide_from_compiler(self._context.entry_point(self._probe, f"{name}_ended", ended))

        def begin_of_program(*args: Any, **kwargs: Any) -> int | None:
            # A probe that reads a tensor is not the program.
            clock = GUARD.clock
            result: int | None = None if clock is not None and clock.entered else begin(*args, **kwargs)
            return result

        def end_of_program(began: int | None, args: Any, kwargs: Any) -> None:
            if began is not None:
                end(began)

        def make(original: Any) -> Callable[..., Any]:
            wrapper = around(original, begin_of_program, end_of_program)
            skip_frame(wrapper)
            return wrapper

        return make

    def _add(self, kind: HostWait, name: str, ns: int) -> None:
        key = (kind, name, user_callsite())
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MOST_SITES:
                return
            site = self._sites[key] = CallSite()
        site.calls += 1
        site.ns += max(0, ns)
        if site.step != self.step:
            site.step = self.step
            site.steps += 1

    def end(self) -> None:
        self._patches.remove()

    def rows(self) -> list[list[str | int]]:
        return [
            [kind.value, name, where, site.steps, site.calls, site.ns // 1000]
            for (kind, name, where), site in self._sites.items()
        ]
