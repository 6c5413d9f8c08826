"""DDP405: traffic uses a slower interface than the fastest one that connects the nodes."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hardware.traffic import LinkTraffic, Route, Traffic, open_to_all, taken
from ddpcheck.rules.rule import Need, Rule, first_sentence

RULE = Rule(
    code="DDP405",
    severity=Severity.WARNING,
    title="Traffic uses a slower interface than available",
    summary="traffic uses a slower network interface than available, and which one to set",
    needs=(Need.TRAFFIC,),
    headline=first_sentence,
    # The interface explains a slow link.
    order=400,
)

# A smaller ratio of speeds is not worth a warning.
_TIMES_FASTER = 2.0
# Smaller gradients cost the same over any interface.
_FEWEST_BYTES = 64 << 10
_MOST_HOSTS = 4
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def find(context: RuleContext) -> list[Finding]:
    traffic = context.traffic
    if traffic is None or traffic.gradient_bytes < _FEWEST_BYTES or not _all_nodes_sampled(context, traffic):
        return []
    used = taken(traffic.nodes)
    if used is None or used.speed is None:
        return []
    better = [
        route for route in open_to_all(traffic.nodes) if (route.speed or 0) >= _TIMES_FASTER * used.speed
    ]
    if not better:
        return []
    return [_finding(context, traffic, used, max(better, key=lambda route: route.speed or 0))]


def _all_nodes_sampled(context: RuleContext, traffic: Traffic) -> bool:
    """Whether the node of every rank was sampled, and there are several nodes."""
    sampled = {rank for node in traffic.nodes for rank in node.ranks}
    hosts = {node.host for node in traffic.nodes}
    return (
        len(traffic.nodes) > 1 and len(hosts) == len(traffic.nodes) and sampled == set(context.attempt.ranks)
    )


def _finding(context: RuleContext, traffic: Traffic, used: Route, better: Route) -> Finding:
    speed, best = used.speed or 0, better.speed or 0
    bytes_per_step = sum(link.sent for link in used.links.values())
    return context.finding(
        RULE,
        f"Traffic between {len(traffic.nodes)} nodes uses {_name(used)} ({speed} Mbit/s), although {_name(better)} "
        f"({best} Mbit/s) is {best / speed:.3g} times as fast. It carries {bytes_per_step / 1e6:.1f} MB per step; "
        "the faster interface connects the same nodes and was hardly used.",
        ranks=tuple(sorted(context.attempt.ranks)),
        evidence={
            "interfaces": [
                _interface_row(host, route.links[host])
                for host in list(used.links)[:_MOST_HOSTS]
                for route in (used, better)
            ],
            "nodes": len(traffic.nodes),
        },
        cause=_cause(context, traffic.backend),
        fix=_fix(traffic.backend, better),
    )


def _interface_row(host: str, link: LinkTraffic) -> dict[str, Any]:
    return {"node": host, "interface": link.name, "mbit": link.speed, "bytes_a_step": round(link.sent)}


def _name(route: Route) -> str:
    """One name if it is the same on all nodes."""
    names = sorted(set(route.names.values()))
    return (
        names[0] if len(names) == 1 else ", ".join(f"{name} on {host}" for host, name in route.names.items())
    )


def _cause(context: RuleContext, backend: str) -> str:
    """Whether the environment of the ranks selects the interface."""
    environments = [rank.header.environment for rank in context.attempt.ranks.values()]
    for variable in _variables(backend):
        chosen = sorted({environment[variable] for environment in environments if variable in environment})
        if chosen:
            return f"{variable} selects it ({', '.join(chosen)})"
    return "no variable selects an interface, so the backend used the one of the host name or the first one"


def _variables(backend: str) -> list[str]:
    return [variable for name, variable in _VARIABLES.items() if name in backend]


def _fix(backend: str, better: Route) -> str:
    variables = _variables(backend)
    names = sorted(set(better.names.values()))
    if len(names) == 1:
        assignments = " and ".join(f"{variable}={names[0]}" for variable in variables) or names[0]
        return f"Set {assignments} in the job's environment, on every node."
    each = ", ".join(f"{name} on {host}" for host, name in better.names.items())
    return f"Set {' and '.join(variables) or 'the interface'} in the job's environment: {each}."
