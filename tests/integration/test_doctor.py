"""`ddpcheck doctor` on this machine, and on the hosts of a lab."""

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
    assert levels["variables"] == "note"  # it has no effect without a GPU
    [facts] = report["facts"]
    assert facts["torch"]["gloo_takes"]["addresses"]
    assert facts["environment"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "s3cret" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with make_lab(3, tmp_path) as hosts:
        yield hosts


def started_by_hand(lab: Lab) -> Callable[[int, Host], list[object]]:
    """One Python per rank, as `srun python -m ddpcheck.doctor` starts them."""
    return lambda number, host: [BIN / "python", "-m", "ddpcheck.doctor", "--json", "--wait", 150]


def by_torchrun(lab: Lab) -> Callable[[int, Host], list[object]]:
    """A launcher on each host, under `ddpcheck doctor`."""
    port = ["--master-addr", lab[0].address, "--master-port", 29432]
    launcher = [BIN / "torchrun", "--nnodes", 3]
    doctor = [BIN / "ddpcheck", "doctor", "--json", "--wait", 150, "--"]
    return lambda number, host: [*doctor, *launcher, "--node-rank", number, *port]


def run_doctor(lab: Lab, command: Callable[[int, Host], list[object]]) -> list[Ended]:
    def env(number: int, host: Host) -> dict[str, str]:
        store = {"MASTER_ADDR": lab[0].address, "MASTER_PORT": "29431"}
        # gloo chooses an interface by itself.
        rank = {"RANK": str(number), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": ""}
        return environment(**store, **rank)

    return lab.run_all(command, env=env)


def problems(ended: Ended) -> dict[str, Any]:
    """Diagnoses that are not ok, by check."""
    return {one["check"]: one for one in json.loads(ended.stdout)["diagnoses"] if one["level"] != "ok"}


@needs_lab
def test_hosts_in_good_order(lab: Lab) -> None:
    ended = run_doctor(lab, started_by_hand(lab))
    assert [one.status for one in ended] == [0, 0, 0], "\n".join(map(str, ended))
    assert [bool(one.stdout) for one in ended] == [True, False, False]  # only rank 0 prints
    assert problems(ended[0]) == {}
    report = json.loads(ended[0].stdout)
    assert [call["reason"] for call in report["calls"]] == [""] * 6
    # All hosts of a lab read one clock.
    assert all(abs(clock["offset"]) <= clock["uncertainty"] for clock in report["clocks"])
    # The address that gloo uses is the one that ddpcheck predicts.
    taken = [each["torch"]["gloo_takes"]["addresses"] for each in report["facts"]]
    assert (
        taken
        == [each["names"]["own"][:1] for each in report["facts"]]
        == [[host.address] for host in lab.hosts]
    )


@needs_lab
def test_a_name_that_resolves_to_loopback_and_another_mtu(lab: Lab) -> None:
    names = [f"{host.address} {host.name}" for host in lab.hosts if host is not lab[1]]
    text = "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {lab[1].name}", *names])
    (RESOLVER_FOLDER / lab[1].namespace / "hosts").write_text(f"{text}\n")
    ip("-n", lab[2].namespace, "link", "set", "eth0", "mtu", "1400")

    ended = run_doctor(lab, by_torchrun(lab))

    assert [one.status for one in ended] == [10, 10, 10], "\n".join(map(str, ended))
    findings = problems(ended[0])
    # Every host reports the same.
    assert [problems(one) for one in ended] == [findings] * 3
    assert set(findings) == {"host name", "connections", "networks"}
    assert (findings["host name"]["level"], findings["host name"]["hosts"]) == ("problem", ["node1"])
    assert "127.0.1.1" in findings["host name"]["what"]
    # The address that gloo uses, and that nobody else can connect to.
    assert json.loads(ended[0].stdout)["facts"][1]["torch"]["gloo_takes"] == {"addresses": ["127.0.1.1"]}
    assert all(word in findings["connections"]["what"] for word in ("node1", "127.0.1.1"))
    assert findings["networks"]["level"] == "warning"
    assert all(word in findings["networks"]["what"] for word in ("1500", "node0", "1400", "node2", "eth0"))
    assert [list(host.folder.iterdir()) for host in lab.hosts] == [[], [], []]
