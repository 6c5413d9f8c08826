"""Stacks: which communication a rank waits in, and which line of the user's code called it."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.hang.stacks import Wait, WaitKind, in_debugger, user_frame, wait_of

TORCH = "/env/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
LOGGER = f"{TORCH}/distributed/c10d_logger.py"
DDP = f"{TORCH}/nn/parallel/distributed.py"
MODULE = [f"{TORCH}/nn/modules/module.py", 1778, "_wrapped_call_impl"]
USER = ["/home/me/train.py", 41, "main"]
MAIN = ["/home/me/train.py", 60, "<module>"]

BACKWARD = [
    [f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"],
    [f"{TORCH}/autograd/__init__.py", 395, "backward"],
    [f"{TORCH}/_tensor.py", 623, "backward"],
    USER,
    MAIN,
]
BUFFERS = [
    [DDP, 2363, "_distributed_broadcast_coalesced"],
    [DDP, 2425, "_sync_buffers"],
    [DDP, 1782, "_pre_forward"],
    [DDP, 1886, "forward"],
    MODULE,
    USER,
]
BARRIER = [[C10D, 5356, "barrier"], [LOGGER, 83, "wrapper"], USER, MAIN]


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (BACKWARD, WaitKind.BACKWARD),
        (BUFFERS, WaitKind.BUFFERS),
        ([[DDP, 1770, "_pre_forward"], [DDP, 1886, "forward"], MODULE, USER], WaitKind.FORWARD),
        (
            [
                [f"{TORCH}/distributed/utils.py", 286, "_verify_param_shape_across_processes"],
                [DDP, 1064, "__init__"],
                USER,
            ],
            WaitKind.WRAPPING,
        ),
        (BARRIER, WaitKind.COLLECTIVE),
    ],
)
def test_what_a_rank_waits_in(frames: list[list[object]], kind: WaitKind) -> None:
    wait = wait_of(frames)
    assert wait is not None
    assert wait.kind is kind


def test_a_collective_has_the_name_that_the_user_called() -> None:
    frames = [
        [C10D, 3500, "all_gather"],
        [LOGGER, 83, "wrapper"],
        [C10D, 2900, "all_gather_object"],
        [LOGGER, 83, "wrapper"],
        USER,
    ]
    assert wait_of(frames) == Wait(WaitKind.COLLECTIVE, "all_gather_object")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [USER, MAIN],
        # A module that computes inside DDP's forward, and a user's hook inside a backward.
        [[f"{TORCH}/nn/modules/conv.py", 370, "_conv_forward"], [DDP, 1886, "forward"], USER],
        [["/home/me/hooks.py", 3, "hook"], *BACKWARD],
        # The same names, but not torch's files.
        [["/home/me/distributed_c10d.py", 3, "barrier"], USER],
    ],
)
def test_elsewhere(frames: list[list[object]]) -> None:
    assert wait_of(frames) is None


def test_the_users_line() -> None:
    assert user_frame(BACKWARD) == USER
    assert user_frame(BUFFERS) == USER
    trainer = ["/env/lib/python3.11/site-packages/lightning/trainer.py", 9, "fit"]
    assert user_frame([BARRIER[0], trainer, USER]) == USER
    # A program that is itself a library, as with `python -m`.
    assert user_frame([BARRIER[0], trainer]) == trainer
    assert user_frame([BARRIER[0]]) is None


def test_a_debugger_is_recognised() -> None:
    assert in_debugger([["/usr/lib/python3.11/bdb.py", 90, "trace_dispatch"], USER])
    assert not in_debugger(BARRIER)
