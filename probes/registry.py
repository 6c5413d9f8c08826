"""Finds the probes: every class in a module of this package that derives from `Probe` and has a name."""

from __future__ import annotations

import importlib
import pkgutil

from ddpcheck import probes
from ddpcheck.probes.probe import Probe


def _discover() -> tuple[type[Probe], ...]:
    """The probes of all modules directly in this package; a new probe is a new file, and no list is edited."""
    found: dict[str, type[Probe]] = {}
    for module in pkgutil.iter_modules(probes.__path__):
        if module.ispkg or module.name == __name__.rpartition(".")[2]:
            continue
        name = f"{probes.__name__}.{module.name}"
        for value in vars(importlib.import_module(name)).values():
            is_probe = isinstance(value, type) and issubclass(value, Probe) and value.__module__ == name
            if is_probe and value.name:
                found[value.name] = value
    return tuple(sorted(found.values(), key=lambda probe: (probe.phase, probe.name)))


PROBES = _discover()
