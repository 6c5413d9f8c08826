"""The doctor's checks. A check is a function with the decorator `check` in a module of `doctor/checks`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from ddpcheck.doctor import checks
from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis

_Find = Callable[[DoctorContext], Iterable[Diagnosis]]


@dataclass(frozen=True)
class DoctorCheck:
    """One check. `order` is its position among the checks that passed."""

    name: str
    order: int
    find: _Find

    def run(self, context: DoctorContext) -> list[Diagnosis]:
        """Diagnoses of all hosts and ranks. Empty if there is nothing to check."""
        return [replace(each, code=self.name, title=self.name) for each in self.find(context)]


_REGISTERED: dict[str, DoctorCheck] = {}


def check(name: str, *, order: int) -> Callable[[_Find], _Find]:
    """Register a function as the check `name`, the name that reports and `--json` show."""

    def register(find: _Find) -> _Find:
        if name in _REGISTERED:
            raise ValueError(f"two checks are called {name}")
        _REGISTERED[name] = DoctorCheck(name, order, find)
        return find

    return register


@cache
def all_checks() -> tuple[DoctorCheck, ...]:
    """Every registered check, after importing all modules of `doctor/checks`."""
    for module in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        importlib.import_module(module.name)
    return tuple(sorted(_REGISTERED.values(), key=lambda each: each.order))
