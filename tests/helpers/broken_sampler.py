"""Runs ddpcheck with a sampler that breaks: each source works twice and then raises. Takes ddpcheck's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpcheck.__main__ import main
from ddpcheck.sampling import host, interfaces, tcp

# By name in DDP605: owner and name of the function, and the number of calls that still work.
SOURCES: dict[str, tuple[Any, str, int]] = {
    "interfaces": (interfaces.Interfaces, "read", 2),
    "cpu": (host.Cpu, "read", 2),
    "memory": (host, "memory_used", 2),
    "ranks": (host.RankProcesses, "read", 2),
    "connections": (tcp.Connections, "read", 2),
    "infiniband": (interfaces.InfinibandPorts, "read", 2),
    "interfaces described": (interfaces, "describe", 0),
}


def broken(source: str, original: Callable[..., Any], working_calls: int) -> Callable[..., Any]:
    calls: list[str] = []

    def call(*arguments: Any) -> Any:
        calls.append(source)
        if len(calls) > working_calls:
            raise RuntimeError(f"{source} was made to fail")
        return original(*arguments)

    return call


if __name__ == "__main__":
    for source, (owner, name, working_calls) in SOURCES.items():
        setattr(owner, name, broken(source, getattr(owner, name), working_calls))
    main()
