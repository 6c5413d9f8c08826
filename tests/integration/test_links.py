"""`ddpcheck links` in a lab in which the link of one host is slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import BIN, environment
from tests.lab.host import Host
from tests.lab.lab import Lab, make_lab

pytestmark = [pytest.mark.slow, pytest.mark.needs("lab")]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with make_lab(3, tmp_path) as hosts:
        for host in hosts.hosts:
            host.limit_link(400)
        yield hosts


def test_every_node_reports_the_host_with_the_slow_link(lab: Lab) -> None:
    lab[1].limit_link(40)

    def launch(number: int, host: Host) -> list[object]:
        static = ["--nnodes", 3, "--node-rank", number, "--master-addr", lab[0].name, "--master-port", 29408]
        return [BIN / "ddpcheck", "links", "--seconds", 1, "--", BIN / "torchrun", *static]

    ended = lab.run_all(launch, env=lambda number, host: environment())

    assert [one.status for one in ended] == [10, 10, 10], "\n".join(map(str, ended))
    for one, host in zip(ended, lab.hosts, strict=True):
        assert "node1" in one.stdout
        raw = json.loads((host.folder / "links.json").read_text())
        assert raw["slow"]
        assert raw["looks"] == 3  # a slow link is measured again, and once more later
        [cause] = raw["explanations"]
        assert (cause["kind"], cause["names"]) == ("slow node", ["node1"])
        assert cause["factor"] > 3
        # Each direction of each pair of nodes.
        assert sorted((link["source"], link["target"]) for link in raw["links"]) == [
            (a, b) for a in range(3) for b in range(3) if a != b
        ]
        assert [one["size"] for one in raw["allreduce"]] == sorted({s["size"] for s in raw["allreduce"]})
        for swept in raw["allreduce"]:
            assert swept["busbw"] == pytest.approx(swept["algbw"] * 4 / 3)
