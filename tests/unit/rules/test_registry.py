"""Every rule is listed, and every code has its page and its file."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from ddpcheck import explanations, rules
from ddpcheck.rules.registry import RULES
from tests.helpers.run_builder import RunBuilder

FOLDER = Path(next(iter(rules.__path__)))
FILES = sorted(path.stem for path in FOLDER.rglob("ddp*.py"))


def test_every_rule_file_is_listed_once() -> None:
    listed = sorted(rule.__module__.rpartition(".")[2] for rule in RULES)
    assert listed == FILES


def test_every_code_has_a_page_and_every_page_a_rule() -> None:
    assert sorted(code.lower() for code in explanations.codes()) == FILES


def test_a_rule_raises_its_own_code_alone() -> None:
    for name in FILES:
        [path] = FOLDER.rglob(f"{name}.py")
        source = path.read_text()
        module = importlib.import_module(f"ddpcheck.rules.{path.parent.name}.{name}")
        assert (module.__doc__ or "").startswith(f"{name.upper()}: ")
        assert set(re.findall(r'finding\(\s*"(DDP\d{3})"', source)) == {name.upper()}


def test_no_rule_finds_anything_in_a_sound_run(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap(buffers=["norm.mean"]).optimizer().train(10).end()
    assert build.findings() == []
