"""`ddpcheck doctor` on this machine, and in a lab whose hosts differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import BIN, environment
from tests.helpers.watched_run import Run
from tests.lab.host import Host
from tests.lab.lab import Ended, Lab, make_lab
from tests.lab.network import RESOLVER_FOLDER, ip

pytestmark = pytest.mark.slow
needs_lab = pytest.mark.needs("lab")


def test_this_machine(unwatched: Run, tmp_path: Path) -> None:
    done = unwatched(BIN / "ddpcheck", "doctor", "--json", WANDB_API_KEY="s3cret", CUDA_LAUNCH_BLOCKING="1")
    report = json.loads(done.stdout)
    levels = {one["check"]: one["level"] for one in report["diagnoses"]}
    assert (done.status, report["schema"], report["verdict"]) == (0, 1, "ok"), str(done)
    assert (levels["torch"], levels["injection"], levels["run folder"]) == ("ok", "ok", "ok")
    assert levels["variables"] == "note"  # of no effect without a GPU
    [facts] = report["facts"]
    assert facts["torch"]["gloo_takes"]["addresses"]
    assert facts["environment"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "s3cret" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with make_lab(3, tmp_path) as hosts:
        yield hosts


def by_hand(lab: Lab) -> Callable[[int, Host], list[object]]:
    """One Python a rank, as `srun python -m ddpcheck.doctor` starts them."""
    return lambda number, host: [BIN / "python", "-m", "ddpcheck.doctor", "--json", "--wait", 150]


def by_torchrun(lab: Lab) -> Callable[[int, Host], list[object]]:
    """A launcher on each host, under `ddpcheck doctor`."""
    port = ["--master-addr", lab[0].address, "--master-port", 29432]
    launcher = [BIN / "torchrun", "--nnodes", 3]
    doctor = [BIN / "ddpcheck", "doctor", "--json", "--wait", 150, "--"]
    return lambda number, host: [*doctor, *launcher, "--node-rank", number, *port]


def asked(lab: Lab, command: Callable[[int, Host], list[object]]) -> list[Ended]:
    def env(number: int, host: Host) -> dict[str, str]:
        meeting = {"MASTER_ADDR": lab[0].address, "MASTER_PORT": "29431"}
        # Nothing tells gloo which interface to take.
        rank = {"RANK": str(number), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": ""}
        return environment(**meeting, **rank)

    return lab.run_all(command, env=env)


def not_well(ended: Ended) -> dict[str, Any]:
    """By check; each says one thing."""
    return {one["check"]: one for one in json.loads(ended.stdout)["diagnoses"] if one["level"] != "ok"}


@needs_lab
def test_hosts_in_good_order(lab: Lab) -> None:
    ended = asked(lab, by_hand(lab))
    assert [one.status for one in ended] == [0, 0, 0], "\n".join(map(str, ended))
    assert [bool(one.stdout) for one in ended] == [True, False, False]  # rank 0 speaks for all
    assert not_well(ended[0]) == {}
    report = json.loads(ended[0].stdout)
    assert [call["reason"] for call in report["calls"]] == [""] * 6
    # All hosts of a lab read one clock.
    assert all(abs(clock["offset"]) <= clock["uncertainty"] for clock in report["clocks"])
    # What gloo itself showed, and what its rule says.
    taken = [each["torch"]["gloo_takes"]["addresses"] for each in report["facts"]]
    assert (
        taken
        == [each["names"]["own"][:1] for each in report["facts"]]
        == [[host.address] for host in lab.hosts]
    )


@needs_lab
def test_a_host_whose_name_is_the_loopback_and_one_of_another_mtu(lab: Lab) -> None:
    names = [f"{host.address} {host.name}" for host in lab.hosts if host is not lab[1]]
    text = "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {lab[1].name}", *names])
    (RESOLVER_FOLDER / lab[1].namespace / "hosts").write_text(f"{text}\n")
    ip("-n", lab[2].namespace, "link", "set", "eth0", "mtu", "1400")

    ended = asked(lab, by_torchrun(lab))

    assert [one.status for one in ended] == [10, 10, 10], "\n".join(map(str, ended))
    found = not_well(ended[0])
    # Every host tells the same, whichever is at fault.
    assert [not_well(one) for one in ended] == [found] * 3
    assert set(found) == {"host name", "connections", "networks"}
    assert (found["host name"]["level"], found["host name"]["hosts"]) == ("problem", ["node1"])
    assert found["host name"]["what"] == "node1 resolves to 127.0.1.1."
    # What gloo itself showed, and what came of trying to connect there.
    assert json.loads(ended[0].stdout)["facts"][1]["torch"]["gloo_takes"] == {"addresses": ["127.0.1.1"]}
    assert found["connections"]["what"] == "No other host can reach node1 at 127.0.1.1 (connection refused)."
    assert found["networks"]["level"] == "warning"
    assert "MTU: 1500 on node0 (eth0); 1400 on node2 (eth0)" in found["networks"]["what"]
    assert [list(host.folder.iterdir()) for host in lab.hosts] == [[], [], []]
