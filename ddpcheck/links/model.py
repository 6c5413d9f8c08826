"""The result of `ddpcheck links`, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Version of links.json. 1 (2026-11): first version.
LINKS_SCHEMA = 1

BETWEEN = "between nodes"
WITHIN = "within a node"


@dataclass(frozen=True)
class MeasuredLink:
    """One direction from one rank to another."""

    source: int
    target: int
    # Class of links it is compared with: `BETWEEN` or `WITHIN`.
    group: str
    # Seconds one way, and bytes per second.
    latency: float
    bandwidth: float
    # Spread of repeated measurements, relative to the bandwidth.
    spread: float
    # Size in bytes and number of the messages that the bandwidth was measured with.
    size: int
    messages: int


@dataclass(frozen=True)
class AllReduce:
    """An AllReduce of `size` bytes over all ranks; bandwidths in bytes per second."""

    size: int
    seconds: float
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Node:
    """A host and its ranks; the first one measures links between nodes."""

    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LinkExplanation:
    """The common cause of a set of slow links."""

    kind: str
    group: str
    # Hosts, or ranks within a node, that it is about; for islands, those of the smaller one.
    names: tuple[str, ...]
    # Slowdown relative to the other links of the class, and posterior probability.
    factor: float
    confidence: float
    # Bytes per second: of the slow links, and of the others.
    bandwidth: float
    usual: float
    links: int

    def sentence(self) -> str:
        what = _WORDS[self.kind].format(*self.names, all=", ".join(self.names))
        return (
            f"{what}: {self.factor:.1f} times slower than other links {self.group} "
            f"({megabits(self.bandwidth)} vs. {megabits(self.usual)}), confidence {self.confidence:.0%}"
        )


_WORDS = {
    "slow node": "{0} is slow in both directions, to all others",
    "slow sending": "{0} sends slowly to all others",
    "slow receiving": "{0} receives slowly from all others",
    "slow link": "the link between {0} and {1} is slow in both directions",
    "slow direction": "the link from {0} to {1} is slow in this direction",
    "islands": "two groups of nodes have slow links between them; one group is {all}",
    "slow inside": "links inside {0} are slow",
}


@dataclass(frozen=True)
class LinksReport:
    """The complete measurement."""

    backend: str
    nodes: tuple[Node, ...]
    links: tuple[MeasuredLink, ...]
    allreduce: tuple[AllReduce, ...]
    explanations: tuple[LinkExplanation, ...]
    tolerance: float
    seconds: float
    # Number of measurements: 2 if the first was uneven, 3 if a cause was found.
    looks: int = 1
    slow: bool = field(default=False)
    schema: int = LINKS_SCHEMA

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    def to_json(self) -> str:
        raw = {"schema": self.schema, "slow": self.slow, "world_size": self.world_size, **asdict(self)}
        return json.dumps(raw, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LinksReport:
        raw = json.loads(text)
        return cls(
            backend=raw["backend"],
            nodes=tuple(Node(one["host"], tuple(one["ranks"])) for one in raw["nodes"]),
            links=tuple(MeasuredLink(**_known(MeasuredLink, one)) for one in raw["links"]),
            allreduce=tuple(AllReduce(**_known(AllReduce, one)) for one in raw["allreduce"]),
            explanations=tuple(
                LinkExplanation(**{**_known(LinkExplanation, one), "names": tuple(one["names"])})
                for one in raw["explanations"]
            ),
            tolerance=raw["tolerance"],
            seconds=raw["seconds"],
            looks=raw["looks"],
            slow=raw["slow"],
        )


def megabits(bytes_per_second: float) -> str:
    """In bits per second: `940 Mbit/s`, `12.5 Gbit/s`."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _known(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {key: value for key, value in raw.items() if key in names}
