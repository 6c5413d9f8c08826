"""Markdown: no text of the job becomes markup."""

from __future__ import annotations

from dataclasses import replace

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report
from ddpcheck.reports.ci.markdown import to_markdown
from tests.helpers.sample_reports import attacking, of_many_ranks, stored


def tokens(report: Report) -> list[Token]:
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(to_markdown(report))
    return [token for block in parsed for token in (block, *(block.children or ()))]


def shown(report: Report) -> str:
    return "\n".join(
        token.content for token in tokens(report) if token.type in ("text", "code_inline", "fence")
    )


def with_text(text: str) -> Report:
    finding = Finding(
        "DDP201", Severity.ERROR, text, text + ".", parameter=text, cause=text, evidence={"x": text}
    )
    return replace(stored("1-sound"), findings=(finding,), command=("python", text))


def test_verdict_findings_ranks_and_checks() -> None:
    text = to_markdown(stored("1-learning-rate"))
    assert text.startswith("## ❌ Replicas diverge at step 5 in 0.weight (DDP206)\n")
    assert "### error DDP206: Optimizers differ across ranks" in text
    assert "group 0, lr  0.001   0.001   0.0001" in text
    assert "| parameters after each step | differ |" in text
    assert to_markdown(stored("1-sound")).startswith("## ✅ Replicas agree")


@pytest.mark.parametrize(
    "text",
    ["<b>x</b>", "[a](http://b)", "![a](b)", "*a*", "_a_", "`a`", "a | b", "# a", "- a", "1. a", "~~a~~", "```\na\n```",
     "&lt;", "\\*", "http://a"],
)  # fmt: skip
def test_text_of_the_job_is_shown_literally(text: str) -> None:
    kinds = {token.type for token in tokens(with_text(text))}
    assert not kinds & {"html_inline", "html_block", "link_open", "image", "s_open", "ordered_list_open"}
    assert text.replace("\n", "\\n") in shown(with_text(text))


def test_markup_in_names_stays_text() -> None:
    assert not {token.type for token in tokens(attacking())} & {
        "html_inline",
        "html_block",
        "link_open",
        "image",
    }


def test_a_table_keeps_its_columns() -> None:
    rows: list[int] = []
    for token in tokens(attacking()):
        if token.type == "tr_open":
            rows.append(0)
        elif token.type in ("td_open", "th_open"):
            rows[-1] += 1
    # Ranks, then checks.
    assert sorted(set(rows), reverse=True) == [5, 3]


def test_a_thousand_ranks_fit_a_summary() -> None:
    assert len(to_markdown(of_many_ranks())) < 20_000
