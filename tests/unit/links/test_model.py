"""The result of the links survey, as JSON and text."""

from __future__ import annotations

import json

import pytest

from ddpcheck.launcher.rank_tools import rank_command
from ddpcheck.links.evaluate import find_slow_links, is_uneven
from ddpcheck.links.model import BETWEEN, WITHIN, AllReduce, LinksReport, MeasuredLink, Node, render_links
from ddpcheck.links.options import check_seconds, check_tolerance, parse_sizes


def survey(nodes: int, slow: str = "", per_node: int = 1) -> LinksReport:
    hosts = [Node(f"host{n}", tuple(range(n * per_node, (n + 1) * per_node))) for n in range(nodes)]
    links = []
    for a in hosts:
        for b in hosts:
            if a is not b:
                rate = 1e8 / (4 if slow in (a.host, b.host) else 1)
                links.append(MeasuredLink(a.ranks[0], b.ranks[0], BETWEEN, 1e-4, rate, 0.05, 1 << 20, 20))
        links += [
            MeasuredLink(x, y, WITHIN, 1e-5, 1e9, 0.05, 1 << 20, 20)
            for x in a.ranks
            for y in a.ranks
            if x != y
        ]
    explanations = find_slow_links(hosts, links, 1.5)
    swept = (AllReduce(1 << 20, 0.1, 1e7, 2e7),)
    return LinksReport(
        "gloo", tuple(hosts), tuple(links), swept, tuple(explanations), 1.5, 12.0, slow=bool(explanations)
    )


def test_the_slow_host_is_reported() -> None:
    [cause] = survey(4, slow="host2", per_node=2).explanations
    assert (cause.kind, cause.names, cause.group) == ("slow node", ("host2",), BETWEEN)
    assert "host2 is slow in both directions, to all others: 4.0 times slower" in cause.sentence()
    assert "(200 Mbit/s vs. 800 Mbit/s)" in cause.sentence()


def test_a_healthy_network_takes_one_line() -> None:
    report = survey(4)
    assert not report.slow
    assert render_links(report).startswith("No link is slower than 1.5 times its class (4 nodes, 4 ranks")


@pytest.mark.parametrize("nodes", [2, 4, 8, 9, 40])
def test_the_map_fits_a_terminal(nodes: int) -> None:
    text = render_links(survey(nodes, slow="host1"), ascii_only=True)
    body = text.partition("\n\n")[2]
    assert all(len(line) <= 80 for line in body.splitlines())
    assert text.isascii()
    assert body.count("host") >= nodes


def test_the_map_shades_what_is_slow() -> None:
    body = render_links(survey(5, slow="host2")).partition("\n\n")[2]
    rows = [line for line in body.splitlines() if line.startswith("  host")]
    assert [row.count("▓") for row in rows] == [1, 1, 4, 1, 1]


def test_links_json_can_be_read_back() -> None:
    report = survey(3, slow="host1", per_node=2)
    raw = json.loads(report.to_json())
    assert (raw["schema"], raw["slow"], raw["world_size"]) == (1, True, 6)
    assert LinksReport.from_json(report.to_json()) == report


def test_options() -> None:
    assert parse_sizes("1M, 64k,128") == (128, 65536, 1 << 20)
    for wrong in ("", "1T", "-5", "3", "1M,,2M"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_sizes(wrong)
    with pytest.raises(ValueError, match="seconds per pair"):
        check_seconds(float("nan"))
    with pytest.raises(ValueError, match="above 1"):
        check_tolerance(1.0)


def test_each_launcher_gets_the_module_in_its_own_way() -> None:
    torchrun = rank_command(["/opt/bin/torchrun", "--nnodes", "2"], ["--seconds", "1"])
    assert torchrun[3:] == ["-m", "ddpcheck.links", "--seconds", "1"]
    module = rank_command(["python", "-m", "torch.distributed.run"], [])
    assert module[3:] == ["-m", "ddpcheck.links"]
    srun = rank_command(["srun", "-N", "2"], [])
    assert srun[3].endswith(("python", "python3")) or "python" in srun[3]
    assert srun[4:] == ["-m", "ddpcheck.links"]


def test_only_an_uneven_network_is_measured_twice() -> None:
    assert is_uneven(survey(3, slow="host1").links, 1.5)
    # Links of different classes are not compared: within a node they are ten times as fast.
    assert not is_uneven(survey(3, per_node=2).links, 1.5)
