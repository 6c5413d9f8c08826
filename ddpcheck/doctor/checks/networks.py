"""The networks between hosts: MTUs and speeds that do not fit, and a faster one that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddpcheck.analysis.aggregate.agreement import groups_of, odd_ranks
from ddpcheck.analysis.hardware.routes import Route, open_to_all
from ddpcheck.analysis.hardware.traffic import LinkTraffic, NodeTraffic
from ddpcheck.doctor.context import DoctorContext, Host
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.interface_selection import GLOO_VARIABLE, NCCL_VARIABLE, Choice, gloo_choice, speed_text

NAME = "networks"
_TIMES_FASTER = 2.0
_MOST_TOLD = 4


def find(scene: DoctorContext) -> list[Diagnosis]:
    hosts = scene.hosts
    if len(hosts) < 2:
        return []
    chosen = {number: gloo_choice(host.first) for number, host in enumerate(hosts)}
    known = {number: one for number, one in chosen.items() if one is not None and not one.is_loopback}
    found = [
        *_mtus(hosts, known),
        *_speeds(hosts, known),
        *_faster(hosts, known),
    ]
    return found or ([Diagnosis(NAME, Level.OK, _line(known))] if len(known) > 1 else [])


def _mtus(hosts: tuple[Host, ...], known: Mapping[int, Choice]) -> list[Diagnosis]:
    return _unlike(
        hosts,
        known,
        "MTU",
        lambda choice: "" if choice.mtu is None else str(choice.mtu),
        "TCP agrees on the smaller one of two hosts, but knows nothing of a switch between them: then small "
        "messages pass, and large ones stand still. It also shows that the hosts are not set up alike.",
        "Give the interfaces of all hosts the same MTU (`ip link set dev IFACE mtu N`), one that every switch takes.",
    )


def _speeds(hosts: tuple[Host, ...], known: Mapping[int, Choice]) -> list[Diagnosis]:
    return _unlike(
        hosts,
        known,
        "speed",
        lambda choice: "" if choice.speed is None else speed_text(choice.speed),
        "AllReduce goes at the pace of the slowest host.",
        "Look for a cable or a port that came up slower than it should, or for another interface on that host.",
    )


def _unlike(
    hosts: tuple[Host, ...],
    known: Mapping[int, Choice],
    what: str,
    read: Callable[[Choice], str],
    why: str,
    fix: str,
) -> list[Diagnosis]:
    said = {number: text for number, choice in known.items() if (text := read(choice))}
    groups = groups_of(said)
    if len(groups) < 2:
        return []
    told = "; ".join(f"{value} on {_names(hosts, known, some)}" for value, some in groups[:_MOST_TOLD])
    odd = odd_ranks([some for _, some in groups])
    return [
        Diagnosis(
            NAME,
            Level.WARNING,
            f"The interfaces that gloo takes differ in {what}: {told}.",
            why,
            fix,
            hosts=tuple(hosts[number].name for number in odd),
            evidence={
                hosts[number].name: {"interface": known[number].name, what: said[number]} for number in said
            },
        )
    ]


def _names(hosts: tuple[Host, ...], known: Mapping[int, Choice], some: tuple[int, ...]) -> str:
    shown = [f"{hosts[number].name} ({known[number].name})" for number in some[:_MOST_TOLD]]
    more = len(some) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _faster(hosts: tuple[Host, ...], known: Mapping[int, Choice]) -> list[Diagnosis]:
    """As DDP405 finds it in traffic, before there is any."""
    speeds = [choice.speed for choice in known.values() if choice.speed is not None]
    if len(speeds) < len(hosts):
        return []
    routes = [route for route in open_to_all([_as_node(host) for host in hosts]) if route.speed]
    best = max(routes, key=lambda route: route.speed or 0, default=None)
    if best is None or (best.speed or 0) < _TIMES_FASTER * min(speeds):
        return []
    names = sorted(set(best.names.values()))
    return [
        Diagnosis(
            NAME,
            Level.WARNING,
            f"gloo takes an interface of {speed_text(min(speeds))}; {_route(best)} of {speed_text(best.speed)} "
            "connects the same hosts.",
            "Gradients go the slower way (DDP405).",
            f"Set {GLOO_VARIABLE}={names[0]} and {NCCL_VARIABLE}={names[0]} on every host."
            if len(names) == 1
            else f"Set {GLOO_VARIABLE} and {NCCL_VARIABLE}: {_route(best)}.",
            hosts=tuple(host.name for host in hosts),
        )
    ]


def _route(route: Route) -> str:
    names = sorted(set(route.names.values()))
    return (
        names[0] if len(names) == 1 else ", ".join(f"{name} on {host}" for host, name in route.names.items())
    )


def _as_node(host: Host) -> NodeTraffic:
    """In the shape in which networks that are open to all are looked for; nothing has moved yet."""
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


def _line(known: Mapping[int, Choice]) -> str:
    mtu = next((f"MTU {one.mtu}" for one in known.values() if one.mtu), "")
    speed = next((speed_text(one.speed) for one in known.values() if one.speed), "")
    return ", ".join(filter(None, [f"alike on {len(known)} hosts", mtu, speed]))
