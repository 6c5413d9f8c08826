"""State dicts inside of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.probes.checkpoints.contents import MAX_VISITED, OptimizerContents, find_states
from ddpcheck.records.kinds.checkpoints import StateKind


def trained(kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> torch.optim.Optimizer:
    module = nn.Linear(3, 2)
    optimizer = kind(module.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_all_kinds_are_found_with_their_keys() -> None:
    optimizer = trained()
    checkpoint = {
        "net": {"model": nn.Linear(3, 2).state_dict()},
        "optimizers": [optimizer.state_dict()],
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
    }
    assert {(found.kind, found.path) for found in find_states(checkpoint)} == {
        (StateKind.MODEL, "net.model"),
        (StateKind.OPTIMIZER, "optimizers.0"),
        (StateKind.SCHEDULER, "schedule"),
        (StateKind.SCALER, "scaler"),
        (StateKind.RNG, "rng"),
    }


@pytest.mark.parametrize(
    "thing", [torch.ones(3), 3, None, "text", {}, {"epoch": 3}, [1, 2], {1: torch.ones(2)}, nn.Linear(2, 2)]
)
def test_other_contents_have_no_state(thing: Any) -> None:
    assert find_states(thing) == []


def test_a_large_structure_is_not_read_to_its_end() -> None:
    deep: Any = [[{"a": [1]} for _ in range(64)] for _ in range(64)]
    assert find_states([deep] * 64) == []
    assert MAX_VISITED < 64**3


def test_the_states_of_an_optimizer() -> None:
    contents = OptimizerContents(trained().state_dict())
    assert (contents.entries, contents.sizes) == (2, 2)
    assert contents.dtypes[1, "exp_avg"] is torch.float32
    assert "betas" in contents.settings
    # Without momentum there is nothing to restore.
    assert OptimizerContents(trained(torch.optim.SGD).state_dict()).entries == 0
