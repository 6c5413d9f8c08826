"""Steps that were compared are folded; reports of what remains are right, whatever is killed or full meanwhile."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpcheck.analysis.report_builder import analyse_run, build_report
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.errors import RecordsFolded
from ddpcheck.launcher import folding
from ddpcheck.launcher.folding import Folding
from ddpcheck.launcher.multi_node.merge import merge_runs
from ddpcheck.records import folding as folded_files
from ddpcheck.records.folding import FOLDS_FILE, FoldList, folded_path, further_files, part_path
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.folds import FoldedRecord
from ddpcheck.records.reader import RecordFile
from tests.helpers.long_run import SAMPLE_EVERY, LongRun, essentials, make_source, small_parts

STEPS = 1500
Source = tuple[Path, dict[str, object]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = make_source(tmp_path_factory.mktemp("source") / "sound", STEPS)
    return folder, essentials(analyse_run(folder))


@pytest.fixture(scope="module")
def unfolded(sound: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts of a run whose ranks have not ended, as of a job that is still running."""
    with small_parts():
        run = LongRun(sound[0], tmp_path_factory.mktemp("unfolded") / "run")
        run.advance(STEPS)
    return run.folder


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    with small_parts():
        yield


def folds_of(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (folder / FOLDS_FILE).read_text().splitlines()]


def count_of(folder: Path) -> int:
    return sum(len(further_files(path)) for path in folder.glob("rank-*.jsonl"))


def kill_when(child: int, is_reached: Callable[[], bool]) -> None:
    """SIGKILL the process at this moment, if it has not ended before."""
    ended = False
    while not ended and not is_reached():
        ended = os.waitpid(child, os.WNOHANG) != (0, 0)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def follow_until_idle(folder: Path) -> None:
    run = RunReader(folder)
    follower = Folding(run)
    while run.poll():
        for session in run.attempts:
            follower.follow(session)
        follower.tick()


def test_reports_of_folded_steps_are_those_of_all_steps(sound: Source, tmp_path: Path) -> None:
    run = LongRun(sound[0], tmp_path / "run")
    run.play(0, STEPS)
    run.close()
    assert essentials(run.report()) == sound[1]
    assert essentials(analyse_run(run.folder)) == sound[1]
    first, *_, last = folds_of(run.folder)
    assert first["first"] > 0
    assert last["end"] < STEPS - 100
    # Start and end are kept; of the rest, samples on all ranks.
    for path in run.paths:
        steps = [
            r.step for r in RecordFile(path).all() if isinstance(r, DigestRecord) and r.stage == "params"
        ]
        kept = set(steps)
        assert len(steps) == len(kept)
        assert {*range(first["first"]), *range(last["end"], STEPS)} <= kept
        assert kept & {*range(first["first"], last["end"])} == {
            step for step in range(first["first"], last["end"]) if step % SAMPLE_EVERY == 0
        }
    assert analyse_run(run.folder).run["folded"] == [[first["first"], last["end"] - 1]]


@pytest.mark.parametrize(("step", "steps"), [(700, 2700), (1440, 1500)])
def test_divergence_after_folding_has_begun(tmp_path: Path, step: int, steps: int) -> None:
    source = make_source(tmp_path / "source", steps, outlier_step=step)
    expected = essentials(analyse_run(source))
    finding, *_ = expected["findings"]
    assert (finding["code"], finding["step"], finding["ranks"]) == ("DDP201", step, [1])
    run = LongRun(source, tmp_path / "run")
    run.play(0, steps)
    run.close()
    assert essentials(run.report()) == expected
    assert essentials(analyse_run(run.folder)) == expected
    folds = folds_of(run.folder)
    assert folds[0]["end"] <= step
    assert not any(fold["first"] <= step < fold["end"] for fold in folds)
    if steps > 2 * step:
        assert any(fold["first"] > step and not fold["agreed"] for fold in folds)


def test_records_that_the_launcher_has_not_read_are_kept(sound: Source, tmp_path: Path) -> None:
    """As while the launcher is stopped."""
    run = LongRun(sound[0], tmp_path / "run")
    run.play(0, 200)
    run.advance(STEPS)
    assert not (run.folder / FOLDS_FILE).exists()
    for path in run.paths:
        steps = [
            r.step for r in RecordFile(path).all() if isinstance(r, DigestRecord) and r.stage == "params"
        ]
        assert steps == list(range(STEPS))
    while run.run.poll():
        run.folding.tick()
    run.folding.tick()
    run.close()
    assert folds_of(run.folder)
    assert essentials(run.report()) == sound[1]
    assert essentials(analyse_run(run.folder)) == sound[1]


def test_launcher_is_killed_while_it_folds(unfolded: Path, tmp_path: Path) -> None:
    expected = essentials(analyse_run(unfolded))
    reached: set[int] = set()
    for number in range(12):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(unfolded, folder)
        child = os.fork()
        if not child:
            try:
                follow_until_idle(folder)
            finally:
                os._exit(0)
        kill_when(child, lambda folder=folder, left=33 - 2 * number: count_of(folder) <= left)  # type: ignore[misc]
        reached.add(count_of(folder))
        assert essentials(analyse_run(folder)) == expected
    assert len(reached) > 2


@pytest.mark.parametrize("limit", [0, 100, 3_000, 20_000])
def test_disk_is_full_while_steps_are_folded(
    unfolded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    expected = essentials(analyse_run(unfolded))
    folder = tmp_path / "run"
    shutil.copytree(unfolded, folder)
    left = limit
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, bytes(data)[:left])
        left -= written
        return written

    monkeypatch.setattr(folding, "PAUSE_SECONDS", 0.0)
    run = RunReader(folder)
    follower = Folding(run)
    with monkeypatch.context() as full:
        full.setattr(folded_files.os, "write", limited)
        while run.poll():
            for session in run.attempts:
                follower.follow(session)
            follower.tick()
    assert essentials(analyse_run(folder)) == expected
    # There is space again.
    follower.tick()
    assert not part_path(folder / "rank-00002.jsonl", 1).exists()
    assert essentials(analyse_run(folder)) == expected


def test_rank_is_killed_at_any_moment(sound: Source, tmp_path: Path) -> None:
    """What it has passed to the system is read, in order and once."""
    draw = random.Random(7)
    for number in range(8):
        folder = tmp_path / f"run-{number}"
        child = os.fork()
        if not child:
            try:
                run = LongRun(sound[0], folder)
                for step in range(0, STEPS, 20):
                    run.advance(step)
            finally:
                os._exit(0)
        most = draw.randint(1, 20)
        kill_when(child, lambda folder=folder, most=most: count_of(folder) >= most)  # type: ignore[misc]
        for path in folder.glob("rank-*.jsonl"):
            file = RecordFile(path)
            steps = [r.step for r in file.all() if isinstance(r, DigestRecord) and r.stage == "params"]
            assert steps == list(range(len(steps)))
            assert file.bad == 0
        assert analyse_run(folder).findings is not None


def test_another_reader_is_slower(sound: Source, tmp_path: Path) -> None:
    """It reads some ranks up to steps that are then folded on all of them."""
    run = LongRun(sound[0], tmp_path / "run")
    other = RunReader(run.folder)
    run.play(0, 300)
    other.poll()
    for step in range(300, STEPS, 100):
        run.play(step, step + 100)
        if step % 400 == 0:
            # In the middle of a file.
            other._discover()
            with contextlib.suppress(RecordsFolded):
                other._read(run.paths[0], 40, 4096)
    run.close()
    description = json.loads((run.folder / "run.json").read_text())
    assert essentials(build_report(other, description)) == sound[1]


def test_merged_runs_keep_their_parts(sound: Source, tmp_path: Path) -> None:
    run = LongRun(sound[0], tmp_path / "run")
    run.play(0, STEPS)
    run.close()
    merged = merge_runs([run.folder], tmp_path / "merged")
    assert essentials(analyse_run(merged))["checks"] == sound[1]["checks"]


def test_a_part_that_is_gone_is_counted(unfolded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unfolded, folder)
    path = folder / "rank-00001.jsonl"
    part_path(path, 2).unlink()
    file = RecordFile(path)
    steps = [r.step for r in file.all() if isinstance(r, DigestRecord) and r.stage == "params"]
    assert file.bad == 1
    assert steps[-1] == STEPS - 1
    assert len(steps) < STEPS
    assert analyse_run(folder).run["unreadable_lines"] == 1


def test_damaged_folds_are_no_reason_to_fail(sound: Source, tmp_path: Path) -> None:
    run = LongRun(sound[0], tmp_path / "run")
    run.play(0, STEPS)
    run.close()
    draw = random.Random(3)
    for number in range(30):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(run.folder, folder)
        path = draw.choice([folder / FOLDS_FILE, folded_path(folder / "rank-00000.jsonl")])
        data = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 20)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.randint(1, len(data))])
        assert analyse_run(folder).world_size == 3


def test_sums_of_folded_records(sound: Source, tmp_path: Path) -> None:
    run = LongRun(sound[0], tmp_path / "run")
    run.play(0, STEPS)
    run.close()
    whole = list(RecordFile(sound[0] / "rank-00000.jsonl").all())
    records = list(RecordFile(run.paths[0]).all())
    folded = [record for record in records if isinstance(record, FoldedRecord)]
    for kind in {record.of for record in folded}:
        rows = sum(record.rows for record in folded if record.of == kind)
        assert rows + sum(record.kind == kind for record in records) == sum(r.kind == kind for r in whole)
    params = [record for record in folded if record.by.get("stage") == "params"]
    kept = {r.step for r in records if isinstance(r, DigestRecord) and r.stage == "params"}
    total = sum(
        int(r.root, 16) * (2 * r.step + 1)
        for r in whole
        if isinstance(r, DigestRecord) and r.stage == "params" and r.step not in kept
    )
    assert sum(int(record.digests["root"], 16) for record in params) % (1 << 128) == total % (1 << 128)


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_folds_are_joined_once_they_are_large(
    sound: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int | None
) -> None:
    """`failing`: the launcher is killed when it writes the file of this rank again."""
    monkeypatch.setattr(folding, "MOST_FOLDED_BYTES", 20_000)
    monkeypatch.setattr(folding, "FOLDS_AT_ONCE", 2)
    monkeypatch.setattr(folding, "PARTS_AT_ONCE", 1)
    run = LongRun(sound[0], tmp_path / "run")
    join_parts = folding.join_parts
    joins: list[int] = []

    class Killed(BaseException):
        pass

    def join(path: Path, folds: list[folded_files.Fold]) -> None:
        if path == (run.paths[failing] if failing is not None else None):
            raise Killed
        before = folded_path(path).stat().st_size
        join_parts(path, folds)
        joins.append(before - folded_path(path).stat().st_size)

    monkeypatch.setattr(folding, "join_parts", join)
    for step in range(0, STEPS + 50, 50):
        run.advance(min(step, STEPS))
        with contextlib.suppress(Killed):
            run.follow()
    run.close()
    joined = [fold for fold in folds_of(run.folder) if fold.get("samples", 1) > 1]
    assert joined
    assert all(saved > 0 for saved in joins)
    assert len(joins) >= (3 if failing is None else failing)
    assert essentials(run.report()) == sound[1]
    assert essentials(analyse_run(run.folder)) == sound[1]


def test_list_of_folds_is_read_again_when_it_grows(tmp_path: Path) -> None:
    folds = FoldList(tmp_path)
    assert folds.refresh() == []
    folded_files.add_fold(tmp_path, folded_files.Fold("s", 128, 256, True))
    with (tmp_path / FOLDS_FILE).open("ab") as file:
        file.write(b'{"session":"s","first":25')
    assert [fold.end for fold in folds.refresh()] == [256]
    # The launcher was killed in the middle of a line; another one goes on.
    folded_files.add_fold(tmp_path, folded_files.Fold("s", 512, 640, False))
    assert [fold.end for fold in folds.refresh()] == [640]
    assert [folds.at("s", step) is not None for step in (127, 128, 255, 256, 512, 640)] == [
        False, True, True, False, True, False,
    ]  # fmt: skip
