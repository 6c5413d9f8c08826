"""The input of all checks: the facts of one machine, or of all ranks of a job grouped by host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ddpcheck.doctor.diagnosis import Diagnosis
from ddpcheck.doctor.facts.record import Facts

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
