"""Programs by other authors behave the same under ddpcheck, and ddpcheck reports nothing untrue about them.

Some of the programs that `tests/corpus/real_programs.py` runs.
"""

from __future__ import annotations

import re

import pytest

from tests.corpus import accelerate_scripts, real_programs, side_by_side

pytestmark = pytest.mark.slow

# Optimizer steps by program. None: the program makes several models and groups.
PROGRAMS: dict[str, int | None] = {
    "accelerate test_script.py": None,
    "accelerate test_sync.py": None,
    "lightning BoringModel": 16,
    "transformers Trainer": 12,
    "transformers Trainer with dropout": 12,
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


@pytest.mark.parametrize(("name", "steps"), PROGRAMS.items(), ids=list(PROGRAMS))
def test_program(name: str, steps: int | None) -> None:
    [program] = [program for program in real_programs.programs() if program.name == name]
    pair = side_by_side.run_both(program.command, **program.env)
    result = program.judge(pair)
    assert result.passed == result.total == 1, result.note
    if steps is None:
        return
    # Every rank reported, from the first step to the last.
    [attempt] = pair.report["attempts"]
    assert (pair.report["world_size"], pair.report["steps"]) == (2, steps)
    assert [(row["rank"], row["status"], row["steps"]) for row in attempt["ranks"]] == [
        (rank, "finished", steps) for rank in (0, 1)
    ]
    printed = re.findall(r"rank (\d) is process (\d+)", pair.watched.stderr)
    if name.startswith("lightning"):
        assert sorted(printed) == [(str(row["rank"]), str(row["pid"])) for row in attempt["ranks"]]


@pytest.mark.parametrize("lend", [False, True], ids=["on-processors", "for-gpus"])
def test_torch_tests(lend: bool) -> None:
    chosen = TESTS_FOR_GPUS if lend else TESTS
    result = real_programs.torch_tests("torch tests", lend=lend, only=chosen)
    assert result.passed == result.total, result.note
    assert result.total == len(chosen), result.note


def test_every_script_of_accelerate_is_run_or_has_a_reason() -> None:
    assert accelerate_scripts.unlisted() == []
