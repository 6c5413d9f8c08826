"""No secret is written: the whole run folder is searched for the secrets that the job was given."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.helpers.commands import BIN
from tests.helpers.launchers import forked, torchrun
from tests.helpers.watched_run import RunWatched, run_to_end

pytestmark = pytest.mark.slow

# Each contains a mark of its own, so that even a part of a secret is found.
VARIABLES = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef0wandbmark",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123hfmark",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCY/awsmark",
    "SECRET": "a custom secret, customsecretmark",
    "MY_DATABASE_URL": "postgres://admin:databasemark@db.internal/train",
    "NCCL_SECRET_TOKEN": "allowedprefixmark1234",
}
ARGUMENTS = [
    "--api-key",
    "sk-abcdefghijklmnop1234567890apikeymark",
    "--token=ghp_0123456789abcdefghijtokenmark",
    "--password",
    "hunter2passwordmark",
    "--data",
    "s3://AKIAIOSFODNN7EXAMPLE:urlmarksecret@bucket/path",
    "https://user:urlmarksecret2@example.org/data?access_token=querymark12345678",
    "--wandb.api_key=0123456789dottedmark",
    "Authorization: Bearer bearermark.abcdef123456",
]
# The marks of all of them.
MARKS = [
    "wandbmark",
    "hfmark",
    "awsmark",
    "customsecretmark",
    "databasemark",
    "allowedprefixmark",
    "apikeymark",
    "tokenmark",
    "passwordmark",
    "hunter2",
    "urlmarksecret",
    "querymark",
    "dottedmark",
    "bearermark",
]

# Trains for a few steps and writes what it received to a file outside the run folder.
JOB = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
names = {names!r}
with open({out!r} + f"/received-{{rank}}.json", "w") as file:
    json.dump([sys.argv[1:], {{name: os.environ.get(name) for name in names}}], file)
ddp = DDP(torch.nn.Linear(2, 2))
if {diverge} and rank:
    with torch.no_grad():
        ddp.module.weight.fill_(7.0)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(3):
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def write_job(tmp_path: Path, *, diverge: bool = False) -> Path:
    script = tmp_path / "train.py"
    script.write_text(JOB.format(names=sorted(VARIABLES), out=str(tmp_path), diverge=diverge))
    return script


def leaks(folder: Path) -> list[tuple[str, str]]:
    findings = []
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            findings += [(path.name, mark) for mark in MARKS if mark.encode() in content]
    return findings


def open_to_others(folder: Path) -> list[str]:
    """Files and folders that anyone but their owner can open."""
    return [str(path) for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("diverge", [False, True])
def test_no_secret_is_in_the_run_folder(ddpcheck: RunWatched, tmp_path: Path, diverge: bool) -> None:
    script = write_job(tmp_path, diverge=diverge)
    launch = forked if diverge else torchrun
    done = ddpcheck(*launch(2, script, *ARGUMENTS), **VARIABLES)
    assert done.status == (10 if diverge else 0), str(done)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"received-{rank}.json").read_text()) == [ARGUMENTS, VARIABLES]
    assert leaks(done.folder) == []
    assert [mark for mark in MARKS if mark in done.stderr] == []
    # A report made later, and as JSON, is masked too.
    again = run_to_end([BIN / "ddpcheck", "report", done.folder, "--json"], tmp_path, VARIABLES)
    assert [mark for mark in MARKS if mark in again.stdout + again.stderr] == []
    assert leaks(done.folder) == []
    assert open_to_others(done.folder) == []
    assert done.folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in done.folder.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in done.folder.rglob("*") if path.is_dir()} <= {0o700}


def test_the_exception_of_a_failing_rank_is_masked(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """The message of an exception may contain a connection string."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "raise ConnectionError('no way to postgres://admin:databasemark@db/x, token=ghp_abcdefgtokenmark')\n"
    )
    done = ddpcheck(*forked(1, script))
    assert done.status == 1
    assert "databasemark" in done.stderr  # the job's own traceback is not changed
    assert leaks(done.folder) == []
    assert "DDP602" in done.codes()


def test_the_folder_is_private_under_any_umask(ddpcheck: RunWatched, tmp_path: Path) -> None:
    script = write_job(tmp_path)
    command = shlex.join(map(str, forked(2, script, "--password", "hunter2passwordmark")))
    done = ddpcheck("bash", "-c", f"umask 0; {command}", **VARIABLES)
    assert done.status == 0, str(done)
    assert open_to_others(done.folder) == []
    assert leaks(done.folder) == []
