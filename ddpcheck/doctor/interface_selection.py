"""Which interface gloo and NCCL would take on a host."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpcheck.doctor.facts.record import Facts, Section

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# Where its own name leads nowhere gloo takes this address, with a warning.
_FALLBACK = "127.0.0.1"
# Each is tried where none fits the one before.
_NCCL_RULES = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


@dataclass(frozen=True)
class Choice:
    """An address, and the interface that has it where it is known."""

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
        told = [self.address] if self.address != self.name else []
        told += [f"MTU {self.mtu}"] if self.mtu else []
        told += [speed_text(self.speed)] if self.speed else []
        return f"{self.name} ({', '.join(told)})" if told else self.name


def gloo_choice(facts: Facts) -> Choice | None:
    """As gloo itself showed, else by its rule; None where it would fail."""
    shown = facts.torch.get("gloo_takes") or {}
    if shown.get("error"):
        return None
    if shown.get("addresses"):
        return _of_address(facts, str(shown["addresses"][0]))
    asked = gloo_names(facts)
    if asked:
        named = interface_named(facts, asked[0])
        return Choice(bare(named["addresses"][0]), named) if named and named.get("addresses") else None
    own = facts.names.get("own") or [_FALLBACK]
    return _of_address(facts, str(own[0]))


def gloo_names(facts: Facts) -> list[str]:
    """The interfaces that the variable names; torch takes a single letter for nothing."""
    text = facts.environment.get(GLOO_VARIABLE, "")
    return text.split(",") if len(text) > 1 else []


def nccl_choice(facts: Facts) -> Choice | None:
    """By NCCL's documented rule: the first that fits. It may use further ones beside it for data."""
    usable = [one for one in facts.interfaces if one.get("addresses") and one.get("running", True)]
    asked = facts.environment.get(NCCL_VARIABLE, "")
    # A list that only excludes does not exclude the loopback by itself.
    rules = (asked,) if len(asked) > 1 else _NCCL_RULES
    found = next((some for rule in rules if (some := _by(rule, usable))), [])
    return Choice(bare(found[0]["addresses"][0]), found[0]) if found else None


def interface_named(facts: Facts, name: str) -> Section | None:
    return next((one for one in facts.interfaces if one.get("name") == name), None)


def bare(address: str) -> str:
    """Without the length of the network's prefix."""
    return str(address).partition("/")[0]


def speed_text(megabits: int | None) -> str:
    if megabits is None:
        return "unknown speed"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"


def _by(rule: str, interfaces: Sequence[Section]) -> list[Section]:
    return [one for one in interfaces if _fits(rule, str(one["name"]))]


def _fits(rule: str, name: str) -> bool:
    """`eth` is a beginning, `=eth0` the whole name, `^docker,lo` what it must not be; lists are divided by commas."""
    excluded = rule.startswith("^")
    rule = rule[1:] if excluded else rule
    exact = rule.startswith("=")
    # A port may follow a name.
    wanted = [one.partition(":")[0] for one in (rule[1:] if exact else rule).split(",")]
    found = any(name == one if exact else name.startswith(one) for one in wanted)
    return found is not excluded


def _of_address(facts: Facts, address: str) -> Choice:
    for one in facts.interfaces:
        if any(bare(each) == address for each in one.get("addresses", ())):
            return Choice(address, one)
    loopback = next((one for one in facts.interfaces if one.get("class") == "loopback"), {})
    return Choice(address, loopback if _ip(address).is_loopback else {})


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ipaddress.ip_address("0.0.0.0")
