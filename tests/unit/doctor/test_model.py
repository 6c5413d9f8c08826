"""The report of the doctor."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ddpcheck.__main__ import main
from ddpcheck.doctor.interface_selection import nccl_choice
from ddpcheck.doctor.model import DoctorContext, DoctorReport
from ddpcheck.reports.terminal.doctor import as_text, render
from tests.helpers.doctor_contexts import card, job, loopback, machine, single


def shown(context: DoctorContext, width: int = 80) -> str:
    text = io.StringIO()
    render(DoctorReport.of(context), Console(file=text, width=width))
    return text.getvalue()


def broken_job() -> DoctorContext:
    context = job(2, 2, lambda facts: replace(facts, limits={**facts.limits, "open_files": [1024, 4096]}))
    facts = [
        *context.facts[:3],
        replace(context.facts[3], torch={"error": "ImportError: libfoo.so.1: not found"}),
    ]
    return replace(context, facts=tuple(facts))


def test_problems_come_first_and_passed_checks_take_one_line() -> None:
    lines = shown(broken_job()).splitlines()
    assert lines[0].startswith("1 problem, ")
    assert lines[1] == "node0 (ranks 0-1), node1 (ranks 2-3)"
    assert lines[3].startswith("PROBLEM  torch cannot be imported: ImportError: libfoo.so.1")
    assert any(line.startswith("  where  node1 (rank 3)") for line in lines)
    well = [line for line in lines if line.startswith("ok")]
    assert [line.split()[1] for line in well][:2] == ["ranks", "python"]
    assert lines.index(next(line for line in lines if line.startswith("NOTE"))) < lines.index(well[0])


@pytest.mark.parametrize("context", [single(), broken_job(), job(40, 1)])
def test_it_fits_a_narrow_terminal(context: DoctorContext) -> None:
    text = shown(context)
    assert max(map(len, text.splitlines())) <= 80
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_healthy_machine() -> None:
    text = shown(single())
    assert text.startswith("No problems found\nthis machine, node0\n")
    assert "gloo uses eth0 (10.0.0.1, MTU 1500, 10 Gbit/s)" in text


def test_passed_checks_take_one_line_for_all_hosts() -> None:
    lines = [line for line in shown(job(40, 1), 120).splitlines() if line.startswith("ok  interfaces")]
    [line] = lines
    assert "gloo uses eth0 (10.0.0.1, MTU 1500, 10 Gbit/s) on node0; 39 more in --json" in line


def test_hostile_names_are_shown_as_text() -> None:
    text = shown(single(host="\x1b[31mred[/red]"))
    assert "\x1b" not in text
    assert "[/red]" in text


def test_it_can_be_read_back() -> None:
    report = DoctorReport.of(broken_job())
    raw = json.loads(report.to_json())
    assert (raw["schema"], raw["verdict"], raw["world_size"]) == (1, "problems", 4)
    assert raw["hosts"] == [{"host": "node0", "ranks": [0, 1]}, {"host": "node1", "ranks": [2, 3]}]
    again = DoctorReport.from_json(report.to_json())
    assert again.diagnoses == report.diagnoses
    assert again.to_json() == report.to_json()
    assert DoctorReport.from_json(DoctorReport.of(single()).to_json()).context.world_size is None


def test_ascii_where_nothing_else_can_be_shown() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = as_text(DoctorReport.of(single(host="knöten")), stream)
    assert text.isascii()


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (None, "ib0"),
        ("eth", "eth0"),
        ("=eth1", "eth1"),
        # A list of exclusions does not exclude the loopback.
        ("^ib,docker", "lo"),
        ("^ib,docker,lo", "eth0"),
        ("^=ib0,docker0,eth0,lo", "eth1"),
        # The order is the system's.
        ("ib0,eth1", "eth1"),
        ("wlan", None),
    ],
)
def test_the_interface_by_nccls_documentation(asked: str | None, taken: str | None) -> None:
    names = ("docker0", "eth0", "eth1", "ib0")
    rows = [loopback(), *(card(name, f"10.{number}.0.1/24") for number, name in enumerate(names))]
    environment = {} if asked is None else {"NCCL_SOCKET_IFNAME": asked}
    choice = nccl_choice(machine(interfaces=rows, environment=environment))
    assert (choice.name if choice else None) == taken
    # Without InfiniBand, what is neither docker's nor the loopback.
    if asked is None:
        assert getattr(nccl_choice(machine(interfaces=rows[:-1])), "name", None) == "eth0"
        assert getattr(nccl_choice(machine(interfaces=rows[:2])), "name", None) == "docker0"
        assert getattr(nccl_choice(machine(interfaces=rows[:1])), "name", None) == "lo"


@pytest.mark.parametrize(
    ("arguments", "status", "because"),
    [
        (["--wait", "0"], 2, "--wait 0"),
        (["--python", sys.executable, "--", "torchrun"], 2, "--python"),
        (["--", "/no/such/launcher"], 127, "cannot start"),
        (["--", "false"], 1, "false exited with status 1"),
        (["--", "true"], 1, "python -m ddpcheck.doctor"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], status: int, because: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == status
    assert because in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
