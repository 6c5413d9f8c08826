"""Every explanation page has the sections that readers need; test_registry compares pages with rules."""

from __future__ import annotations

import ast
import re

import pytest

from ddpcheck import explanations


@pytest.mark.parametrize("code", explanations.codes())
def test_a_page_has_all_sections(code: str) -> None:
    page = explanations.page(code)
    assert page.startswith(f"# {code}: ")
    for section in ("**Meaning.**", "**How ddpcheck detects it.**", "**What could fool it.**", "```"):
        assert section in page
    assert re.search(r"\*\*(Fix|Usual causes, and the fix|Where to look)", page)
    assert max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("code", explanations.codes())
def test_python_on_a_page_is_valid(code: str) -> None:
    for example in re.findall(r"```python\n(.*?)```", explanations.page(code), re.DOTALL):
        ast.parse(example)


def test_an_unknown_code_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        explanations.page("../version")
