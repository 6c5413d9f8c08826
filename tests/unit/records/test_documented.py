"""docs/records.md documents every kind and every field."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.registry import SCHEMA, record_kinds
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "records.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("kind", record_kinds())
def test_every_field_is_documented(kind: str) -> None:
    documented = set(re.findall(r"`(\w+)`", SECTIONS[kind]))
    assert {field.name for field in fields(record_kinds()[kind])} <= documented


def test_every_stage_is_documented() -> None:
    assert {stage.value for stage in Stage} <= set(re.findall(r"`([\w.]+)`", SECTIONS["digest"]))


def test_the_version_is_documented() -> None:
    assert f"the version of the format, now {SCHEMA}." in PAGE
