"""InfiniBand ports: outliers by rate, errors or waiting. The kernel does not see their traffic, only their counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.network.slow_link import LEAST_BYTES, LEAST_FACTOR, LEAST_OF_THE_MOST

# Bit errors, retransmits and lost packets. A healthy port has none in hours.
LEAST_ERRORS = 10
# Factor of errors, or of waiting per byte, compared with every other port.
MANY_TIMES = 10.0
# Minimum number of ticks, which are a few nanoseconds long.
LEAST_WAITED = 10_000_000


@dataclass(frozen=True)
class PortUse:
    """One port between two samples while the ranks stepped."""

    node: str
    name: str
    # Current speed in Mbit/s: with a bad cable, a port falls back to fewer lanes or a lower rate.
    speed: int | None
    sent: int
    received: int
    errors: int
    # Ticks of the port's clock in which it had data and could not send.
    waited: int
    seconds: float

    @property
    def waited_a_byte(self) -> float:
        return self.waited / max(self.sent, 1)


@dataclass(frozen=True)
class SlowPort:
    """`why` is "rate", "errors" or "waiting"; `usual` is the median of the other ports."""

    port: PortUse
    why: str
    own: float
    usual: float


def ports_of(nodes: Mapping[str, NodeSamples]) -> Iterable[PortUse]:
    for name, node in nodes.items():
        before, after = node.opening, node.closing
        if before is None or after is None or after.time <= before.time:
            continue
        for port, facts in node.facts.infiniband.items():
            old, new = before.infiniband.get(port), after.infiniband.get(port)
            if old is None or new is None:
                continue
            received, sent, errors, waited = (max(0, b - a) for a, b in zip(old, new, strict=True))
            yield PortUse(name, port, facts.speed, sent, received, errors, waited, after.time - before.time)


def slow_port(ports: Sequence[PortUse]) -> SlowPort | None:
    """The outlier among the ports that carry the job's traffic; the most reliable sign first."""
    most = max((port.sent for port in ports), default=0)
    used = [port for port in ports if port.sent >= max(LEAST_BYTES, LEAST_OF_THE_MOST * most)]
    if len({port.node for port in used}) < 2:
        return None
    return _by_rate(used) or _by_errors(used) or _by_waiting(used)


def _by_rate(used: Sequence[PortUse]) -> SlowPort | None:
    known = [(port.speed, port) for port in used if port.speed]
    if len(known) < len(used):
        return None
    (speed, port), *rest = sorted(known, key=lambda pair: pair[0])
    others = [speed for speed, _ in rest]
    if speed * LEAST_FACTOR > min(others):
        return None
    return SlowPort(port, "rate", speed, median(others))


def _by_errors(used: Sequence[PortUse]) -> SlowPort | None:
    *rest, port = sorted(used, key=lambda port: port.errors)
    if port.errors < max(LEAST_ERRORS, MANY_TIMES * rest[-1].errors):
        return None
    return SlowPort(port, "errors", port.errors, median(other.errors for other in rest))


def _by_waiting(used: Sequence[PortUse]) -> SlowPort | None:
    """Needs three ports: with two, either of them may be the cause."""
    *rest, port = sorted(used, key=lambda port: port.waited_a_byte)
    if len(rest) < 2 or port.waited < LEAST_WAITED:
        return None
    if port.waited_a_byte < MANY_TIMES * rest[-1].waited_a_byte:
        return None
    return SlowPort(port, "waiting", port.waited_a_byte, median(other.waited_a_byte for other in rest))
