"""What one process says of itself and of its machine, as it travels between ranks and into the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """A section that could not be read holds its `error`; one that was not asked for is empty."""

    host: str
    # Machine and network namespace: what tells hosts of the same name apart.
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
    # Where this process can be called by other hosts while the doctor runs.
    listener: Section = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Facts:
        """Of another version of ddpcheck, as far as it is known here."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})
