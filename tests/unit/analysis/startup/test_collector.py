"""The start-up of each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.startup.collector import is_direct, timeline
from ddpcheck.analysis.startup.table import StartupTable, node_summary, reads_by_node
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.kinds.startup import StartupRecord
from tests.helpers.run_builder import NAMES, RunBuilder

MB = 10**6
SIZE = 500 * MB
FILE = "/fsx/model.pt"


def load(size: int = SIZE, path: str = FILE, **more: Any) -> StartupRecord:
    fields = {"via": "torch.load", "bytes": size, "files": [[path, size, "read"]], "read": size, **more}
    return StartupRecord("load", 103.0, 2.0, **fields)


def way(*loads: StartupRecord, waited: float = 0.1) -> list[StartupRecord]:
    """From 100.0 to 112.5."""
    return [
        StartupRecord("interpreter", 100.0, 0.5),
        StartupRecord("torch", 100.5, 1.5),
        StartupRecord("group", 102.5, 0.25, host=300 * MB),
        *loads,
        StartupRecord("meet", 108.0, waited),
        StartupRecord("broadcast", 109.0, 0.5, bytes=SIZE),
        StartupRecord("wrap", 107.5, 2.5, host=800 * MB),
        StartupRecord("batch", 110.5, 0.5),
        StartupRecord("step", 111.5, 1.0, host=1200 * MB),
    ]


def test_a_row() -> None:
    row = timeline(3, "node0", way(load(), load(0, "", via="load_state_dict", files=[], read=0)))
    assert (row["rank"], row["began"], row["total"]) == (3, 100.0, 12.5)
    assert (row["interpreter"], row["torch"], row["group"], row["load"]) == (0.5, 1.5, 0.25, 4.0)
    # 7.5 s until wrapping, of which 6.25 s are known.
    assert (row["script"], row["wrap"], row["waited"], row["broadcast"]) == (1.25, 2.5, 0.1, 0.5)
    assert (row["batch"], row["step"], row["copy"]) == (0.5, 1.0, None)
    assert (row["loaded_bytes"], row["broadcast_bytes"], row["ways"]) == (SIZE, SIZE, ["torch.load"])
    assert row["host_memory"] == {"group": 300 * MB, "wrap": 800 * MB, "step": 1200 * MB}


def test_a_rank_that_never_reached_its_first_step() -> None:
    row = timeline(0, "node0", way(load())[:4])
    assert (row["total"], row["script"], row["wrap"], row["load"]) == (None, None, None, 2.0)


def report(folder: Path, ways: list[list[StartupRecord]], differ: bool = False) -> StartupTable:
    outliers = dict.fromkeys(range(1, len(ways)), NAMES) if differ else None
    build = RunBuilder(folder, len(ways)).wrap(outliers_before=outliers).train(1)
    for rank, records in enumerate(ways):
        for record in records:
            build.add(rank, record)
    startup = build.end().report().startup
    assert startup is not None
    return startup


def test_scenario_a_every_rank_reads_the_same_file(tmp_path: Path) -> None:
    startup = report(tmp_path, [way(load(storage=SIZE if rank == 0 else 0)) for rank in range(4)])
    assert (startup["scenario"], startup["equal_before"]) == ("every rank reads", True)
    assert (startup["loaded_bytes"], startup["repeated_bytes"]) == (4 * SIZE, 3 * SIZE)
    assert startup["summary"].startswith(
        "4 ranks read 2.0 GB (500.0 MB from storage, the rest from the page cache), the slowest in 2.00 s. "
        "1.5 GB of it were files that several ranks read: reading once and broadcasting would save that."
    )
    assert (startup["broadcast_bytes"], startup["broadcast_rate"]) == (SIZE, 1000 * MB)


def test_scenario_a_on_two_nodes(tmp_path: Path) -> None:
    """Each node has its own page cache and reads from storage once."""
    build = RunBuilder(tmp_path, 4).wrap().train(1)
    for rank in range(4):
        header = build.records[rank][0]
        assert isinstance(header, RankHeader)
        build.records[rank][0] = replace(header, host=f"node{rank // 2}")
        for record in way(load(storage=0 if rank % 2 else SIZE)):
            build.add(rank, record)
    startup = build.end().report().startup
    assert startup is not None
    assert [(row["rank"], row["host"]) for row in startup["ranks"]] == [
        (0, "node0"),
        (1, "node0"),
        (2, "node1"),
        (3, "node1"),
    ]
    assert [
        (node["host"], node["ranks"], node["loaded_bytes"], node["storage_bytes"], node["repeated_bytes"])
        for node in startup["nodes"]
    ] == [("node0", [0, 1], 2 * SIZE, SIZE, SIZE), ("node1", [2, 3], 2 * SIZE, SIZE, SIZE)]
    assert startup["repeated_bytes"] == 3 * SIZE
    assert startup["summary"].startswith(
        "4 ranks read 2.0 GB (1.0 GB from storage, the rest from the page cache)"
    )
    assert startup["summary"].endswith(
        "By node: node0 1.0 GB (500.0 MB from storage), node1 1.0 GB (500.0 MB from storage). Each node has its "
        "own page cache and reads from storage itself."
    )


def test_many_nodes_are_not_all_listed(tmp_path: Path) -> None:
    rows = [timeline(rank, f"node{rank}", way(load())) for rank in range(6)]
    summary = node_summary(reads_by_node(rows))
    assert "node3 500.0 MB (nothing from storage) and 2 more nodes." in summary
    assert "node4" not in summary


def test_one_reader_on_one_of_two_nodes() -> None:
    rows = [timeline(0, "node0", way(load())), timeline(1, "node1", way())]
    assert [node["loaded_bytes"] for node in reads_by_node(rows)] == [SIZE, 0]
    assert node_summary(reads_by_node(rows)) == ""


def test_every_rank_reads_a_file_of_its_own(tmp_path: Path) -> None:
    startup = report(tmp_path, [way(load(path=f"/fsx/{rank}.pt", storage=SIZE)) for rank in range(2)])
    assert (startup["scenario"], startup["repeated_bytes"]) == ("every rank reads", 0)
    assert startup["summary"] == "2 ranks read 1.0 GB (from storage), the slowest in 2.00 s."


def test_scenario_a_prime_one_rank_reads(tmp_path: Path) -> None:
    startup = report(tmp_path, [way(load()), way(waited=4.5), way(waited=3.0)], differ=True)
    assert (startup["scenario"], startup["equal_before"]) == ("one rank reads", False)
    assert startup["repeated_bytes"] == 0
    assert startup["summary"] == (
        "Only rank 0 read 500.0 MB (all from the page cache) in 2.00 s; the others received it by broadcast and "
        "waited up to 4.50 s for it in DDP's constructor."
    )


def test_some_ranks_read(tmp_path: Path) -> None:
    startup = report(tmp_path, [way(load()), way(load()), way()])
    assert (startup["scenario"], startup["repeated_bytes"]) == ("some ranks read", SIZE)


@pytest.mark.parametrize("differ", [False, True])
def test_scenario_b_built_in_code(tmp_path: Path, differ: bool) -> None:
    # A tokenizer or a small table is loaded too: not the weights.
    startup = report(tmp_path, [way(load(20 * MB, "/data/vocabulary.pt"))] * 2, differ)
    assert (startup["scenario"], startup["equal_before"]) == ("built in code", not differ)
    assert startup["loaded_bytes"] == 0
    assert ("Ranks were equal before the broadcast" in startup["summary"]) is not differ


@pytest.mark.parametrize(
    ("measured", "direct"),
    [
        ({"moved": SIZE, "staged": 4 * MB, "read": 0}, True),
        # Staged: the host held it for a while; or read it by system calls; or the device never got it.
        ({"moved": SIZE, "staged": SIZE, "read": 0}, False),
        ({"moved": SIZE, "staged": 4 * MB, "read": SIZE}, False),
        ({"moved": 0, "staged": 4 * MB, "read": 0}, False),
    ],
)
def test_a_direct_read_is_recognised_by_measured_memory(
    tmp_path: Path, measured: dict[str, int], direct: bool
) -> None:
    record = load(**measured)
    assert is_direct(record) is direct
    startup = report(tmp_path, [way(record), way(record)])
    assert [row["direct"] for row in startup["ranks"]] == [direct] * 2
    assert ("directly to the device" in startup["summary"]) is direct


def test_copies_to_a_device(tmp_path: Path) -> None:
    copy = StartupRecord("copy", 106.0, 0.5, via="Module.to", bytes=SIZE, device=SIZE, moved=SIZE)
    slow = StartupRecord("copy", 106.0, 1.0, via="Module.to", bytes=SIZE, device=SIZE, moved=SIZE)
    startup = report(tmp_path, [way(copy), way(slow)])
    assert (startup["copied_bytes"], startup["copy_rate"]) == (2 * SIZE, 500 * MB)
    # Work on a device is not complete when the call returns.
    assert startup["broadcast_rate"] is None
    assert startup["ranks"][0]["device_memory"] == {"copy": SIZE}


def test_files_without_a_name_count_by_bytes_read() -> None:
    row = timeline(0, "node0", way(StartupRecord("load", 103.0, 1.0, via="torch.load", read=7 * MB)))
    assert (row["loaded_bytes"], row["files"]) == (7 * MB, [])


def test_records_of_an_older_ddpcheck_have_none(tmp_path: Path) -> None:
    report = RunBuilder(tmp_path, 2).wrap().train(1).end().report()
    assert (report.startup, report.memory) == (None, None)
