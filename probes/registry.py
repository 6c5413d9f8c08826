"""Finds the probes: every class in a module of this package that derives from `Probe` and has a name."""

from __future__ import annotations

import importlib
import pkgutil

from ddpcheck import probes
from ddpcheck.probes.probe import Probe


def _discover() -> tuple[type[Probe], ...]:
    """The probes in the modules of this package. A new probe needs only a new file."""
    probe_classes: dict[str, type[Probe]] = {}
    for module in pkgutil.iter_modules(probes.__path__):
        if module.ispkg or module.name == __name__.rpartition(".")[2]:
            continue
        name = f"{probes.__name__}.{module.name}"
        for value in vars(importlib.import_module(name)).values():
            is_probe = isinstance(value, type) and issubclass(value, Probe) and value.__module__ == name
            if is_probe and value.name:
                probe_classes[value.name] = value
    return tuple(sorted(probe_classes.values(), key=lambda probe: (probe.phase, probe.name)))


PROBES = _discover()
