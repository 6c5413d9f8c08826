"""The checks of `ddpcheck doctor`: what they receive, the diagnoses they return, and the report.

A check is a function with the decorator `check` in a module of `doctor/checks`. `--json` prints the report, and ranks
send it to the launcher.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.doctor import checks
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.version import VERSION

# Names of the severities in `--json`, where a check that passed is "ok".
LEVELS = {Severity.ERROR: "problem", Severity.WARNING: "warning", Severity.NOTE: "note"}
_OK = "ok"
_SEVERITIES = {level: severity for severity, level in LEVELS.items()} | {_OK: Severity.NOTE}


@dataclass(frozen=True)
class Diagnosis(Finding):
    """A finding whose `code` is the name of its check.

    `hosts` and `ranks` are those that it is about; both are empty if only this machine was checked.
    """

    hosts: tuple[str, ...] = ()
    passed: bool = False

    @property
    def level(self) -> str:
        return _OK if self.passed else LEVELS[self.severity]

    def as_json(self) -> dict[str, Any]:
        return {
            "check": self.code,
            "level": self.level,
            "what": self.message,
            "why": self.cause,
            "fix": self.fix,
            "hosts": list(self.hosts),
            "ranks": list(self.ranks),
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Diagnosis:
        return cls(
            code=raw["check"],
            severity=_SEVERITIES[raw["level"]],
            title=raw["check"],
            message=raw["what"],
            cause=raw["why"],
            fix=raw["fix"],
            hosts=tuple(raw["hosts"]),
            ranks=tuple(raw["ranks"]),
            evidence=raw["evidence"],
            passed=raw["level"] == _OK,
        )


def diagnosis(
    severity: Severity,
    message: str,
    cause: str = "",
    fix: str = "",
    *,
    hosts: Sequence[str] = (),
    ranks: Sequence[int] = (),
    evidence: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """A diagnosis without a code: the registry adds the name of the check."""
    return Diagnosis(
        "",
        severity,
        "",
        message,
        ranks=tuple(ranks),
        evidence=evidence or {},
        cause=cause,
        fix=fix,
        hosts=tuple(hosts),
    )


def problem(message: str, cause: str, fix: str, **about: Any) -> Diagnosis:
    """The job would fail or hang, or ddpcheck could not record it."""
    return diagnosis(Severity.ERROR, message, cause, fix, **about)


def warning(message: str, cause: str, fix: str, **about: Any) -> Diagnosis:
    """It costs speed, changes results, or fails under common circumstances."""
    return diagnosis(Severity.WARNING, message, cause, fix, **about)


def note(message: str, cause: str, fix: str, **about: Any) -> Diagnosis:
    """Worth knowing, and usually harmless."""
    return diagnosis(Severity.NOTE, message, cause, fix, **about)


def ok(message: str, **about: Any) -> Diagnosis:
    """The check passed."""
    return replace(diagnosis(Severity.NOTE, message, **about), passed=True)


_HOST_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class HostClockOffset:
    """Offset of a host's clock from the first host's in seconds, positive if ahead."""

    host: str
    offset: float
    uncertainty: float


@dataclass(frozen=True)
class ConnectionAttempt:
    """One connection attempt between hosts, to the address that gloo binds to on the callee."""

    caller: str
    called: str
    address: str
    # Error text; empty if the connection was made.
    reason: str = ""


@dataclass(frozen=True)
class Host:
    """Ranks that share a machine. Facts of the machine are read from its first rank."""

    name: str
    facts: tuple[Facts, ...]

    @property
    def first(self) -> Facts:
        return self.facts[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(each.rank for each in self.facts if each.rank is not None))


@dataclass(frozen=True)
class DoctorContext:
    """Without a launcher, `facts` holds one process; otherwise every rank that reported."""

    facts: tuple[Facts, ...]
    world_size: int | None = None
    missing: tuple[int, ...] = ()
    clocks: tuple[HostClockOffset, ...] = ()
    calls: tuple[ConnectionAttempt, ...] = ()
    # Why this rank could not reach the others; empty if it did.
    rendezvous_error: str = ""

    @property
    def is_job(self) -> bool:
        return self.world_size is not None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """In the order of their first ranks. Hosts with the same name get a number."""
        by_machine: dict[tuple[str, str], list[Facts]] = {}
        for each in self.facts:
            by_machine.setdefault((each.host, each.place), []).append(each)
        names: list[str] = []
        for host, _ in by_machine:
            same = sum(name == host or name.startswith(f"{host} #") for name in names)
            names.append(f"{host} #{same + 1}" if same else host)
        return tuple(Host(name, tuple(facts)) for name, facts in zip(names, by_machine.values(), strict=True))

    @property
    def spans_hosts(self) -> bool:
        """True if ranks reported from several hosts, or the scheduler announces several."""
        return len(self.hosts) > 1 or any(
            int(each.environment[name]) > 1
            for each in self.facts
            for name in _HOST_COUNTS
            if each.environment.get(name, "").isdecimal()
        )

    def by_host(self, find: Callable[[Facts], Iterable[Diagnosis]]) -> list[Diagnosis]:
        """Diagnoses of `find` for each host."""
        return [self._about(host, host.ranks, each) for host in self.hosts for each in find(host.first)]

    def by_rank(self, find: Callable[[Facts], Iterable[Diagnosis]]) -> list[Diagnosis]:
        """Diagnoses of `find` for each rank."""
        return [
            self._about(host, () if facts.rank is None else (facts.rank,), each)
            for host in self.hosts
            for facts in host.facts
            for each in find(facts)
        ]

    def _about(self, host: Host, ranks: tuple[int, ...], each: Diagnosis) -> Diagnosis:
        return replace(each, hosts=(host.name,), ranks=ranks) if self.is_job else each


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
