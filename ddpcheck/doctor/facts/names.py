"""What this host's own name and the job's meeting point resolve to."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any


def name_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    own = socket.gethostname()
    facts: dict[str, Any] = {"host": own, **_resolved(own)}
    master = environ.get("MASTER_ADDR", "")
    if master:
        facts["master"] = {"name": master, **_resolved(master)}
    return facts


def _resolved(name: str) -> dict[str, Any]:
    """Addresses in the resolver's order: the first that can be bound is the one that gloo takes."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"addresses": [], "reason": str(getattr(error, "strerror", None) or error)}
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return {"addresses": addresses, "own": [address for address in addresses if _can_bind(address)]}


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trying:
            trying.bind((address, 0))
    except OSError:
        return False
    return True
