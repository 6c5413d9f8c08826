"""The facts of one process and its machine, as ranks exchange them and `--json` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """Facts by section. A section that could not be read holds an `error`; one that was not read is empty."""

    host: str
    # Hash of boot ID and network namespace: distinguishes hosts with the same name.
    place: str = ""
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    python: Section = field(default_factory=dict)
    torch: Section = field(default_factory=dict)
    names: Section = field(default_factory=dict)
    interfaces: Sequence[Section] = ()
    infiniband: Sequence[Section] = ()
    gpus: Section = field(default_factory=dict)
    limits: Section = field(default_factory=dict)
    memory: Section = field(default_factory=dict)
    processors: Section = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Section = field(default_factory=dict)
    injection: Section = field(default_factory=dict)
    # Address, port and token of the socket that other hosts connect to while the doctor runs.
    listener: Section = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Facts:
        """Decode facts; fields that this version does not know are dropped."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})
