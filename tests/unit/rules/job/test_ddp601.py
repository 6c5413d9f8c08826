"""DDP601: no rank, or not every rank, reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.run_builder import RunBuilder


def without_ranks(folder: Path, exit_code: int) -> RunBuilder:
    build = RunBuilder(folder, 2)
    build.records.clear()
    build.description["exit_code"] = exit_code
    return build


def test_no_rank_reported(tmp_path: Path) -> None:
    (finding,) = without_ranks(tmp_path, 0).findings()
    assert (finding.code, finding.ranks) == ("DDP601", ())
    assert "-S, -I or -E" in finding.cause
    assert "import ddpcheck.auto" in finding.fix


def test_no_rank_because_the_command_failed(tmp_path: Path) -> None:
    (finding,) = without_ranks(tmp_path, 3).findings()
    assert "exit status 3" in finding.message
    assert "failed before" in finding.cause


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_rank_is_missing(tmp_path: Path, world_size: int) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().train(2).end()
    del build.records[1]
    finding = build.only("DDP601")
    assert finding.ranks == (1,)
    assert finding.evidence["reported"] == [rank for rank in range(world_size) if rank != 1]
    assert build.report().verdict.value == "incomplete"


def test_all_reported(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 4).wrap().end().findings("DDP601") == []


def seen(folder: Path, *reasons: tuple[str, str]) -> RunBuilder:
    build = without_ranks(folder, 0)
    build.notes += [{"kind": "unwatched", "time": 1.0, "why": why, "name": name} for why, name in reasons]
    return build


@pytest.mark.parametrize(
    ("why", "cause", "fix"),
    [
        ("environment", "--export=NONE", "DDPCHECK_CONFIG"),
        ("options", "-S, -I or -E", "import ddpcheck.auto"),
        ("not_installed", "ddpcheck does not exist", "-v "),
        ("no_folder", "run folder does not exist", "-v "),
        ("other_user", "another user", "--out"),
        ("container", "podman starts", "-e PYTHONPATH -e DDPCHECK_CONFIG -v "),
        ("remote", "podman starts", "behind podman"),
    ],
)
def test_the_cause_is_what_the_launcher_saw(tmp_path: Path, why: str, cause: str, fix: str) -> None:
    (finding,) = seen(tmp_path, (why, "podman")).findings()
    assert (finding.code, finding.evidence["unwatched"]) == ("DDP601", {why: "podman"})
    assert cause in finding.cause
    assert fix in finding.fix


def test_what_a_process_of_torch_shows_counts_more_than_a_program_between(tmp_path: Path) -> None:
    (finding,) = seen(tmp_path, ("remote", "srun"), ("environment", "python")).findings()
    assert "--export=NONE" in finding.cause


def test_reasons_of_later_versions_are_ignored(tmp_path: Path) -> None:
    (finding,) = seen(tmp_path, ("moon", "x")).findings()
    assert "-S, -I or -E" in finding.cause


def test_a_container_explains_an_environment_without_the_variables(tmp_path: Path) -> None:
    (finding,) = seen(tmp_path, ("environment", "python"), ("container", "podman")).findings()
    assert "podman" in finding.cause
    assert f"-v {tmp_path}:{tmp_path}" in finding.fix
