"""The checks of `ddpcheck doctor` and its report, as `--json` prints it and as ranks send it to the launcher.

A check is a function with the decorator `check` in a module of `doctor/checks`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor import checks
from ddpcheck.doctor.context import ConnectionAttempt, DoctorContext, HostClockOffset
from ddpcheck.doctor.diagnosis import Diagnosis
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.version import VERSION

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


# Version of the document. 1 (2026-11): first version.
DOCTOR_SCHEMA = 1


def diagnose(context: DoctorContext) -> tuple[Diagnosis, ...]:
    """The diagnoses of all checks, the most severe first."""
    diagnoses = [each for check in all_checks() for each in _merged(check.run(context))]
    return tuple(sorted(diagnoses, key=lambda each: (each.passed, -each.severity.weight)))


def _merged(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Diagnoses of one check: equal ones of several hosts become one; "ok" is dropped if anything is wrong."""
    merged: dict[tuple[str, str, str], Diagnosis] = {}
    for each in diagnoses:
        key = (each.level, each.message, each.fix)
        merged[key] = _joined(merged[key], each) if key in merged else each
    not_ok = [each for each in merged.values() if not each.passed]
    return not_ok or list(merged.values())


def _joined(one: Diagnosis, other: Diagnosis) -> Diagnosis:
    return replace(
        one,
        hosts=tuple(dict.fromkeys((*one.hosts, *other.hosts))),
        ranks=tuple(sorted({*one.ranks, *other.ranks})),
    )


@dataclass(frozen=True)
class DoctorReport:
    """A context and the diagnoses made from it."""

    context: DoctorContext
    diagnoses: tuple[Diagnosis, ...]

    @classmethod
    def of(cls, context: DoctorContext) -> DoctorReport:
        return cls(context, diagnose(context))

    @property
    def has_problem(self) -> bool:
        return any(each.severity is Severity.ERROR for each in self.diagnoses)

    def to_json(self) -> str:
        document = {
            "schema": DOCTOR_SCHEMA,
            "ddpcheck": VERSION,
            "verdict": "problems" if self.has_problem else "ok",
            "world_size": self.context.world_size,
            "hosts": [{"host": host.name, "ranks": list(host.ranks)} for host in self.context.hosts],
            "diagnoses": [each.as_json() for each in self.diagnoses],
            "missing": list(self.context.missing),
            "clocks": [asdict(clock) for clock in self.context.clocks],
            "calls": [asdict(attempt) for attempt in self.context.calls],
            "apart": self.context.rendezvous_error,
            "facts": [each.as_json() for each in self.context.facts],
        }
        text = json.dumps(document, indent=1, allow_nan=False)
        return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"

    @classmethod
    def from_json(cls, text: str) -> DoctorReport:
        raw = json.loads(text)
        context = DoctorContext(
            facts=tuple(Facts.from_json(each) for each in raw["facts"]),
            world_size=raw["world_size"],
            missing=tuple(raw["missing"]),
            clocks=tuple(HostClockOffset(**each) for each in raw["clocks"]),
            calls=tuple(ConnectionAttempt(**each) for each in raw["calls"]),
            rendezvous_error=raw["apart"],
        )
        return cls(context, tuple(Diagnosis.from_json(each) for each in raw["diagnoses"]))
