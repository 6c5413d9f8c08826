"""All that is known when checks begin: one machine alone, or the ranks of a job on their hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ddpcheck.doctor.diagnosis import Diagnosis
from ddpcheck.doctor.facts.record import Facts

_HOST_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class HostClockOffset:
    """How far a host's clock is ahead of the first host's, in seconds."""

    host: str
    offset: float
    uncertainty: float


@dataclass(frozen=True)
class ConnectionAttempt:
    """One host tried to connect to another, at the address that gloo takes there."""

    caller: str
    called: str
    address: str
    # Why it could not; empty where it could.
    reason: str = ""


@dataclass(frozen=True)
class Host:
    """Ranks that share a machine; what is the same for all of them is told by the first."""

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
    """`facts` of one process where there is no launcher, else of every rank that reported."""

    facts: tuple[Facts, ...]
    world_size: int | None = None
    missing: tuple[int, ...] = ()
    clocks: tuple[HostClockOffset, ...] = ()
    calls: tuple[ConnectionAttempt, ...] = ()
    # Why the ranks could not come together, where this one is alone for that.
    apart: str = ""

    @property
    def is_job(self) -> bool:
        return self.world_size is not None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """In the order of their first ranks; hosts of the same name are told apart by a number."""
        places: dict[tuple[str, str], list[Facts]] = {}
        for each in self.facts:
            places.setdefault((each.host, each.place), []).append(each)
        names: list[str] = []
        for host, _ in places:
            same = sum(name == host or name.startswith(f"{host} #") for name in names)
            names.append(f"{host} #{same + 1}" if same else host)
        return tuple(Host(name, tuple(facts)) for name, facts in zip(names, places.values(), strict=True))

    @property
    def spans_hosts(self) -> bool:
        """As it is seen, or as a scheduler says of the job to come."""
        return len(self.hosts) > 1 or any(
            int(each.environment[name]) > 1
            for each in self.facts
            for name in _HOST_COUNTS
            if each.environment.get(name, "").isdecimal()
        )

    def by_host(self, look: Callable[[Facts], Iterable[Diagnosis]]) -> list[Diagnosis]:
        """What `look` says of each host."""
        return [self._about(host, host.ranks, found) for host in self.hosts for found in look(host.first)]

    def by_rank(self, look: Callable[[Facts], Iterable[Diagnosis]]) -> list[Diagnosis]:
        """What `look` says of each rank."""
        return [
            self._about(host, () if facts.rank is None else (facts.rank,), found)
            for host in self.hosts
            for facts in host.facts
            for found in look(facts)
        ]

    def _about(self, host: Host, ranks: tuple[int, ...], found: Diagnosis) -> Diagnosis:
        return replace(found, hosts=(host.name,), ranks=ranks) if self.is_job else found
