"""report.json: its keys, strict JSON, and decoding."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import AttemptSummary, Check, RankStatus, RankSummary, Report, Verdict
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.errors import RunUnreadable
from ddpcheck.reports.json_report import from_json, to_json
from tests.helpers.cluster import Cluster, Interface
from tests.helpers.paths import ROOT

SCHEMA = ROOT / "docs" / "report.schema.json"

REPORT = Report(
    verdict=Verdict.FINDINGS,
    world_size=2,
    steps=5,
    command=("torchrun", "train.py"),
    exit_code=None,
    findings=(
        Finding(
            code="DDP201",
            severity=Severity.ERROR,
            title="Parameters diverged",
            message="they did",
            module="0",
            step=3,
            stage="params",
            parameter="weight",
            ranks=(0, 1),
            evidence={"groups": [{"ranks": [0], "digest": "ab"}, {"ranks": [1], "digest": "cd"}]},
        ),
    ),
    attempts=(
        AttemptSummary(0, 2, 5, (RankSummary(0, RankStatus.FINISHED), RankSummary(1, RankStatus.DIED))),
    ),
    checks=(Check("parameters after each step", 5, "differ"),),
    run={"path": "ddpcheck-runs/x"},
)


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def with_evidence(**evidence: Any) -> Report:
    return replace(REPORT, findings=(replace(REPORT.findings[0], evidence=evidence),))


def test_keys_are_the_public_ones_in_order() -> None:
    document = strict(to_json(REPORT))
    assert " ".join(document) == (
        "schema verdict world_size steps command exit_code findings attempts checks coverage not_judged data "
        "hardware traffic links time cost memory startup overlap "
        "agreement gradients environment hosts run"
    )
    assert " ".join(document["findings"][0]) == (
        "code severity title message module step stage parameter ranks evidence cause fix attempt"
    )


def test_round_trip() -> None:
    assert from_json(to_json(REPORT)) == REPORT


def test_it_follows_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(strict(to_json(REPORT)), schema)


def test_non_finite_numbers_become_words() -> None:
    values = {"a": math.nan, "b": [math.inf, -math.inf], "c": {"d": (1.5, True, None)}}
    evidence = strict(to_json(with_evidence(**values)))["findings"][0]["evidence"]
    assert evidence == {"a": "nan", "b": ["inf", "-inf"], "c": {"d": [1.5, True, None]}}


def test_values_without_a_json_type_become_text() -> None:
    evidence = strict(to_json(with_evidence(path=Path("/a"), by_rank={0: 1}, kind=Severity.NOTE, z=1j)))
    assert evidence["findings"][0]["evidence"] == {
        "path": "/a",
        "by_rank": {"0": 1},
        "kind": "note",
        "z": "1j",
    }


def test_a_name_that_is_not_unicode_stays_readable() -> None:
    text = to_json(replace(REPORT, command=("train\udcff.py",)))
    assert strict(text)["command"] == ["train\\udcff.py"]


def test_unknown_keys_are_left_out() -> None:
    document = strict(to_json(REPORT))
    document["later"] = document["findings"][0]["later"] = document["checks"][0]["later"] = 1
    assert from_json(json.dumps(document)) == REPORT


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"schema": 1}', '{"schema": "x"}'])
def test_other_files_are_rejected_with_one_sentence(text: str) -> None:
    with pytest.raises(RunUnreadable, match=r"not a report\.json"):
        from_json(text)


def test_a_later_schema_is_rejected() -> None:
    document = {**strict(to_json(REPORT)), "schema": 99}
    with pytest.raises(RunUnreadable, match="schema 99"):
        from_json(json.dumps(document))


def test_machines_follow_the_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    gpu = {"index": 0, "name": "x", "memory": 9, "clock": 5, "pcie": [5, 16], "nvlinks": [0], "mig": []}
    nodes = [[Interface("eth0", 5e6, 1000, [f"10.0.0.{n + 1}/24"])] for n in range(2)]
    sample = {"busy": 5, "ecc": [0, 0], "memory": 7, "clock": 4, "pcie_link": [5, 8], "throttled": 4}
    facts = {"nvml": {"driver": "570", "gpus": [gpu], "topology": [["X"]], "p2p": [[True]]}}
    Cluster(tmp_path, nodes, more_facts=facts, more_samples={"gpus": [sample]}).build()
    report = analyse_run(tmp_path)
    document = strict(to_json(report))
    assert document["hardware"]["nodes"][1]["gpus"][0]["throttled"] == {"power cap": 1.0}
    assert document["traffic"]["nodes"][1]["classes"]["network"]["sent"] == 5_000_000
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert to_json(from_json(to_json(report))) == to_json(report)
