"""DDP405: traffic uses a slower interface than the fastest one that connects the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report_builder import analyse_run
from tests.helpers.cluster import BYTES, Cluster, Interface


def found_in(cluster: Cluster) -> list[Finding]:
    cluster.build()
    return [finding for finding in analyse_run(cluster.folder).findings if finding.code == "DDP405"]


def slow(number: int, **options: Any) -> Interface:
    given = {
        "name": "eth0",
        "a_second": BYTES,
        "speed": 1000,
        "addresses": [f"10.0.0.{number + 1}/24"],
        **options,
    }
    return Interface(**given)


def fast(number: int, **options: Any) -> Interface:
    given = {"name": "ens2", "speed": 100_000, "addresses": [f"10.1.0.{number + 1}/24"], **options}
    return Interface(**given)


@pytest.mark.parametrize(
    ("backend", "variable"), [("gloo", "GLOO_SOCKET_IFNAME"), ("nccl", "NCCL_SOCKET_IFNAME")]
)
def test_a_faster_network_is_left_idle(tmp_path: Path, backend: str, variable: str) -> None:
    [finding] = found_in(Cluster(tmp_path, [[slow(n), fast(n)] for n in range(3)], backend=backend))
    assert (finding.severity.value, finding.ranks) == ("warning", (0, 1, 2))
    assert finding.fix == f"Set {variable}=ens2 in the job's environment, on every node."
    assert "100 times as fast" in finding.message
    assert finding.evidence["interfaces"][:2] == [
        {"node": "node0", "interface": "eth0", "mbit": 1000, "bytes_a_step": BYTES},
        {"node": "node0", "interface": "ens2", "mbit": 100_000, "bytes_a_step": 0},
    ]


def test_the_variable_that_selects_the_interface(tmp_path: Path) -> None:
    nodes = [[slow(n), fast(n)] for n in range(2)]
    [chosen] = found_in(Cluster(tmp_path / "a", nodes, environment={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert chosen.cause == "GLOO_SOCKET_IFNAME selects it (eth0)"
    [left] = found_in(Cluster(tmp_path / "b", nodes))
    assert left.cause.startswith("no variable selects an interface")


def test_names_that_differ_from_node_to_node(tmp_path: Path) -> None:
    nodes = [[slow(n), fast(n, name=f"ens{n}")] for n in range(2)]
    [finding] = found_in(Cluster(tmp_path, nodes))
    assert "ens0 on node0, ens1 on node1" in finding.fix


def test_of_several_networks_the_fastest_is_reported(tmp_path: Path) -> None:
    middle = [Interface("ens1", 0.0, 10_000, [f"10.2.0.{n + 1}/24"]) for n in range(2)]
    [finding] = found_in(Cluster(tmp_path, [[slow(n), middle[n], fast(n)] for n in range(2)]))
    assert "=ens2 " in finding.fix


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([[slow(n)] for n in range(2)], id="there is no other"),
        pytest.param([[slow(n), fast(n, speed=1500)] for n in range(2)], id="hardly faster"),
        pytest.param([[slow(n), fast(n, speed=None)] for n in range(2)], id="its speed is not known"),
        pytest.param([[slow(n, speed=None), fast(n)] for n in range(2)], id="nor that of the one taken"),
        pytest.param([[slow(n), fast(n, running=n == 0)] for n in range(2)], id="down on one node"),
        pytest.param([[slow(0), fast(0)], [slow(1)]], id="one node does not have it"),
        pytest.param(
            [[slow(n), fast(n, addresses=[f"10.{n}.9.1/24"])] for n in range(2)], id="another network on each"
        ),
        pytest.param(
            [[slow(n), fast(n, addresses=["172.17.0.1/16"])] for n in range(2)],
            id="the same address, as docker0",
        ),
        pytest.param(
            [[slow(n), fast(n, addresses=[f"10.1.0.{n}/32"])] for n in range(2)], id="no network at all"
        ),
        pytest.param(
            [[slow(n), fast(n, speed=100_000 if n else 1000)] for n in range(2)], id="slow on one node"
        ),
        pytest.param(
            [[slow(n, a_second=9.0), fast(n, a_second=BYTES)] for n in range(2)], id="the fast one is used"
        ),
        pytest.param([[slow(n), fast(n, a_second=BYTES)] for n in range(2)], id="both are used"),
        pytest.param([[slow(n, a_second=0.1 * BYTES), fast(n)] for n in range(2)], id="it went another way"),
        pytest.param([[slow(0), fast(0)]], id="one node"),
        pytest.param([[slow(n), fast(n, addresses=["nonsense"])] for n in range(2)], id="no address"),
    ],
)
def test_nothing_is_reported(tmp_path: Path, nodes: list[list[Interface]]) -> None:
    assert found_in(Cluster(tmp_path, nodes)) == []


@pytest.mark.parametrize("options", [{"steps": 8}, {"hook": "powerSGD_hook"}, {"reductions": 0.01}])
def test_jobs_with_too_few_measurements(tmp_path: Path, options: dict[str, Any]) -> None:
    assert found_in(Cluster(tmp_path, [[slow(n), fast(n)] for n in range(2)], **options)) == []


def test_a_node_that_was_not_sampled(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, [[slow(n), fast(n)] for n in range(3)])
    cluster.build()
    (tmp_path / "node-node2.jsonl").unlink()
    assert [f for f in analyse_run(tmp_path).findings if f.code == "DDP405"] == []
