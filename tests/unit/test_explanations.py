"""Every finding has a page, and every page says what people need."""

from __future__ import annotations

import ast
import re

import pytest

from ddpcheck import explanations
from tests.helpers.paths import ROOT

RULES = ROOT / "ddpcheck" / "analysis"


@pytest.mark.parametrize("code", explanations.codes())
def test_a_page_is_whole(code: str) -> None:
    page = explanations.page(code)
    assert page.startswith(f"# {code}: ")
    for said in ("**Meaning.**", "**How ddpcheck tells.**", "**What could fool it.**", "```"):
        assert said in page
    assert re.search(r"\*\*(Fix|Usual causes, and the fix|Where to look)", page)
    assert max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("code", explanations.codes())
def test_python_on_a_page_is_python(code: str) -> None:
    for example in re.findall(r"```python\n(.*?)```", explanations.page(code), re.DOTALL):
        ast.parse(example)


def test_every_code_that_rules_raise_has_a_page() -> None:
    raised = {code for path in RULES.rglob("*.py") for code in re.findall(r'"(DDP\d{3})"', path.read_text())}
    assert raised <= set(explanations.codes())


def test_the_index_lists_every_page_with_its_title() -> None:
    index = (ROOT / "docs" / "findings.md").read_text()
    for code in explanations.codes():
        title = explanations.page(code).splitlines()[0].partition(": ")[2]
        assert f"| [{code}](../ddpcheck/explanations/{code}.md) | {title} |" in index


def test_an_unknown_code_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        explanations.page("../version")
