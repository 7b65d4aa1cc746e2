"""Whatever a recording holds, it is shown up to where it is whole, or refused in one line."""

import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from boltmesh.cli import run_command
from boltmesh.errors import ConfigError
from boltmesh.tui.sources.replay import ReplaySource
from tests.cli.test_fuzzed_commands import CONTROL

NUM_CASES = 500
RECORDING = Path(__file__).parents[1] / "guards" / "data" / "recording"
HEADER = struct.Struct(">II")


def frames_of(data: bytes) -> list[bytes]:
    """Return the payloads of a recording."""
    at, found = data.index(b"\n") + 1, []
    while at < len(data):
        length, _ = HEADER.unpack_from(data, at)
        found.append(data[at + HEADER.size : at + HEADER.size + length])
        at += HEADER.size + length
    return found


def sealed(head: bytes, payloads: list[bytes]) -> bytes:
    """Write payloads with checksums that are right."""
    return head + b"".join(HEADER.pack(len(each), zlib.crc32(each)) + each for each in payloads)


def nonsense(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """Change a value somewhere inside of a frame."""
    if isinstance(value, list) and value and depth < 6 and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], nonsense(draw, value[at], depth + 1), *value[at + 1 :]]
    if isinstance(value, dict) and value and depth < 6:
        key = draw.choice(list(value))
        return {**value, key: nonsense(draw, value[key], depth + 1)}
    return draw.choice(
        [
            *(None, True, -1, 2**63, 1e308, float("nan"), float("inf")),
            *("\x1b]0;x\x07\u202e", "x" * 5000, b"\xff", [], {}, [[]] * 50),
        ]
    )


def damaged(draw: random.Random, data: bytes) -> tuple[bytes, bool]:
    """Return a damaged recording, and whether its checksums can tell."""
    head = data[: data.index(b"\n") + 1]
    payloads = frames_of(data)
    at = draw.randrange(len(payloads))
    kind = draw.randrange(9)
    if kind <= 1:
        bit = draw.randrange(8 * len(head), 8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed), True
    if kind == 2:
        return data[: draw.randrange(len(data))], True
    if kind == 3:
        start = draw.randrange(len(data))
        size = draw.randrange(1, 5000)
        return data[:start] + draw.randbytes(size) + data[start + size :], False
    if kind == 4:
        return bytes([draw.randrange(256)]) * draw.randrange(200) + data, False
    if kind == 5:
        payloads[at] = draw.choice([b"", b"\xc1", b"\x91" * 60_000, draw.randbytes(60), b"\x90"])
    elif kind == 6:
        draw.shuffle(payloads)
    else:
        try:
            inside = msgspec.msgpack.decode(payloads[at])
            payloads[at] = msgspec.msgpack.encode(nonsense(draw, inside))
        except (msgspec.DecodeError, OverflowError):
            payloads[at] = b""
    return sealed(head, payloads), False


def looks(path: Path) -> list[bytes]:
    """Return what each frame shows, as JSON."""
    source = ReplaySource(path, is_playing=False)
    try:
        return [msgspec.json.encode(each) for each in source.frames()]
    finally:
        source.close()


@pytest.mark.parametrize("num_cases", [60, pytest.param(NUM_CASES, marks=pytest.mark.full)])
def test_damaged_recordings_are_shown_or_refused(
    num_cases: int, tmp_path: Path, capfd: Any, figure: Callable[[str, int, int], None]
) -> None:
    draw, path = random.Random(20260101), tmp_path / "recording"
    data = RECORDING.read_bytes()
    whole = looks(RECORDING)
    num_shown, refusals = 0, []
    for number in range(num_cases):
        content, is_seen = damaged(draw, data)
        path.write_bytes(content)
        try:
            found = looks(path)
        except ConfigError as error:
            refusals.append(str(error))
        else:
            num_shown += 1
            if is_seen:  # what was written, up to the damage
                assert found == whole[: len(found)]
            for each in found:
                json.loads(each)
        if number % 5 == 0:
            for line in (
                ["top", "--replay", str(path), "--once"],
                ["export-metrics", "--replay", str(path)],
                ["report", "--replay", str(path), "--output", str(tmp_path / f"{number}.html")],
                ["verify", str(path)],
            ):
                code = run_command(line)
                out, error = capfd.readouterr()
                assert code in {0, 1, 2}, line
                assert "Traceback" not in error, error
                assert not CONTROL.search(out + error), line
    assert all(len(each.splitlines()) == 1 for each in refusals)
    assert num_cases / 5 < num_shown < num_cases
    figure("damaged recordings: no traceback, hang or changed value", num_cases, num_cases)
