"""The corpus: every fault is found as its header says, healthy jobs raise nothing, and a wrong answer is detected.

All faults and their variants, and a sample of the healthy jobs at two ranks. `make corpus` runs everything, and shows
what PyTorch reports by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.corpus import table
from tests.corpus.jobs import Job, batches, jobs_of, run_batch
from tests.corpus.results import Results
from tests.corpus.run import FAULTS, HEALTHY, ROOT, VARIANTS, collect, main
from tests.corpus.verdict import judge

pytestmark = pytest.mark.slow

# Each batch imports torch once.
MAX_BATCH = 45
# Each of these imports torch on every rank; a few show that the launcher makes no difference.
MAX_BY_LAUNCHER = {"torchrun": 2, "environment": 1, "python": 1}
# Every third job of the healthy ones.
HEALTHY_STRIDE = 3


def faults() -> list[Job]:
    """Those that hang are in test_hangs."""
    jobs = [job for folder in (FAULTS, VARIANTS) for h in collect(ROOT / folder) for job in jobs_of(h)]
    forked = [job for job in jobs if job.header.launcher == "fork" and not job.header.hangs]
    launched = [
        job
        for launcher, most in MAX_BY_LAUNCHER.items()
        for job in [job for job in jobs if job.header.launcher == launcher][:most]
    ]
    return forked + launched


def healthy_sample() -> list[Job]:
    jobs = [job for header in collect(ROOT / HEALTHY) for job in jobs_of(header)]
    at_two = [job for job in jobs if job.header.launcher == "fork" and job.world_size == 2]
    return at_two[::HEALTHY_STRIDE]


def batch_name(batch: Sequence[Job]) -> str:
    return batch[0].name if len(batch) == 1 else f"{batch[0].name} and {len(batch) - 1} more"


@pytest.mark.parametrize("batch", batches([*faults(), *healthy_sample()], MAX_BATCH), ids=batch_name)
def test_findings_are_those_the_headers_expect(batch: list[Job]) -> None:
    verdicts = [judge(outcome) for outcome in run_batch(batch)]
    assert {v.outcome.job.name: v.misses for v in verdicts if not v.passed} == {}


SCRIPT = '''"""The forward bypasses the wrapper from the third step on.

bug: 1
ranks: 2
expect: {code}
cause: wrapper bypassed
step: {step}
outliers: 0 1
"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drawn = torch.Generator().manual_seed(dist.get_rank())
for step in range(4):
    optimizer.zero_grad()
    (model if step < 2 else model.module)(torch.randn(3, 4, generator=drawn)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
'''


def test_a_wrong_answer_fails_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / FAULTS
    folder.mkdir(parents=True)
    for name, code, step in (("right", "DDP202", 2), ("late", "DDP202", 3), ("other", "DDP104", 2)):
        (folder / f"{name}.py").write_text(SCRIPT.format(code=code, step=step))
    healthy = tmp_path / HEALTHY
    healthy.mkdir()
    lines = SCRIPT.format(code="nothing", step=2).split("\n")
    header = [line for line in lines[:9] if not line.startswith(("bug", "cause", "step", "outliers"))]
    (healthy / "alarm.py").write_text("\n".join(header + lines[9:]))
    shown: list[Results] = []
    monkeypatch.setattr(table, "show", lambda results, console: shown.append(results))

    assert main(["--root", str(tmp_path), "--no-plain", "--no-real", "--jobs", "1"]) == 1

    [results] = shown
    assert not results.passed
    verdicts = {row.header.name: row.verdicts for row in (*results.faults, *results.healthy)}
    assert {
        name: [(verdict.code, verdict.step, verdict.ranks, len(verdict.misses)) for verdict in of_jobs]
        for name, of_jobs in verdicts.items()
    } == {
        "right": [(True, True, True, 0)],
        "late": [(True, False, True, 1)],
        "other": [(False, False, False, 1)],
        "alarm": [(False, False, False, 1)],
    }
    assert results.false_alarms == 1
    assert Results(faults=tuple(row for row in results.faults if row.header.name == "right")).passed
