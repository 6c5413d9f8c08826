"""Which interface gloo and NCCL select on a host."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpcheck.doctor.facts.record import Facts, Section

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# gloo binds to this address, with a warning, if the host name does not resolve.
_FALLBACK = "127.0.0.1"
# Tried in this order; the first rule that matches any interface is used.
_NCCL_DEFAULT_FILTERS = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


@dataclass(frozen=True)
class InterfaceChoice:
    """An address, and its interface if known."""

    address: str
    interface: Section = field(default_factory=dict)

    @property
    def is_loopback(self) -> bool:
        return _ip(self.address).is_loopback

    @property
    def name(self) -> str:
        return str(self.interface.get("name") or ("lo" if self.is_loopback else self.address))

    @property
    def mtu(self) -> int | None:
        return self.interface.get("mtu")

    @property
    def speed(self) -> int | None:
        return self.interface.get("speed")

    def __str__(self) -> str:
        details = [self.address] if self.address != self.name else []
        details += [f"MTU {self.mtu}"] if self.mtu else []
        details += [speed_text(self.speed)] if self.speed else []
        return f"{self.name} ({', '.join(details)})" if details else self.name


def gloo_choice(facts: Facts) -> InterfaceChoice | None:
    """As measured with gloo, otherwise by its documented rule. None if gloo would fail."""
    measured = facts.torch.get("gloo_takes") or {}
    if measured.get("error"):
        return None
    if measured.get("addresses"):
        return _of_address(facts, str(measured["addresses"][0]))
    asked = gloo_names(facts)
    if asked:
        named = interface_named(facts, asked[0])
        return (
            InterfaceChoice(bare(named["addresses"][0]), named) if named and named.get("addresses") else None
        )
    own = facts.names.get("own") or [_FALLBACK]
    return _of_address(facts, str(own[0]))


def gloo_names(facts: Facts) -> list[str]:
    """Interfaces in GLOO_SOCKET_IFNAME; torch ignores values of one character."""
    text = facts.environment.get(GLOO_VARIABLE, "")
    return text.split(",") if len(text) > 1 else []


def nccl_choice(facts: Facts) -> InterfaceChoice | None:
    """The first interface that NCCL's documented rule matches. NCCL may use more of them for data."""
    usable = [one for one in facts.interfaces if one.get("addresses") and one.get("running", True)]
    asked = facts.environment.get(NCCL_VARIABLE, "")
    # A list with only exclusions does not exclude the loopback.
    rules = (asked,) if len(asked) > 1 else _NCCL_DEFAULT_FILTERS
    matching = next((some for rule in rules if (some := _matching(rule, usable))), [])
    return InterfaceChoice(bare(matching[0]["addresses"][0]), matching[0]) if matching else None


def interface_named(facts: Facts, name: str) -> Section | None:
    return next((one for one in facts.interfaces if one.get("name") == name), None)


def bare(address: str) -> str:
    """The address without its prefix length."""
    return str(address).partition("/")[0]


def speed_text(megabits: int | None) -> str:
    if megabits is None:
        return "unknown speed"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"


def _matching(rule: str, interfaces: Sequence[Section]) -> list[Section]:
    return [one for one in interfaces if _matches(rule, str(one["name"]))]


def _matches(rule: str, name: str) -> bool:
    """`eth` is a prefix, `=eth0` an exact name, `^docker,lo` an exclusion; lists are comma-separated."""
    excluded = rule.startswith("^")
    rule = rule[1:] if excluded else rule
    exact = rule.startswith("=")
    # A port may follow a name.
    wanted = [one.partition(":")[0] for one in (rule[1:] if exact else rule).split(",")]
    matched = any(name == one if exact else name.startswith(one) for one in wanted)
    return matched is not excluded


def _of_address(facts: Facts, address: str) -> InterfaceChoice:
    for one in facts.interfaces:
        if any(bare(each) == address for each in one.get("addresses", ())):
            return InterfaceChoice(address, one)
    loopback = next((one for one in facts.interfaces if one.get("class") == "loopback"), {})
    return InterfaceChoice(address, loopback if _ip(address).is_loopback else {})


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ipaddress.ip_address("0.0.0.0")
