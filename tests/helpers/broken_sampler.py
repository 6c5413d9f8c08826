"""ddpcheck with a sampler that breaks: each source answers twice and then raises. Takes ddpcheck's own arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpcheck.__main__ import main
from ddpcheck.sampling import connections, cpu, infiniband, interface_facts, interfaces, processes

SOURCES: dict[str, tuple[Any, str, int]] = {
    "interfaces": (interfaces.Interfaces, "read", 2),
    "cpu": (cpu.Cpu, "read", 2),
    "memory": (cpu, "memory_used", 2),
    "ranks": (processes.RankProcesses, "read", 2),
    "connections": (connections.Connections, "read", 2),
    "infiniband": (infiniband.InfinibandPorts, "read", 2),
    "interfaces described": (interface_facts, "describe", 0),
}


def broken(source: str, original: Callable[..., Any], answers: int) -> Callable[..., Any]:
    calls = []

    def call(*arguments: Any) -> Any:
        calls.append(source)
        if len(calls) > answers:
            raise RuntimeError(f"{source} was made to fail")
        return original(*arguments)

    return call


if __name__ == "__main__":
    for source, (place, name, answers) in SOURCES.items():
        setattr(place, name, broken(source, getattr(place, name), answers))
    main()
