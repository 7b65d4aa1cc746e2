"""Output of a rank is kept beside its telemetry: bounded, without secrets."""

import io
import os
import sys
from pathlib import Path

import pytest

from boltmesh.telemetry.reader.sidecar_files import OutputTail
from boltmesh.telemetry.writer import output
from boltmesh.telemetry.writer.output import OutputKeeper, keep_lines, keep_output, stop_keeping


def _texts(path: Path, most: int = 100) -> list[str]:
    return [line.partition(" ")[2] for line in OutputTail(path, most).read()]


def test_what_is_printed_is_kept_and_still_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank-0.log"
    keep_output(path)
    sys.stdout.write("loss 0.5\n")
    sys.stdout.write("step 1\rstep 2\r")
    sys.stdout.write("step 3\n")
    sys.stdout.write("export HF_TOKEN=hf_abcdefghijklmnop\nno end yet")
    keep_lines("Traceback\nValueError: no")
    stop_keeping()
    sys.stdout.write("later\n")
    assert _texts(path) == [
        "loss 0.5", "step 3", "export HF_TOKEN=[redacted]", "no end yetTraceback", "ValueError: no",
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "hf_abc" in printed
    assert printed.endswith("later\n")
    assert path.stat().st_mode & 0o777 == 0o600


def test_wrappers_of_other_libraries_stay(tmp_path: Path) -> None:
    stream = io.StringIO()
    seen: list[str] = []

    def wrap(name: str) -> None:
        inner = stream.write

        def write(text: str) -> int:
            seen.append(name)
            return inner(text)

        stream.write = write

    first, second = (OutputKeeper(tmp_path / name) for name in ("first", "second"))
    wrap("before")
    first.wrap(stream)
    first.close()
    second.wrap(stream)
    wrap("after")
    second.close()
    stream.write("text")
    assert seen == ["after", "before"]
    assert stream.getvalue() == "text"


def test_of_a_bar_below_another_one_the_last_state_is_kept(tmp_path: Path) -> None:
    keeper = OutputKeeper(tmp_path / "rank-0.log")
    keeper.add("\rEpoch 0: 10%")
    for share in (5, 50, 100):
        for part in ("\n", f"\rValidation: {share}%", "\x1b[A"):  # as tqdm writes them
            keeper.add(part)
    keeper.add("\n\r            \x1b[A\rEpoch 0: 20%\nend\n")
    keeper.add("\n\rTest: 5%\x1b[A\n")
    keeper.close()
    assert _texts(tmp_path / "rank-0.log") == [
        "Epoch 0: 10%", "Validation: 100%", "Epoch 0: 20%", "end", "", "Test: 5%",
    ]  # fmt: skip


def test_lines_are_read_without_their_colours(tmp_path: Path) -> None:
    keeper = OutputKeeper(tmp_path / "rank-0.log")
    keeper.add(
        "\x1b[32m12:00\x1b[0m | \x1b[1m\x1b[38;5;196mINFO\x1b[0m | \x1b]8;;http://x\x1b\\link\n"
    )
    keeper.close()
    assert _texts(tmp_path / "rank-0.log") == ["12:00 | INFO | link"]


def test_a_file_is_bounded_and_the_newest_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    keeper = OutputKeeper(path)
    tail = OutputTail(path, 50)
    for number in range(20_000):
        keeper.add(f"line {number} {'x' * 40}\n")
    keeper.close()
    size = sum(each.stat().st_size for each in tmp_path.iterdir())
    assert size <= 2 * output.MAX_BYTES
    lines = tail.read()
    assert len(lines) == 50
    assert "line 19999 " in lines[-1]
    assert tail.read() is lines


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "no descriptor"])
def test_a_new_half_that_cannot_be_had_closes_no_file_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    monkeypatch.setattr(output, "MAX_BYTES", 200)
    path = tmp_path / "rank-0.log"
    keeper = OutputKeeper(path)
    keeper.add("a" * 150 + "\n")
    with monkeypatch.context() as patch:
        if is_removed:
            path.unlink()
        else:
            patch.setattr(os, "open", lambda *_, **__: os.close(-1))
            with pytest.raises(OSError, match="Bad file descriptor"):
                keeper.add("b" * 150 + "\n")
    with (tmp_path / "checkpoint").open("wb", buffering=0) as file:
        keeper.add("c" * 150 + "\n")
        file.write(b"values")
    assert (tmp_path / "checkpoint").read_bytes() == b"values"
    assert _texts(path)[-1] == "c" * 150
    keeper.close()


def test_a_missing_file_and_a_link_have_no_lines(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("12:00:00 secret\n")
    (tmp_path / "rank-1.log").symlink_to(tmp_path / "secret")
    assert OutputTail(tmp_path / "rank-0.log", 5).read() == ()
    assert OutputTail(tmp_path / "rank-1.log", 5).read() == ()
