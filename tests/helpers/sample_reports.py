"""Reports for tests of reports: one whose every text attacks, and one of very many ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import AttemptSummary, Check, RankStatus, RankSummary, Report, Verdict
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.analysis.timeseries.model import (
    AgreementHistory,
    AgreementInterval,
    EnvironmentRow,
    EnvironmentValue,
    GradientHistory,
)
from ddpcheck.reports.json_report import from_json, to_json

STORED = Path(__file__).parents[1] / "stored_runs"
ATTACK = "</script><script>window.attacked=1</script>\"'><img src=x onerror=window.attacked=1>"
# Words that a report is read by; everything else is text.
_WORDS = {"schema", "verdict", "severity", "status", "code", "outcome", "part"}


def stored(name: str) -> Report:
    return analyse_run(STORED / name)


def with_parts(report: Report, parts: dict[str, Any]) -> Report:
    """The report with these keys of report.json replaced."""
    return from_json(json.dumps({**json.loads(to_json(report)), **parts}))


def attacking(name: str = "1-learning-rate") -> Report:
    """A real report in which every text, and every key that the job chose, carries markup."""
    document = json.loads(to_json(stored(name)))
    return from_json(json.dumps({key: attacked(key, value) for key, value in document.items()}))


def attacked(key: str, value: Any) -> Any:
    """The same with markup in every text."""
    if isinstance(value, str):
        return value if key in _WORDS else value + ATTACK
    if isinstance(value, list):
        return [attacked(key, item) for item in value]
    if isinstance(value, dict):
        return {name: attacked(name, item) for name, item in value.items()}
    return value


def of_many_ranks(ranks: int = 1024, steps: int = 1000) -> Report:
    """Two ranks part at step 400, one is never heard of from step 700 on."""
    everyone = tuple(range(ranks))
    odd = (17, ranks - 100)
    silent = ranks // 2
    points = tuple(range(0, steps, 48))
    norms = {
        str(rank): tuple(
            round(math.exp(-step / 400) * (1 + 0.1 * math.sin(rank + step)) * (30 if rank in odd else 1), 4)
            for step in points
        )
        for rank in everyone
    }
    return Report(
        verdict=Verdict.FINDINGS,
        world_size=ranks,
        steps=steps,
        command=("srun", "python", "train.py"),
        exit_code=0,
        findings=(
            Finding(
                code="DDP201",
                severity=Severity.ERROR,
                title="Parameters diverged",
                message="After step 400 parameters are no longer the same on all ranks.",
                module="0",
                step=400,
                stage="params",
                parameter="layers.3.weight",
                ranks=odd,
                evidence={
                    "groups": [
                        {"ranks": [rank for rank in everyone if rank not in odd], "digest": "ab" * 16},
                        {"ranks": list(odd), "digest": "cd" * 16},
                    ],
                    "hyperparameters": [
                        {
                            "optimizer": 0,
                            "group": 0,
                            "name": "lr",
                            "by_rank": {str(rank): 0.01 if rank in odd else 0.001 for rank in everyone},
                        }
                    ],
                },
            ),
        ),
        attempts=(AttemptSummary(0, ranks, steps, tuple(_rank(rank, steps, silent) for rank in everyone)),),
        checks=(Check("parameters after each step", steps, "differ", f"{steps} x {ranks} ranks"),),
        agreement=(
            AgreementHistory(
                "0",
                "Net",
                everyone,
                (
                    AgreementInterval(-1, -1, 1),
                    AgreementInterval(0, 399, 400),
                    AgreementInterval(400, 699, 300, odd),
                    AgreementInterval(700, steps - 1, steps - 700, odd, (silent,)),
                ),
            ),
        ),
        gradients=(
            GradientHistory(
                "0",
                "Net",
                48,
                points,
                norms,
                tuple(0.5 for _ in points),
                tuple(0.1 for _ in points),
            ),
        ),
        environment=(
            EnvironmentRow("torch", (EnvironmentValue("2.13.0", everyone),)),
            EnvironmentRow(
                "NCCL_DEBUG",
                (
                    EnvironmentValue("", everyone[::2]),
                    EnvironmentValue("INFO", everyone[1::2]),
                ),
            ),
        ),
        run={
            "path": "ddpcheck-runs/many",
            "name": "many",
            "torch": ["2.13.0"],
            "parameters": 300,
            "every": 1,
        },
    )


def _rank(rank: int, steps: int, silent: int) -> RankSummary:
    gone = rank == silent
    return RankSummary(
        rank=rank,
        status=RankStatus.DIED if gone else RankStatus.FINISHED,
        host=f"node{rank // 8:03d}",
        device=f"cuda:{rank % 8}",
        steps=700 if gone else steps,
        last_step=699 if gone else steps - 1,
        last_stage="params",
    )
