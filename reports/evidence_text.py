"""The evidence of a finding as the terminal shows it, for places that hold plain text."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ddpcheck.reports.terminal.console import Ink
from ddpcheck.reports.terminal.evidence import put_evidence

_WIDTH = 100


def evidence_text(evidence: Mapping[str, Any]) -> str:
    """Tables of ranks side by side, without colours; no blank line at either end."""
    sink = io.StringIO()
    console = Console(
        file=sink, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False, _environ={}
    )
    put_evidence(Ink(console), evidence, indent=0)
    return sink.getvalue().strip("\n")
