"""Networks between hosts: MTU and speed, connections, clock offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.hardware.traffic import LinkTraffic, NodeTraffic, Route, open_to_all
from ddpcheck.doctor.interface_selection import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    InterfaceChoice,
    gloo_choice,
    speed_text,
)
from ddpcheck.doctor.model import (
    ConnectionAttempt,
    Diagnosis,
    DoctorContext,
    Host,
    check,
    ok,
    problem,
    warning,
)
from ddpcheck.formatting import seconds_text

_FASTER_RATIO = 2.0
_MAX_LISTED = 4
_MAX_LISTED = 4
# Hosts that use a time server agree within milliseconds.
_MAX_OFFSET_SECONDS = 1.0


@check("networks", order=80)
def networks(context: DoctorContext) -> list[Diagnosis]:
    hosts = context.hosts
    if len(hosts) < 2:
        return []
    chosen = {number: gloo_choice(host.first) for number, host in enumerate(hosts)}
    usable = {number: one for number, one in chosen.items() if one is not None and not one.is_loopback}
    diagnoses = [
        *_mtus(hosts, usable),
        *_speeds(hosts, usable),
        *_faster_network(hosts, usable),
    ]
    return diagnoses or ([ok(_network_line(usable))] if len(usable) > 1 else [])


def _mtus(hosts: tuple[Host, ...], known: Mapping[int, InterfaceChoice]) -> list[Diagnosis]:
    return _differing(
        hosts,
        known,
        "MTU",
        lambda choice: "" if choice.mtu is None else str(choice.mtu),
        "TCP uses the smaller MTU of two hosts, but a switch between them can have a smaller one: then small messages "
        "arrive and large ones are dropped. Different MTUs also show that the hosts are configured differently.",
        "Set the interfaces of all hosts to the same MTU (`ip link set dev IFACE mtu N`), supported by every switch.",
    )


def _speeds(hosts: tuple[Host, ...], known: Mapping[int, InterfaceChoice]) -> list[Diagnosis]:
    return _differing(
        hosts,
        known,
        "speed",
        lambda choice: "" if choice.speed is None else speed_text(choice.speed),
        "AllReduce runs at the speed of the slowest host.",
        "Check the cable and the port for a lower negotiated speed, or use another interface on that host.",
    )


def _differing(
    hosts: tuple[Host, ...],
    known: Mapping[int, InterfaceChoice],
    what: str,
    read: Callable[[InterfaceChoice], str],
    cause: str,
    fix: str,
) -> list[Diagnosis]:
    values = {number: text for number, choice in known.items() if (text := read(choice))}
    groups = groups_of(values)
    if len(groups) < 2:
        return []
    listed = "; ".join(f"{value} on {_host_list(hosts, known, some)}" for value, some in groups[:_MAX_LISTED])
    outliers = outlier_ranks([some for _, some in groups])
    return [
        warning(
            f"The interfaces that gloo uses differ in {what}: {listed}.",
            cause,
            fix,
            hosts=tuple(hosts[number].name for number in outliers),
            evidence={
                hosts[number].name: {"interface": known[number].name, what: values[number]}
                for number in values
            },
        )
    ]


def _host_list(hosts: tuple[Host, ...], known: Mapping[int, InterfaceChoice], some: tuple[int, ...]) -> str:
    shown = [f"{hosts[number].name} ({known[number].name})" for number in some[:_MAX_LISTED]]
    more = len(some) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _faster_network(hosts: tuple[Host, ...], known: Mapping[int, InterfaceChoice]) -> list[Diagnosis]:
    """Like DDP405, before there is any traffic."""
    speeds = [choice.speed for choice in known.values() if choice.speed is not None]
    if len(speeds) < len(hosts):
        return []
    routes = [route for route in open_to_all([_as_node_traffic(host) for host in hosts]) if route.speed]
    best = max(routes, key=lambda route: route.speed or 0, default=None)
    if best is None or (best.speed or 0) < _FASTER_RATIO * min(speeds):
        return []
    names = sorted(set(best.names.values()))
    return [
        warning(
            f"gloo uses an interface of {speed_text(min(speeds))}; {_route_text(best)} of {speed_text(best.speed)} "
            "connects the same hosts.",
            "Gradients use the slower network (DDP405).",
            f"Set {GLOO_VARIABLE}={names[0]} and {NCCL_VARIABLE}={names[0]} on every host."
            if len(names) == 1
            else f"Set {GLOO_VARIABLE} and {NCCL_VARIABLE}: {_route_text(best)}.",
            hosts=tuple(host.name for host in hosts),
        )
    ]


def _route_text(route: Route) -> str:
    names = sorted(set(route.names.values()))
    return (
        names[0] if len(names) == 1 else ", ".join(f"{name} on {host}" for host, name in route.names.items())
    )


def _as_node_traffic(host: Host) -> NodeTraffic:
    """The host's interfaces as input of `open_to_all`, without traffic."""
    links = tuple(
        LinkTraffic(
            str(one.get("class", "network")),
            str(one["name"]),
            0.0,
            0.0,
            one.get("speed"),
            bool(one.get("running", True)),
            tuple(one.get("addresses", ())),
        )
        for one in host.first.interfaces
    )
    return NodeTraffic(host.name, host.ranks, 0.0, 0.0, links, {})


def _network_line(known: Mapping[int, InterfaceChoice]) -> str:
    mtu = next((f"MTU {one.mtu}" for one in known.values() if one.mtu), "")
    speed = next((speed_text(one.speed) for one in known.values() if one.speed), "")
    return ", ".join(filter(None, [f"same on {len(known)} hosts", mtu, speed]))


@check("connections", order=90)
def connections(context: DoctorContext) -> list[Diagnosis]:
    if not context.calls:
        return []
    failed: dict[tuple[str, str], list[ConnectionAttempt]] = {}
    for call in context.calls:
        if call.reason:
            failed.setdefault((call.called, call.address), []).append(call)
    if not failed:
        return [ok(f"{len(context.calls)} tried between hosts, all succeeded")]
    return [_unreachable(context, *key, calls) for key, calls in failed.items()]


def _unreachable(
    context: DoctorContext, called: str, address: str, calls: list[ConnectionAttempt]
) -> Diagnosis:
    tried = sum(call.called == called for call in context.calls)
    callers = [call.caller for call in calls]
    callers_text = "No other host" if len(calls) == tried else f"{', '.join(callers[:_MAX_LISTED])}"
    more = (
        f" and {len(callers) - _MAX_LISTED} more" if len(calls) < tried and len(callers) > _MAX_LISTED else ""
    )
    verb = "can reach" if len(calls) == tried else "cannot reach"
    reasons = ", ".join(sorted({call.reason for call in calls}))
    return problem(
        f"{callers_text}{more} {verb} {called} at {address} ({reasons}).",
        "gloo binds to this address there, so other ranks cannot connect to it and the job hangs.",
        "If the address is right, check for a firewall between the hosts. Otherwise set GLOO_SOCKET_IFNAME there.",
        hosts=(called,),
        evidence={"callers": callers[:64]},
    )


@check("clocks", order=180)
def clocks(context: DoctorContext) -> list[Diagnosis]:
    if not context.clocks:
        return []
    # Lower bounds of the offsets.
    certain = {clock.host: abs(clock.offset) - clock.uncertainty for clock in context.clocks}
    off = [clock for clock in context.clocks if certain[clock.host] > _MAX_OFFSET_SECONDS]
    if not off:
        largest = max(abs(clock.offset) for clock in context.clocks)
        uncertainty = max(clock.uncertainty for clock in context.clocks)
        text = f"within {seconds_text(max(largest, 1e-3))} (+/- {seconds_text(max(uncertainty, 1e-3))})"
        return [ok(text)]
    worst = max(off, key=lambda clock: abs(clock.offset))
    way = "ahead of" if worst.offset > 0 else "behind"
    more = (
        f"; {len(off) - 1} more hosts are off by more than {_MAX_OFFSET_SECONDS:g} s" if len(off) > 1 else ""
    )
    return [
        warning(
            f"The clock of {worst.host} is {seconds_text(abs(worst.offset))} {way} that of rank 0's host{more}.",
            "Logs and traces of the hosts do not align, files on shared storage have wrong times, and storage services "
            "reject requests with a wrong time.",
            "Synchronize all hosts with the same time server (`timedatectl`, `chronyc tracking`).",
            hosts=tuple(clock.host for clock in off),
            evidence={clock.host: round(clock.offset, 3) for clock in off},
        )
    ]
