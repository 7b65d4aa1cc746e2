"""Whatever a checkpoint holds, it is loaded as it was written, or refused in one line.

Forged ones have checksums that are right and contents that make no sense.
"""

import io
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from boltmesh.cli import run_command
from boltmesh.conversion.import_checkpoint import save_alone
from boltmesh.conversion.safetensors_files import CRC32 as SUM
from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.directory import load_directory
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, load_file
from boltmesh.strategies.checkpoint.manifest import CRC32, MANIFEST, METADATA, REST, _encode
from tests.cli.test_fuzzed_commands import CONTROL
from tests.strategies.checkpoint.test_bit_flips import assert_same, content, in_memory

NUM_CASES = 500
COMMANDS = (
    ["verify", "a.ckpt"],
    ["export", "a.ckpt", "--to", "b.safetensors", "--force"],
    ["export", "a.ckpt", "--to", "b.ckpt", "--force"],
    ["import", "a.ckpt", "--to", "c", "--force"],
)


def nonsense(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """Change a value somewhere inside of another."""
    if isinstance(value, dict) and value and depth < 5 and draw.random() < 0.85:
        key = draw.choice(list(value))
        changed = {**value, key: nonsense(draw, value[key], depth + 1)}
        if draw.random() < 0.2:
            changed[draw.choice(["x", 7, "../x", "\x1b[2J", ""])] = changed.pop(key)
        return changed
    if isinstance(value, list) and value and depth < 5 and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], nonsense(draw, value[at], depth + 1), *value[at + 1 :]]
    return draw.choice(
        [
            *(None, True, -1, 0, 2**70, 1e308, float("nan"), "", "\x1b[2J\u202e", "../x"),
            *([], {}, [None] * 9, torch.zeros(3), torch.zeros(()), {"a": 1}),
        ]
    )


def damage_bytes(draw: random.Random, path: Path) -> None:
    data = path.read_bytes()
    kind, at = draw.randrange(6), draw.randrange(max(1, len(data)))
    size = draw.choice([1, 8, 512, 4096])
    if kind == 0:
        data = data[:at]
    elif kind == 1:
        data = data[:at] + draw.randbytes(size) + data[at + size :]
    elif kind == 2:
        data = data[:at] + bytes(size) + data[at + size :]
    elif kind == 3:
        other = draw.randrange(max(1, len(data) - size))
        data = data[:at] + data[other : other + size] + data[at + size :]
    elif kind == 4:
        data = data[:at] + draw.randbytes(size) + data[at:]
    else:
        data = data[:at] + data[at + size :]
    path.write_bytes(data)


def seal(place: Path, **changed: Any) -> None:
    """Write a manifest whose checksums are those of the files."""
    listed = json.loads((place / MANIFEST).read_text())
    for name in (METADATA, REST):
        data = (place / name).read_bytes()
        listed["files"][name] = {"bytes": len(data), CRC32: zlib.crc32(data)}
    listed = {key: each for key, each in {**listed, **changed}.items() if key != CRC32}
    sealed = {**listed, CRC32: zlib.crc32(_encode(listed))}
    (place / MANIFEST).write_bytes(_encode(sealed))


def forge(draw: random.Random, place: Path) -> None:
    kind = draw.randrange(4)
    if kind == 0:
        rest = torch.load(place / REST, weights_only=True)
        torch.save(nonsense(draw, rest), place / REST)
    elif kind == 1:
        metadata = pickle.loads((place / METADATA).read_bytes())
        places = metadata.storage_data
        index = draw.choice(list(places))
        field = draw.choice(["relative_path", "offset", "length"])
        vars(places[index])[field] = draw.choice([-1, 0, 2**62, "../x", "/dev/zero", None, 5])
        (place / METADATA).write_bytes(pickle.dumps(metadata))
    elif kind == 2:
        metadata = pickle.loads((place / METADATA).read_bytes())
        field = draw.choice(["planner_data", "storage_data", "state_dict_metadata"])
        held = getattr(metadata, field)
        name, other = draw.choice(list(held)), draw.choice(list(held))
        if draw.random() < 0.5:
            held[name] = draw.choice(
                [None, (), ("state_dict",), ("optimizer_7", "state"), held[other]]
            )
        else:
            del held[name]
        (place / METADATA).write_bytes(pickle.dumps(metadata))
    else:
        listed = json.loads((place / MANIFEST).read_text())
        listed = nonsense(draw, {key: each for key, each in listed.items() if key != CRC32})
        try:
            sealed = _encode({**listed, CRC32: zlib.crc32(_encode(listed))})
        except TypeError:  # a tensor in it
            sealed = b"{}"
        (place / MANIFEST).write_bytes(sealed)
        return
    seal(place)


def damage_directory(draw: random.Random, place: Path) -> bool:
    """Damage a directory; return whether its checksums can tell."""
    names = sorted(each.name for each in place.iterdir())
    path = place / draw.choice(names)
    kind = draw.randrange(10)
    if kind < 3:
        damage_bytes(draw, path)
    elif kind == 3:
        path.unlink()
    elif kind == 4:
        path.unlink()
        draw.choice([os.mkfifo, os.mkdir, lambda each: os.symlink("/dev/zero", each)])(path)
    elif kind == 5:
        other = place / draw.choice(names)
        if other != path:
            path.write_bytes(other.read_bytes())
    else:
        forge(draw, place)
        return False
    return True


def damage_file(draw: random.Random, path: Path) -> bool:
    kind = draw.randrange(8)
    if kind < 4:
        damage_bytes(draw, path)
        return True
    if kind == 4:
        torch.save(nonsense(draw, content()), path)
    elif kind == 5:
        path.write_bytes(pickle.dumps(content()["hyper_parameters"]))
    elif kind == 6:
        path.write_bytes(draw.choice([b"", b"PK\x03\x04", b"\x80\x02}", bytes(70_000)]))
    else:
        buffer = io.BytesIO()
        torch.save(nonsense(draw, content()), buffer, _use_new_zipfile_serialization=False)
        path.write_bytes(buffer.getvalue())
    return False


def forge_export(draw: random.Random, path: Path) -> None:
    """Change the header of safetensors, with the right checksum."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    notes = header.pop("__metadata__")
    entry = header[draw.choice(sorted(header))]
    entry[draw.choice(sorted(entry))] = draw.choice(
        [None, "F16", "F64", "X9", [], [0, 2**62], [-4, 0], [3, -5], [2**70, 1], ["a", "b"], {}, 5]
    )
    text = json.dumps({"__metadata__": {**notes, SUM: "0" * 8}, **header}, separators=(",", ":"))
    crc32 = f"{zlib.crc32(data[end:], zlib.crc32(text.encode())):08x}"
    text = text.replace(f'"{SUM}":"{"0" * 8}"', f'"{SUM}":"{crc32}"')
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[end:])


@pytest.mark.parametrize("num_cases", [40, pytest.param(NUM_CASES, marks=pytest.mark.full)])
def test_exports_with_forged_headers_are_refused(
    num_cases: int, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5.0)}
    AtomicCheckpointIO().save_checkpoint({"state_dict": weights}, "a.ckpt")
    path = Path("a.safetensors")
    line = ["export", "a.ckpt", "--to", str(path), "--prefix", ""]
    assert run_command(line) == 0
    draw, whole = random.Random(20260102), path.read_bytes()
    assert run_command(["verify", str(path)]) == 0
    for number in range(num_cases):
        path.write_bytes(whole)
        forge_export(draw, path)
        capfd.readouterr()
        assert run_command(["verify", str(path)]) == 1, number
        assert run_command(["import", str(path), "--to", "b"]) == 2, number
        error = capfd.readouterr().err
        assert error.startswith("boltmesh: a.safetensors cannot be read: "), error
        assert len(error.splitlines()) == 1
        assert not Path("b").exists()


@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("num_cases", [40, pytest.param(NUM_CASES, marks=pytest.mark.full)])
def test_damaged_checkpoints_are_whole_or_refused(
    num_cases: int,
    kind: str,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str, int, int], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, place, whole = random.Random(20260101), Path("a.ckpt"), Path("whole")
    if kind == "file":
        AtomicCheckpointIO().save_checkpoint(content(), whole)
        copy: Callable[..., Any] = shutil.copyfile
        load: Callable[[Path], Any] = load_file
        wanted = load_file(whole)
    else:
        save_alone(content(), whole)
        copy, load = shutil.copytree, load_directory
        wanted = in_memory(load_directory(whole))
    refusals: list[str] = []
    for number in range(num_cases):
        copy(whole, place)
        damage = damage_file if kind == "file" else damage_directory
        is_seen = damage(draw, place)
        state = draw.getstate()
        try:
            found = in_memory(load(place))
        except (CheckpointError, OSError) as refusal:
            refusals.append(str(refusal))
        else:
            if is_seen:
                assert_same(found, wanted)
        for line in COMMANDS if number % 4 == 0 else COMMANDS[:1]:
            code = run_command(line)
            out, error = capfd.readouterr()
            assert code in {0, 1, 2}, (number, line)
            assert "Traceback" not in error, (number, line, error)
            assert not CONTROL.search(out + error), (number, line)
        draw.setstate(state)
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert not any(CONTROL.search(each) for each in refusals)
    assert len(refusals) > num_cases / 2
    said = "no traceback, hang or value changed silently"
    figure(f"damaged checkpoints ({kind}): {said}", num_cases, num_cases)
