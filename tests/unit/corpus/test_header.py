"""Headers of corpus scripts: read whole, and refused with a message that names the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.header import HeaderError, parse_header, read_header
from tests.corpus.run import FAULTS, HEALTHY, ROOT, VARIANTS, collect

PATH = Path("examples/faults/bypass.py")

FAULT = """Forward through `model.module`.

A sentence: with a colon.

bug: 1 7
seen in: minimind#853
ranks: 3
expect: DDP202
cause: wrapper bypassed
stage: applied
step: 2
outliers: 0 1
parameter: net.*
also: DDP209
launcher: torchrun
options: --hang-timeout 5
exit: fails
"""


def changed(old: str, new: str) -> str:
    assert old in FAULT
    return FAULT.replace(old, new)


def test_a_fault() -> None:
    header = parse_header(PATH, FAULT)
    assert (header.name, header.title, header.healthy) == ("bypass", "Forward through `model.module`.", False)
    assert (header.bugs, header.seen_in, header.ranks) == ((1, 7), "minimind#853", (3,))
    assert (header.expect, header.cause, header.stage) == ("DDP202", "wrapper bypassed", "applied")
    assert (header.step, header.outliers, header.parameter) == (2, (0, 1), "net.*")
    assert (header.also, header.launcher, header.options) == (
        ("DDP209",),
        "torchrun",
        ("--hang-timeout", "5"),
    )
    assert header.fails
    assert not header.hangs


def test_a_healthy_family() -> None:
    header = parse_header(PATH, "Sound.\n\nranks: 1 2\nexpect: nothing\ncases: a b")
    assert header.healthy
    assert (header.ranks, header.cases, header.step, header.outliers) == ((1, 2), ("a", "b"), None, None)


def test_an_indented_line_goes_on_with_the_one_before() -> None:
    header = parse_header(PATH, "Sound.\n\nranks: 1 2\nexpect: nothing\ncases: a b\n    c d: e")
    assert header.cases == ("a", "b", "c", "d:", "e")


@pytest.mark.parametrize("word", ["none", "-1"])
def test_a_finding_without_a_step(word: str) -> None:
    assert parse_header(PATH, changed("step: 2", f"step: {word}")).step == -1


def test_a_note_that_is_a_variant_of_nothing() -> None:
    header = parse_header(PATH, changed("bug: 1 7", "variant of: -\nseverity: note"))
    assert (header.note, header.variant_of) == (True, "")


@pytest.mark.parametrize(
    ("docstring", "complaint"),
    [
        (changed("cause: wrapper", "reason: wrapper"), "there is no key 'reason'"),
        (changed("step: 2", "step: 2\nstep: 3"), "'step' is there twice"),
        (changed("step: 2", "step: two"), "`step` is 'two'"),
        (changed("step: 2\n", ""), "says `cause`, `step` and `outliers` too"),
        (changed("DDP202", "202"), "`expect` is '202'"),
        (changed("ranks: 3\n", ""), "`ranks` is missing"),
        (changed("ranks: 3\n", "ranks: 0\n"), "`ranks` is '0'"),
        (changed("outliers: 0 1", "outliers: first"), "`outliers` is 'first'"),
        (changed("also: DDP209", "also: more"), "`also` has 'more'"),
        (changed("cause:", "severity: error\ncause:"), "`severity` is 'error'"),
        (changed("torchrun", "srun"), "`launcher` is 'srun'"),
        (changed("exit: fails", "exit: 3"), "`exit` is '3'"),
        ("Title.\n\nranks: 2\nexpect: nothing\nstep: 3", "expects nothing has no 'step'"),
        ("Title.\n\nranks: 2\nexpect: nothing\nseverity: note", "expects nothing has no 'severity'"),
        ("Title only, no header", "is not `key: value`"),
    ],
)
def test_what_is_refused(docstring: str, complaint: str) -> None:
    with pytest.raises(HeaderError, match=r"examples/faults/bypass\.py: ") as refused:
        parse_header(PATH, docstring)
    assert complaint in str(refused.value)


def test_a_script_without_docstring(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    script.write_text("x = 1\n")
    with pytest.raises(HeaderError, match="no docstring"):
        read_header(script)


def test_all_scripts_of_the_project_have_a_sound_header() -> None:
    faults, variants, healthy = (collect(ROOT / folder) for folder in (FAULTS, VARIANTS, HEALTHY))
    assert all(header.healthy for header in healthy)
    assert sum(len(header.cases) or 1 for header in healthy) >= 40
    assert all(not header.healthy and header.bugs for header in faults)
    assert all(not header.healthy for header in variants)
    names = {header.name for header in [*faults, *variants]}
    assert {header.variant_of for header in variants} <= {*names, ""}


def test_a_script_that_needs_a_version_of_torch() -> None:
    header = parse_header(PATH, changed("exit: fails\n", "torch: 2.10\n"))
    assert header.torch == (2, 10)
    assert header.lacks("2.9.1+cu128") == "needs torch 2.10"
    assert [header.lacks(version) for version in ("2.10.0", "2.11.0a0+git", "3.0.0")] == ["", "", ""]
    assert parse_header(PATH, FAULT).lacks("2.0.0") == ""
    with pytest.raises(HeaderError, match="torch"):
        parse_header(PATH, changed("exit: fails\n", "torch: new\n"))
