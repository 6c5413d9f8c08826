"""Merges run folders of several nodes, and reports on a single node of a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.errors import NotOneJob, OutputFolderError, RunNotFound
from ddpcheck.launcher.multi_node.merge import merge_runs
from ddpcheck.records.kinds.rank import NodeMismatchRecord, NodesRecord, RankHeader
from ddpcheck.records.registry import RECENT_SUFFIX, recent_header
from tests.helpers.run_builder import RunBuilder

OUTLIERS = {1: ["body.bias"]}


def split(folder: Path, session: str = "a" * 32, outliers: dict[int, list[str]] | None = None) -> list[Path]:
    """The run folders of two nodes, one rank each, without shared storage."""
    build = (
        RunBuilder(folder / "all", 2, session=session)
        .wrap()
        .optimizer()
        .train(4, outliers=outliers or {})
        .end()
    )
    build.save()
    parts = []
    for rank in (0, 1):
        part = folder / f"node{rank}"
        part.mkdir(parents=True)
        name = f"rank-{rank:05d}.jsonl"
        (part / name).write_bytes((folder / "all" / name).read_bytes())
        (part / "run.json").write_text(json.dumps({**build.description, "name": "train", "seconds": rank}))
        (part / "node-same.jsonl").write_text(f'{{"kind":"node","host":"same","pid":{rank}}}\n')
        (part / "report.json").write_text("{}")
        (part / "captures").mkdir()
        (part / "captures" / f"of-{rank}").write_text("x")
        parts.append(part)
    return parts


def test_a_merged_run_has_findings_across_nodes(tmp_path: Path) -> None:
    parts = split(tmp_path, outliers=OUTLIERS)
    whole = merge_runs(parts, tmp_path / "whole")
    [finding] = analyse_run(whole).findings
    assert finding.code == "DDP201"
    assert sorted(path.name for path in whole.iterdir()) == [
        "captures",
        "node-same.jsonl",
        "rank-00000.jsonl",
        "rank-00001.jsonl",
        "run.json",
    ]
    assert sorted(path.name for path in (whole / "captures").iterdir()) == ["of-0", "of-1"]
    assert len((whole / "node-same.jsonl").read_text().splitlines()) == 2
    assert json.loads((whole / "run.json").read_text())["merged"] == [str(part) for part in parts]


def test_the_exit_code_is_that_of_a_failed_node(tmp_path: Path) -> None:
    parts = split(tmp_path)
    run = json.loads((parts[1] / "run.json").read_text())
    (parts[1] / "run.json").write_text(json.dumps({**run, "exit_code": 3}))
    assert analyse_run(merge_runs(parts, tmp_path / "whole")).exit_code == 3
    del run["ended"]
    (parts[1] / "run.json").write_text(json.dumps(run))
    assert analyse_run(merge_runs(parts, tmp_path / "again")).exit_code is None


def test_the_second_file_of_a_killed_rank_is_merged_with_its_records(tmp_path: Path) -> None:
    parts = split(tmp_path)
    path = parts[1] / "rank-00001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]))
    recent = recent_header(path.stat().st_size) + b"".join(lines[5:-1])
    path.with_suffix(RECENT_SUFFIX).write_bytes(recent)
    whole = merge_runs(parts, tmp_path / "whole")
    assert (whole / path.name).with_suffix(RECENT_SUFFIX).read_bytes() == recent
    assert analyse_run(whole).steps == 4


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    parts = split(tmp_path)
    whole = merge_runs([*parts, parts[0]], tmp_path / "whole")
    assert len(list(whole.glob("rank-*.jsonl"))) == 2


def test_other_jobs_and_other_folders_are_refused(tmp_path: Path) -> None:
    one, other = split(tmp_path / "x"), split(tmp_path / "y", session="b" * 32)
    with pytest.raises(NotOneJob):
        merge_runs([one[0], other[1]], tmp_path / "whole")
    with pytest.raises(RunNotFound):
        merge_runs([one[0], tmp_path / "nowhere"], tmp_path / "whole")
    with pytest.raises(OutputFolderError):
        merge_runs(one, one[0])
    assert not (tmp_path / "whole").exists()


def one_node(folder: Path, *records: NodeMismatchRecord | NodesRecord) -> RunBuilder:
    """The run folder of rank 0 of a job whose other rank wrote to another folder."""
    build = RunBuilder(folder, 2).wrap().optimizer().train(6)
    build.records[0].extend(records)
    build.end()
    del build.records[1]
    first = build.records[0][0]
    assert isinstance(first, RankHeader)
    build.records[0][0] = replace(first, host="node0")
    return build


def apart(stage: str, step: int) -> NodeMismatchRecord:
    return NodeMismatchRecord(0, stage, "parameters", step, "aa", "bb", 1, "node1", 0)


def test_a_single_node_reports_mismatches_found_through_the_store(tmp_path: Path) -> None:
    there = NodesRecord({"1": "node1"}, compared=7)
    report = one_node(tmp_path, there, apart("params", 4), apart("params", 3), apart("applied", 3)).report()
    [finding] = report.findings
    assert (finding.code, finding.step, finding.ranks) == ("DDP201", 3, (0, 1))
    assert finding.cause == "the gradients that the optimizer applied already differed between nodes"
    assert report.verdict.value == "findings"
    assert report.checks[-1].outcome == "differ"


def test_a_single_node_without_mismatch_has_no_findings(tmp_path: Path) -> None:
    report = one_node(tmp_path, NodesRecord({"1": "node1"}, compared=7)).report()
    assert (report.verdict.value, report.findings) == ("ok", ())
    assert [(host.host, host.here) for host in report.hosts] == [("node0", True), ("node1", False)]
    assert (report.checks[-1].compared, report.checks[-1].outcome) == (7, "agree")


def test_different_gradients_alone_are_no_finding(tmp_path: Path) -> None:
    assert one_node(tmp_path, NodesRecord({"1": "node1"}), apart("applied", 3)).report().findings == ()
