"""The documentation site: nothing is written twice, every link leads somewhere, nothing is loaded from elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))

from loads import external_loads
from repository_paths import page_of, pages_outside_docs, text_of, with_links

from ddpcheck import explanations

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("README.md", "[a](docs/time.md)", "[a](time.md)"),
        ("README.md", "![a](docs/images/finding.svg)", "![a](images/finding.svg)"),
        ("docs/time.md", "[a](../ddpcheck/explanations/DDP402.md)", "[a](findings/DDP402.md)"),
        ("docs/time.md", "[a](../CONTRIBUTING.md#proof-of-value)", "[a](contributing.md#proof-of-value)"),
        ("docs/corpus.md", "[a](../examples/train.py)", "[a](source/examples/train.py.md)"),
        ("ddpcheck/explanations/DDP402.md", "[a](../../docs/time.md)", "[a](../time.md)"),
        ("docs/time.md", "[a](https://pytorch.org)", "[a](https://pytorch.org)"),
        # Left as it is: mkdocs then says that it leads nowhere.
        ("docs/time.md", "[a](no-such-page.md)", "[a](no-such-page.md)"),
        ("docs/time.md", "`layers[3](x)`", "`layers[3](x)`"),
    ],
)
def test_links_between_files_become_links_between_pages(path: str, text: str, expected: str) -> None:
    assert with_links(text, path) == expected


def test_every_explanation_is_a_page_and_no_file_has_two() -> None:
    pages = pages_outside_docs()
    assert {f"findings/{code}.md" for code in explanations.codes()} <= set(pages)
    assert len(set(pages.values())) == len(pages)
    assert not any((ROOT / "docs" / page).exists() for page in pages)


def test_a_program_is_shown_as_one() -> None:
    shown = text_of("examples/train.py")
    assert "# examples/train.py\n" in shown
    assert (ROOT / "examples" / "train.py").read_text().rstrip() in shown
    assert page_of("pyproject.toml") is None


def test_what_a_page_would_load_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="canonical" href="https://x.org/a"><a href="https://x.org">x</a><img src="local.png">'
        '<script src="https://x.org/a.js"></script><link rel="stylesheet" href="//x.org/a.css">'
    )
    (tmp_path / "a.css").write_text(
        "@font-face { src: url('https://x.org/f.woff2') } p { background: url(a.png) }"
    )
    assert list(external_loads(tmp_path)) == [
        ("a.css", "https://x.org/f.woff2"),
        ("a.html", "https://x.org/a.js"),
        ("a.html", "//x.org/a.css"),
    ]


def test_pictures_are_small_shown_and_load_nothing() -> None:
    pictures = [path for path in (ROOT / "docs" / "images").iterdir() if path.is_file()]
    assert {"healthy.svg", "finding.svg", "straggler.svg", "slow-link.svg"} <= {
        path.name for path in pictures
    }
    shown = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for path in pictures:
        assert path.stat().st_size < 300_000, path.name
        assert f"images/{path.name})" in shown, path.name
    assert list(external_loads(ROOT / "docs" / "images")) == []


def test_a_broken_link_an_unknown_anchor_and_a_forgotten_page_fail_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Home\n\n[a](gone.md) [b](#nowhere) [c](../outside.md)\n")
    (docs / "forgotten.md").write_text("# Nobody lists this\n")
    own = {"docs_dir": "docs", "site_dir": "site", "nav": ["index.md"], "hooks": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({**CONFIG, **own}))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode != 0
    message = built.stdout + built.stderr
    for wrong in ("gone.md", "#nowhere", "outside.md", "forgotten.md"):
        assert any(wrong in line for line in message.splitlines() if "WARNING" in line or "  - " in line), (
            message
        )
