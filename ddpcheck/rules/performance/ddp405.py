"""DDP405: traffic takes a slower interface than the fastest one that connects the nodes."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hardware.routes import Route, open_to_all, taken
from ddpcheck.analysis.hardware.traffic import LinkTraffic, Traffic

# Less than this between two speeds is not worth a warning.
_TIMES_FASTER = 2.0
# Gradients so small cost the same over any interface.
_FEWEST_BYTES = 64 << 10
_MOST_TOLD = 4
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def find(case: RuleContext) -> list[Finding]:
    traffic = case.traffic
    if traffic is None or traffic.gradient_bytes < _FEWEST_BYTES or not _is_whole(case, traffic):
        return []
    used = taken(traffic.nodes)
    if used is None or used.speed is None:
        return []
    better = [
        route for route in open_to_all(traffic.nodes) if (route.speed or 0) >= _TIMES_FASTER * used.speed
    ]
    if not better:
        return []
    return [_finding(case, traffic, used, max(better, key=lambda route: route.speed or 0))]


def _is_whole(case: RuleContext, traffic: Traffic) -> bool:
    """Whether every rank's node was sampled, and there are several."""
    seen = {rank for node in traffic.nodes for rank in node.ranks}
    hosts = {node.host for node in traffic.nodes}
    return len(traffic.nodes) > 1 and len(hosts) == len(traffic.nodes) and seen == set(case.attempt.ranks)


def _finding(case: RuleContext, traffic: Traffic, used: Route, better: Route) -> Finding:
    speed, best = used.speed or 0, better.speed or 0
    moved = sum(link.sent for link in used.links.values())
    return case.finding(
        "DDP405",
        f"{moved / 1e6:.1f} MB a step went between {len(traffic.nodes)} nodes over {_named(used)} "
        f"({speed} Mbit/s). {_named(better)} ({best} Mbit/s) connects the same nodes and was hardly used: "
        f"{best / speed:.3g} times as fast.",
        severity=Severity.WARNING,
        ranks=tuple(sorted(case.attempt.ranks)),
        evidence={
            "interfaces": [
                _told(host, route.links[host])
                for host in list(used.links)[:_MOST_TOLD]
                for route in (used, better)
            ],
            "nodes": len(traffic.nodes),
        },
        cause=_cause(case, traffic.backend),
        fix=_fix(traffic.backend, better),
    )


def _told(host: str, link: LinkTraffic) -> dict[str, Any]:
    return {"node": host, "interface": link.name, "mbit": link.speed, "bytes_a_step": round(link.sent)}


def _named(route: Route) -> str:
    """One name where the nodes agree on it."""
    names = sorted(set(route.names.values()))
    return (
        names[0] if len(names) == 1 else ", ".join(f"{name} on {host}" for host, name in route.names.items())
    )


def _cause(case: RuleContext, backend: str) -> str:
    """Whether somebody chose the interface, as the environment of the ranks tells."""
    environments = [rank.header.environment for rank in case.attempt.ranks.values()]
    for variable in _variables(backend):
        chosen = sorted({environment[variable] for environment in environments if variable in environment})
        if chosen:
            return f"{variable} names it ({', '.join(chosen)})"
    return (
        "nothing tells the backend which interface to take, and it took that of the host's name or the first"
    )


def _variables(backend: str) -> list[str]:
    return [variable for name, variable in _VARIABLES.items() if name in backend]


def _fix(backend: str, better: Route) -> str:
    variables = _variables(backend)
    names = sorted(set(better.names.values()))
    if len(names) == 1:
        said = " and ".join(f"{variable}={names[0]}" for variable in variables) or names[0]
        return f"Set {said} in the job's environment, on every node."
    each = ", ".join(f"{name} on {host}" for host, name in better.names.items())
    return f"Set {' and '.join(variables) or 'the interface'} in the job's environment: {each}."
