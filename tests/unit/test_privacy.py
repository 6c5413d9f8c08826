"""Credentials are masked in everything that is recorded."""

from __future__ import annotations

import pytest

from ddpcheck.privacy import allowed_environment, mask_arguments, mask_text


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        (["--api-key", "abc123"], ["--api-key", "***"]),
        (["--token=abc"], ["--token=***"]),
        (["--token", "x"], ["--token", "***"]),
        (["--hf_token", "hf_abcdefghijkl"], ["--hf_token", "***"]),
        (["--password", "12345", "train.py"], ["--password", "***", "train.py"]),
        (["--wandbApiKey=deadbeef"], ["--wandbApiKey=***"]),
        (["logger.wandb.api_key=abc"], ["logger.wandb.api_key=***"]),
        (["env", "WANDB_API_KEY=abc", "torchrun"], ["env", "WANDB_API_KEY=***", "torchrun"]),
        (["AWS_SECRET_ACCESS_KEY=a/b+c"], ["AWS_SECRET_ACCESS_KEY=***"]),
        (["hf_abcdefghijklmnop"], ["***"]),
        (["sk-proj-abcdefgh12345678"], ["***"]),
        (["ghp_abcdefghijkl1234"], ["***"]),
        (["AKIAIOSFODNN7EXAMPLE"], ["***"]),
        (["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def"], ["***"]),
        (["https://user:pa55@host/x"], ["https://***@host/x"]),
        (["https://x.org/d?token=abc&n=3"], ["https://x.org/d?token=***&n=3"]),
        (["-H", "Authorization: Bearer abcdef123456"], ["-H", "Authorization: *** ***"]),
        (["bash", "-c", "API_KEY=abc torchrun train.py"], ["bash", "-c", "API_KEY=*** torchrun train.py"]),
        (["bash", "-c", "run --password 'a b' x.py"], ["bash", "-c", "run --password '***' x.py"]),
        (["--config", '{"api_key": "abc", "lr": 0.1}'], ["--config", '{"api_key": "***", "lr": 0.1}']),
        (["--sort-key", "a1b2c3d4e5f6a7b8c9d0"], ["--sort-key", "***"]),
    ],
)
def test_credentials_are_masked(arguments: list[str], masked: list[str]) -> None:
    assert mask_arguments(arguments) == masked


@pytest.mark.parametrize(
    "arguments",
    [
        ["torchrun", "--nproc-per-node", "4", "train.py", "--lr", "0.1", "--epochs=3"],
        ["--tokenizer", "gpt2", "--max-tokens=4096", "--pad-token", "<pad>", "--sort-key", "length"],
        ["--use-auth-token", "train.py"],
        ["--use-token=true", "--num-key-value-heads", "8", "--token-dropout", "0.1"],
        ["--master-addr=10.0.0.1", "--rdzv-endpoint", "host:29500", "a=b:c"],
        ["--data", "s3://bucket/path/with/key", "--commit", "0123456789abcdef0123456789abcdef01234567"],
        ["git@github.com:owner/repo.git", "-m", "pkg.train"],
        ["--passes", "3", "--secretary", "x", "--keyframes", "abcdefghijklmnop1234"],
    ],
)
def test_other_arguments_are_unchanged(arguments: list[str]) -> None:
    assert mask_arguments(arguments) == arguments


def test_environment_is_filtered_by_an_allow_list() -> None:
    environ = {
        "RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "NCCL_DEBUG": "INFO",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_PLUGIN_TOKEN": "abc",
        "TORCHELASTIC_RUN_ID": "https://u:p@host",
        "SLURM_JOB_ID": "7",
        "WANDB_API_KEY": "secret",
        "HOME": "/home/me",
        "PATH": "/bin",
    }
    assert allowed_environment(environ) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": "10.0.0.1",
        "NCCL_DEBUG": "INFO",
        "NCCL_PLUGIN_TOKEN": "***",
        "RANK": "1",
        "SLURM_JOB_ID": "7",
        "TORCHELASTIC_RUN_ID": "https://***@host",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_masking_twice_changes_nothing() -> None:
    once = mask_text("API_KEY=abc --token x https://a:b@c")
    assert mask_text(once) == once
