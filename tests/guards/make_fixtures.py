"""Makes what later versions have to read: a checkpoint of each kind, and a recording.

    python -m tests.guards.make_fixtures [FOLDER]

``data/`` holds what this made at version 0.1.0, before the modules of that version were moved:

``checkpoints.zip``
    Of each of ``LAYOUTS``: the model after an epoch of three optimizer steps.
``NAME.json``
    Beside it, what the ranks had in memory at that moment: whole parameters and optimizer state by
    name, learning rates, and progress.
``recording``, ``recording.json``
    Four ranks of a pipeline beside ZeRO with its optimizer on a disk, as ``boltmesh record`` kept
    them, and figures from what ``boltmesh top --replay`` said of it.

Do not make them anew to mend a test: what users have on their disks does not change either. Make
another set when a format changes on purpose.
"""

import getpass
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor

from boltmesh.strategies.parameter_access import whole_value
from boltmesh.strategies.registry import build_strategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

DATA = Path(__file__).with_name("data")
JOB = "0123abcd"
RECORDING_STEPS = 12

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (2, "bolt_ddp", {}),
    "zero3": (2, "bolt_zero3", {}),
    "zero3_cpu": (2, "bolt_zero3_cpu", {}),
    "pipeline": (2, "bolt_pipeline", {"stages": 2, "microbatches": 2}),
    "tensor": (2, "bolt_tensor", {"size": 2}),
    "3d": (8, "bolt_3d", {"data": 2, "pipeline": 2, "tensor": 2, "microbatches": 2}),
}
"""By name: the number of ranks, the registered strategy and its arguments."""


def model() -> Stack:
    """Tied weights, a frozen layer, two groups with settings of their own, and a schedule."""
    return Stack(depth=2, width=4, hidden=6, ties=True, freezes=True, groups=True)


def fit(layout: str, num_ranks: int, ckpt_path: Path | None = None) -> Trainer:
    """Train an epoch; what was saved at its end leaves nothing to do."""
    _, name, options = LAYOUTS[layout]
    trained = Trainer(
        accelerator="cpu", devices=num_ranks, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=build_strategy(name, telemetry=False, **options),
    )  # fmt: skip
    batch_size = 8 if layout in {"pipeline", "tensor"} else 4  # where one replica has them all
    trained.fit(model(), token_data(24, batch_size), ckpt_path=ckpt_path and str(ckpt_path))
    return trained


def content(trained: Trainer) -> dict[str, Any]:
    """What the ranks hold after a fit, put together as this rank can. Collective."""
    module, (optimizer,) = trained.lightning_module, trained.optimizers
    holds = getattr(trained.strategy, "holds", lambda _: True)
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        if holds(name):
            found[name] = numbers(whole_value(parameter.detach(), parameter))
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = numbers(whole_value(value, parameter))
    found["lr"] = [group["lr"] for group in optimizer.param_groups]
    found["progress"] = [trained.current_epoch, trained.global_step]
    return found


def numbers(tensor: Tensor) -> list[float]:
    """The elements, exactly: nine digits tell every float32."""
    return [float(f"{value:.9g}") for value in tensor.flatten().tolist()]


def save(rank: int, world_size: int, folder: str, layout: str) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    trained = fit(layout, world_size)
    trained.save_checkpoint(Path(folder, layout))
    return content(trained)


def make_checkpoints(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fixtures-") as folder:
        for layout, (num_ranks, _, _) in LAYOUTS.items():
            ranks = run_ranks(save, num_ranks, folder, layout)
            write(target / f"{layout}.json", merged(ranks))
        shutil.make_archive(str(target / "checkpoints"), "zip", folder)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, each of its keys on a line of its own."""
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put together what ranks hold; what several hold has to be the same."""
    whole: dict[str, Any] = {}
    for found in ranks:
        for name, value in found.items():
            assert whole.setdefault(name, value) == value, name
    return whole


class Slow(Callback):
    """Leaves time to record."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.5)


def train_for_recording(rank: int, world_size: int, folder: str) -> None:
    os.environ["BOLTMESH_JOB_ID"] = JOB
    seed_everything(1, verbose=False)
    options = {
        "data": 2, "pipeline": 2, "microbatches": 2,
        "offload_optimizer": "nvme", "offload_path": folder,
    }  # fmt: skip
    trained = Trainer(
        accelerator="cpu", devices=world_size, max_steps=RECORDING_STEPS, log_every_n_steps=1,
        callbacks=[Slow()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, strategy=build_strategy("bolt_3d", **options),
    )  # fmt: skip
    trained.fit(model(), token_data(8 * RECORDING_STEPS, 4))


def make_recording(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fixtures-") as folder:
        os.environ["BOLTMESH_RUN_DIR"] = folder
        ranks = threading.Thread(
            target=run_ranks, args=(train_for_recording, 4, folder), kwargs={"timeout_s": 300}
        )
        ranks.start()
        while not list(Path(folder).glob("*/rank-3.bin")):
            time.sleep(0.05)
        kept = Path(folder, "recording")
        boltmesh("record", "--interval", "0.5", JOB, str(kept))
        ranks.join()
        names = {
            folder: "/tmp/boltmesh",
            str(Path.cwd()): "/home/user",
            sys.executable: "/usr/bin/python3",
            socket.gethostname(): "node0",
            getpass.getuser(): "user",
        }
        anonymise(kept, target / "recording", names)
    report = json.loads(boltmesh("top", "--once", "--json", "--replay", str(target / "recording")))
    write(target / "recording.json", summary(report))


def boltmesh(*arguments: str) -> str:
    command = [sys.executable, "-m", "boltmesh", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """A few figures of each kind from the document of ``boltmesh top --json``."""
    kept = ("id", "state", "strategy", "mesh", "global_step", "pipeline", "expected")
    found = {key: report[key] for key in kept}
    found["losses"] = [point["value"] for point in report["history"] if point["name"] == "loss"]
    found["phases"] = {each["name"]: each["seconds"] for each in _last_step(report)["phases"]}
    for rank in report["ranks"]:
        found[f"rank {rank['rank']}"] = {
            "coordinates": rank["coordinates"],
            "steps": len(rank["steps"]),
            "chunks": len(rank["chunks"]),
            "calls and bytes": [
                f"{each['axis']} {each['operator']}: {each['calls']}, {each['payload_bytes']}"
                for each in rank["collectives"]
            ],
            "messages": [
                f"{each['operator']} {each['peer']}: {each['calls']}, {each['payload_bytes']}"
                for each in rank["peers"]
            ],
            "offload": len(rank["offload"]),
        }
    return found


def _last_step(report: Mapping[str, Any]) -> Mapping[str, Any]:
    last: Mapping[str, Any] = report["ranks"][0]["steps"][-1]
    return last


def anonymise(source: Path, target: Path, names: Mapping[str, str]) -> None:
    """Copy a recording without the names and the paths of the machine that made it."""
    line, _, frames = source.read_bytes().partition(b"\n")
    written, at = [line + b"\n"], 0
    header = struct.Struct(">II")
    while at < len(frames):
        length, _ = header.unpack_from(frames, at)
        payload = frames[at + header.size : at + header.size + length]
        clean = msgspec.msgpack.encode(_renamed(msgspec.msgpack.decode(payload), names))
        written.append(header.pack(len(clean), zlib.crc32(clean)) + clean)
        at += header.size + length
    target.write_bytes(b"".join(written))


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in names.items():
            if value == old or ("/" in old and old in value):
                value = value.replace(old, new)
        return value
    if isinstance(value, list):
        return [_renamed(each, names) for each in value]
    if isinstance(value, dict):
        return {_renamed(key, names): _renamed(each, names) for key, each in value.items()}
    return value


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    target.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    make_checkpoints(target)
    make_recording(target)


if __name__ == "__main__":
    main()
