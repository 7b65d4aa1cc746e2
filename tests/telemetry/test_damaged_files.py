"""Files of ranks that are damaged, are no files, or belong to another user."""

import os

import pytest

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import rank_file
from boltmesh.telemetry.layout import SECTIONS
from boltmesh.telemetry.reader.reader import list_jobs, open_job
from tests.telemetry.test_reader import make_job, make_rank, snapshot, write_step


def damage_short(file):
    os.truncate(file, layout.FILE_BYTES // 2)


def damage_empty(file):
    os.truncate(file, 0)


def damage_version(file):
    with file.open("r+b") as stream:
        stream.seek(8)
        stream.write(b"\x09")


def damage_noise(file):
    file.write_bytes(os.urandom(layout.FILE_BYTES))


def make_link(file):
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def make_readable(file):
    file.chmod(0o644)


def make_folder(file):
    file.unlink()
    file.mkdir()


def make_pipe(file):
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_short, "bytes of"),
        (damage_empty, "no whole header"),
        (damage_version, "version 9"),
        (damage_noise, "not a telemetry file"),
        (make_link, "symbolic links"),
        (make_readable, "chmod 600"),
        (make_folder, "not a plain file"),
        (make_pipe, "not a plain file"),
    ],
)
def test_a_rank_whose_file_cannot_be_trusted_is_missing_with_the_reason(damage, reason):
    path = make_job(world_size=2)
    files = [make_rank(path, rank, world_size=2) for rank in range(2)]
    files[1].close()
    damage(rank_file(path, 1))
    seen = snapshot()
    assert [rank.state for rank in seen.ranks] == ["running", "missing"]
    assert seen.ranks[1].error is not None
    assert reason in seen.ranks[1].error
    files[0].close()


def test_a_rank_that_has_not_begun_is_missing_without_a_complaint():
    file = make_rank(make_job(world_size=2), world_size=2)
    seen = snapshot()
    assert (seen.state, seen.ranks[1].state, seen.ranks[1].error) == ("running", "missing", None)
    file.close()


def test_random_damage_anywhere_never_breaks_the_reader():
    path = make_job()
    file = make_rank(path)
    data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
    for number in range(20):
        file.enqueue(number + 1, data, reduce, 2, 0, 100)
        write_step(file, number, loss=0.5)
        file.point("loss", number, 0.5)
        file.event("warning", "x")
    file.close()
    whole = rank_file(path, 0).read_bytes()
    for seed in range(40):
        damaged = bytearray(whole)
        for section in SECTIONS.values():
            span = min(section.end - section.offset, 4000)
            for index in range(30):
                at = section.offset + (seed * 7919 + index * 104_729) % span
                damaged[at] ^= 0x5A
        rank_file(path, 0).write_bytes(damaged)
        seen = snapshot()
        assert all(step.seconds == pytest.approx(0.01) for step in seen.ranks[0].steps)
        assert all(point.value == 0.5 for point in seen.history)


def test_a_file_of_somebody_else_is_not_read(monkeypatch):
    path = make_job()
    make_rank(path).close()
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with pytest.raises(TelemetryError, match="belongs to user"):
        open_job(path)
    with pytest.raises(TelemetryError, match="belongs to user"):
        list_jobs()
