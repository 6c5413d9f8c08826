"""Start-up of real jobs until the first step: weights read by all ranks, read by one, and by other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launchers import torchrun
from tests.helpers.paths import EXAMPLES
from tests.helpers.watched_run import run_watched

pytestmark = pytest.mark.slow

# 8 layers of 800 x 800: large enough to measure, quick to write.
WIDTH = 800
WEIGHTS = 8 * (WIDTH * WIDTH + WIDTH) * 4


def test_every_rank_reads(tmp_path: Path) -> None:
    done = run_watched(
        torchrun(2, EXAMPLES / "startup_read_by_all.py"),
        tmp_path,
        env={"STARTUP_WIDTH": str(WIDTH), "TMPDIR": str(tmp_path)},
    )
    assert (done.status, done.codes()) == (0, []), str(done)
    startup = done.report["startup"]
    assert startup["scenario"] == "every rank reads"
    assert startup["equal_before"] is True
    assert startup["broadcast_bytes"] == WEIGHTS
    assert startup["repeated_bytes"] == pytest.approx(WEIGHTS, rel=0.01)
    assert startup["loaded_bytes"] == 2 * startup["repeated_bytes"]
    assert 0 < startup["broadcast_seconds"] * startup["broadcast_rate"] == pytest.approx(WEIGHTS, rel=0.01)
    stages = (
        "interpreter",
        "torch",
        "group",
        "load",
        "script",
        "wrap",
        "waited",
        "broadcast",
        "batch",
        "step",
    )
    for row in startup["ranks"]:
        assert all(row[stage] is not None for stage in stages), row
        # The stages add up to the total, except for the work of ddpcheck itself.
        spent = sum(row[s] for s in stages if s not in ("waited", "broadcast"))
        assert 0.7 * row["total"] <= spent <= row["total"] + 0.05
        assert row["waited"] + row["broadcast"] <= row["wrap"]
        assert row["ways"] == ["torch.load"]
        [file] = row["files"]
        assert (Path(file["path"]).name, file["how"]) == (f"ddpcheck-example-{WIDTH}.pt", "read")
        assert row["host_memory"]["load"] > WEIGHTS
    assert "41.0 MB" in startup["summary"]


ONE_READS = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

patched = torch.load, nn.Module.to, nn.Module.load_state_dict, torch.UntypedStorage.from_file
rank = int(os.environ["RANK"])
folder = sys.argv[1] + f"/{rank}"
os.makedirs(folder)
shape = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                   vocab_size=99)
BertModel(shape).save_pretrained(folder + "/bert")
save_file({"weight": torch.ones(64, 64)}, folder + "/a.safetensors")
torch.save({"weight": torch.ones(64, 64)}, folder + "/b.pt")
model = nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 5000), nn.Linear(5000, 8))
torch.save(model.state_dict(), folder + "/weights.pt")
dist.init_process_group("gloo")
try:
    torch.load(folder + "/not there.pt")
except FileNotFoundError:
    pass
load_file(folder + "/a.safetensors")["weight"].sum()
torch.load(folder + "/b.pt", mmap=True)
with open(folder + "/b.pt", "rb") as file:
    torch.load(file)
bert = BertModel.from_pretrained(folder + "/bert")
if rank == 0:
    time.sleep(4)
    model.load_state_dict(torch.load(folder + "/weights.pt"))
torch.manual_seed(rank)
ddp = DDP(model.to("cpu"))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    ddp(torch.randn(2, 8)).sum().backward()
    optimizer.step()
left = torch.load, nn.Module.to, nn.Module.load_state_dict, torch.UntypedStorage.from_file
marked = [hasattr(each, "__ddpcheck_original__") for each in left]
own = "from_file" in vars(torch.UntypedStorage)
with open(folder + "/left.json", "w") as file:
    json.dump([[hasattr(each, "__ddpcheck_original__") for each in patched], marked, own], file)
dist.destroy_process_group()
"""


def test_one_rank_reads_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "others.py"
    script.write_text(ONE_READS)
    done = run_watched(torchrun(2, script, tmp_path), tmp_path)
    assert done.status == 0, str(done)
    assert set(done.codes()) <= {"DDP102"}, str(done)
    for rank in range(2):
        loads = [r for r in done.records(rank) if r["kind"] == "startup" and r["stage"] == "load"]
        folder = tmp_path / str(rank)
        seen = [
            (
                load["via"],
                [(Path(p).relative_to(folder).as_posix(), how) for p, _, how in load.get("files", [])],
            )
            for load in loads
        ]
        assert seen[:5] == [
            ("torch.load", [("not there.pt", "read")]),
            ("mapped file", [("a.safetensors", "mapped")]),
            ("torch.load", [("b.pt", "mapped")]),
            ("torch.load", [("b.pt", "read")]),
            ("from_pretrained", [("bert/model.safetensors", "mapped")]),
        ]
        weights = [("torch.load", [("weights.pt", "read")]), ("load_state_dict", [])]
        assert seen[5:] == ([] if rank else weights)
        before, after, own = json.loads((folder / "left.json").read_text())
        # Loads of checkpoints are observed for the whole run.
        assert (before, after, own) == ([True] * 4, [True, False, True, False], False)
    startup = done.report["startup"]
    assert (startup["scenario"], startup["repeated_bytes"]) == ("one rank reads", 0)
    reader, other = startup["ranks"]
    # The other rank waits for the reader, which sleeps for four seconds.
    assert other["waited"] > reader["waited"] + 1.0
    assert "20." in startup["summary"]  # megabytes
