"""Programs by other authors behave the same under ddpcheck, and ddpcheck reports nothing untrue about them.

Some of the programs that `tests/corpus/real_programs.py` runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.corpus import accelerate_scripts, real_programs, side_by_side
from tests.helpers.watched_run import RunWatched

pytestmark = pytest.mark.slow

# Optimizer steps by program. None: the program makes several models and groups.
FORKED: dict[str, int | None] = {
    "accelerate test_script.py": None,
    "accelerate test_sync.py": None,
    "transformers Trainer": 12,
    "transformers Trainer with dropout": 12,
    "lightning BoringModel": 16,
}
# Of torch's tests those that inspect DDP most closely: its log, its hooks, its graph, and its end.
TESTS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
)
TESTS_FOR_GPUS = (
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_comm_hook_logging",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_join_model_equivalence",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_python_error_logged",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_uneven_input_exception",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_detect_ddp_is_actually_static",
    "test_different_graph_across_ranks",
    "test_post_localSGD_optimizer_parity",
    "test_stateless_api_with_ddp",
)


def program(name: str) -> real_programs.Program:
    [found] = [program for program in real_programs.programs() if program.name == name]
    return found


@pytest.fixture(scope="module")
def forked() -> dict[str, side_by_side.Pair]:
    """Without their launchers, which `make corpus` uses: ranks are forked after one import of the libraries."""
    programs = [
        side_by_side.ForkedProgram(name, script, arguments)
        for name in FORKED
        for script, arguments in [real_programs.script_of(program(name))]
    ]
    modules = ("accelerate.test_utils", "transformers.trainer", "lightning.pytorch")
    pairs = side_by_side.run_forked(programs, 2, modules, **accelerate_scripts.ENVIRONMENT)
    return dict(zip(FORKED, pairs, strict=True))


@pytest.mark.parametrize(("name", "steps"), FORKED.items(), ids=list(FORKED))
def test_program(forked: dict[str, side_by_side.Pair], name: str, steps: int | None) -> None:
    pair = forked[name]
    result = program(name).judge(pair)
    assert result.passed == result.total == 1, result.note
    assert all(lines for lines in map(side_by_side.lasting, pair.plain.ranks[:1]))
    if steps is not None:
        assert_complete(pair.report, steps)


def test_lightning_starts_its_own_ranks(forked: dict[str, side_by_side.Pair], ddpcheck: RunWatched) -> None:
    name = "lightning BoringModel"
    done = ddpcheck(*program(name).command)
    assert done.status == 0, str(done)
    assert done.codes("error", "warning") == []
    lines = [line for rank in forked[name].plain.ranks for line in rank.splitlines()]
    weights = [line for line in lines if line.startswith("rank")]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == sorted(weights)
    assert len(weights) == 2
    assert_complete(done.report, FORKED[name])
    printed = re.findall(r"rank (\d) is process (\d+)", done.stderr)
    [attempt] = done.report["attempts"]
    assert sorted(printed) == [(str(row["rank"]), str(row["pid"])) for row in attempt["ranks"]]


def assert_complete(report: Mapping[str, Any], steps: int | None) -> None:
    """Every rank reported, from the first step to the last."""
    [attempt] = report["attempts"]
    assert (attempt["world_size"], attempt["steps"]) == (2, steps)
    assert [(row["rank"], row["status"], row["steps"]) for row in attempt["ranks"]] == [
        (rank, "finished", steps) for rank in (0, 1)
    ]


@pytest.mark.parametrize("lend", [False, True], ids=["on-processors", "for-gpus"])
def test_torch_tests(lend: bool) -> None:
    chosen = TESTS_FOR_GPUS if lend else TESTS
    result = real_programs.torch_tests("torch tests", lend=lend, only=chosen)
    assert result.passed == result.total, result.note
    assert result.total == len(chosen), result.note


def test_every_script_of_accelerate_is_run_or_has_a_reason() -> None:
    assert accelerate_scripts.unlisted() == []
