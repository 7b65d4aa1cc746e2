"""``boltmesh stream`` as a process: frames while somebody holds both ends, and no longer."""

import contextlib
import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from boltmesh.tui.sources.frames import (
    FrameDecoder,
    RemoteError,
    decode_hello,
    decode_jobs,
    read_frame,
    read_magic,
)
from tests.support.written_jobs import WrittenJob

STREAM = [sys.executable, "-m", "boltmesh", "stream"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(os.environ["BOLTMESH_RUN_DIR"])


@pytest.fixture
def job(run_dir: Path) -> Iterator[WrittenJob]:
    with contextlib.closing(WrittenJob(run_dir)) as job:
        yield job


@contextlib.contextmanager
def stream(*options: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        [*STREAM, "--interval", "0.1", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def begin(process: "subprocess.Popen[bytes]") -> BinaryIO:
    output = cast("BinaryIO", process.stdout)
    assert output.read(1) == b"\n"
    read_magic(output)
    return output


def frame(output: BinaryIO) -> bytes:
    payload = read_frame(output)
    assert payload is not None
    return payload


def test_a_job_is_introduced_and_then_shown_again_and_again(job: WrittenJob) -> None:
    with stream() as process:
        output = begin(process)
        hello = decode_hello(frame(output))
        assert (hello.job, hello.python, hello.others) == ("abcd", sys.executable, ())
        decoder = FrameDecoder()
        seen = decoder.decode(frame(output))
        assert [rank.global_step for rank in seen.job.ranks] == [1, 1]
        job.step()
        while seen.job.global_step < 2:
            seen = decoder.decode(frame(output))
        assert [len(rank.steps) for rank in seen.job.ranks] == [2, 2]
        pids = [each.pid for each in seen.devices if each.kind == "process"]
        assert pids == [os.getpid()] * 2


def test_it_ends_when_stdin_is_closed(job: WrittenJob) -> None:
    with stream("--interval", "60") as process:
        output = begin(process)
        for _ in range(3):  # the hello and two looks, the second of which comes at once
            frame(output)
        assert process.stdin is not None
        process.stdin.write(b"what is said there is of no interest")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.stdin.close()
        assert process.wait(50) == 0
        assert read_frame(output) is None


def test_it_ends_without_a_word_when_stdout_is_closed(job: WrittenJob) -> None:
    with stream("--interval", "60") as process:
        output = begin(process)
        for _ in range(3):
            frame(output)
        output.close()
        assert process.wait(50) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_without_a_stdin_there_is_one_look(job: WrittenJob) -> None:
    done = subprocess.run(STREAM, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    output = io.BytesIO(done.stdout[1:])
    read_magic(output)
    decode_hello(frame(output))
    assert FrameDecoder().decode(frame(output)).job.id == "abcd"
    assert read_frame(output) is None
    assert done.stderr == b""


def test_trouble_is_a_frame(run_dir: Path) -> None:
    with stream() as process:
        output = begin(process)
        with pytest.raises(RemoteError, match=f"there is no job in {run_dir}"):
            decode_hello(frame(output))
        assert read_frame(output) is None
        assert process.wait(50) == 1


def test_an_unknown_job_is_answered_with_the_nearest(job: WrittenJob) -> None:
    with stream("abcx") as process, pytest.raises(RemoteError, match="Did you mean 'abcd'"):
        decode_hello(frame(begin(process)))


def test_jobs_are_listed_in_one_frame(job: WrittenJob, run_dir: Path) -> None:
    with contextlib.closing(WrittenJob(run_dir, "other")), stream("--list") as process:
        output = begin(process)
        assert {job.id for job in decode_jobs(frame(output))} == {"abcd", "other"}
        assert read_frame(output) is None
        assert process.wait(50) == 0


def test_other_running_jobs_are_named_when_none_was_asked_for(
    job: WrittenJob, run_dir: Path
) -> None:
    with contextlib.closing(WrittenJob(run_dir, "newer")):
        with stream() as process:
            hello = decode_hello(frame(begin(process)))
        assert (hello.job, hello.others) == ("newer", ("abcd",))
        with stream("abcd") as process:
            assert decode_hello(frame(begin(process))).others == ()


def test_a_terminal_is_refused(job: WrittenJob) -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(STREAM, stdout=theirs, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert b"boltmesh top" in done.stderr
