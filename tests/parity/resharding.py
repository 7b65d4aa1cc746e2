"""Every layout goes on from the checkpoint of every other: the resharding matrix.

    python -m tests.parity.resharding [--only LAYOUT ...] [--to LAYOUT ...]

In each layout a GPT is trained for an epoch, at whose end ``ModelCheckpoint`` saves. Then each
layout resumes each of these checkpoints, in a process with another seed, and trains the second
epoch. How that ends is compared with one process of plain Lightning that was never interrupted:
the losses of the epoch's steps, every parameter, all state of the optimizer, learning rates and the
scheduler, steps, epochs and the progress of the loops. ``test_resharding.py`` runs a part of it.

Prints a row for each layout that saved, a column for each that went on, and between them the
largest difference; or below the table why there is none. Plain Lightning reads no directories:
there the checkpoint is what ``boltmesh export`` makes of it.
"""

import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from boltmesh.conversion.export_checkpoint import export
from boltmesh.conversion.source import load_value, open_checkpoint
from boltmesh.strategies.checkpoint.optimizer_state import parameter_names
from tests.support.continued_runs import MODELS, Run
from tests.support.continued_runs import train as run_to_its_end
from tests.support.layouts import LAYOUTS, PLAIN
from tests.support.ranks import RankFailure, run_ranks

MODEL = "deep gpt"
"""Three steps in an epoch; the last has four rows, one for each of four replicas."""

TOLERANCE = 2e-5
"""Of the largest element of a tensor: layouts add up in other orders, and Adam amplifies that."""


@dataclass
class End:
    """What is stored at the end of a run."""

    tensors: dict[str, Tensor]
    """Parameters, buffers and optimizer state, by name."""
    progress: dict[str, Any]
    """Steps, epochs, loops, schedulers, and what the optimizer has for each group."""


class _Losses(Callback):
    """The losses of whole batches, as they are logged."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.found.append(float(trainer.callback_metrics["train_synced"]))


def train(rank: int, world_size: int, folder: str, parts: Sequence[Run]) -> list[list[float]]:
    """Train each part, saving at the end of each epoch; return the losses of its steps."""
    return [_train(rank, world_size, Path(folder), each) for each in parts]


def _train(rank: int, world_size: int, folder: Path, part: Run) -> list[float]:
    losses = _Losses()
    saving = ModelCheckpoint(
        folder / part.target, "{epoch}", save_top_k=-1, enable_version_counter=False
    )
    run_to_its_end(rank, world_size, folder, MODEL, part, losses, saving)
    return losses.found


def read(path: Path) -> End:
    """Read a file or a directory whole."""
    checkpoint = open_checkpoint(path)
    tensors = {name: load_value(each, name) for name, each in checkpoint["state_dict"].items()}
    module = MODELS[MODEL].model()
    configured: Any = module.configure_optimizers()
    (optimizer,), _ = configured
    names = [name for group in parameter_names(module, optimizer) for name in group]
    (saved,) = checkpoint["optimizer_states"]
    for key, state in saved["state"].items():
        name = names[key] if isinstance(key, int) else key
        tensors |= {f"{name}.{kind}": load_value(each, name) for kind, each in state.items()}
    groups = [
        {key: each for key, each in group.items() if key != "params"}
        for group in saved["param_groups"]
    ]
    kept = {key: checkpoint[key] for key in ("epoch", "global_step", "loops", "lr_schedulers")}
    return End(tensors, {**kept, "param_groups": groups})


def distance(found: End, wanted: End) -> float:
    """Return the largest difference of a tensor, relative to its largest element.

    Raises:
        ValueError: When something is missing, or when progress is not the same.
    """
    if odd := sorted(found.tensors.keys() ^ wanted.tensors.keys()):
        raise ValueError(f"{odd[0]} is on one side only")
    for key, each in wanted.progress.items():
        if found.progress[key] != each:
            raise ValueError(f"{key} is {found.progress[key]} and not {each}")
    return max(_apart(name, found.tensors[name], each) for name, each in wanted.tensors.items())


def _apart(name: str, found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        raise ValueError(f"{name} is {tuple(found.shape)} and not {tuple(wanted.shape)}")
    apart = (found.double() - wanted.double()).abs().max().item()
    if not isfinite(apart):
        raise ValueError(f"{name} differs by {apart}")
    return apart / max(1e-12, wanted.double().abs().max().item())


class Matrix:
    """The runs, in a folder of their own.

    Args:
        folder: Empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: dict[str, str] = {}
        (losses,) = self._start([Run(PLAIN, 2, "whole")])
        half = len(losses[0]) // 2
        self._losses = losses[0][half:]
        self.wanted = read(folder / "whole" / "epoch=1.ckpt")
        """How the run that was never interrupted ended."""

    def save(self, layouts: Sequence[str]) -> None:
        """Train the first epoch in each."""
        for some in _by_ranks(layouts):
            self._start([Run(each, 1, each) for each in some])
        self._saved |= {each: f"{each}/epoch=0.ckpt" for each in layouts}

    def resume(self, sources: Sequence[str], layout: str) -> dict[str, float | str]:
        """Go on in a layout from what others saved; return how far off each is, or what failed."""
        parts = [
            Run(layout, 2, f"{each} to {layout}", self._file(each, layout)) for each in sources
        ]
        try:
            losses = self._start(parts)
        except RankFailure as failure:
            if len(sources) == 1:
                return {sources[0]: _short(str(failure))}
            # One that fails takes its ranks down: each on ranks of its own.
            return {each: self.resume([each], layout)[each] for each in sources}
        return {
            source: self._compare(part, each)
            for source, part, each in zip(sources, parts, losses, strict=True)
        }

    def _start(self, parts: Sequence[Run]) -> list[list[list[float]]]:
        """Train parts of as many ranks; return for each part the losses of every rank."""
        ranks = LAYOUTS[parts[0].layout].mesh.world_size
        found = run_ranks(train, ranks, str(self._folder), parts)
        return [list(each) for each in zip(*found, strict=True)]

    def _file(self, source: str, layout: str) -> str:
        """The checkpoint of a layout as another reads it."""
        saved = self._saved[source]
        if layout != PLAIN or (self._folder / saved).is_file():
            return saved
        exported = f"{source}/exported.ckpt"
        if not (self._folder / exported).exists():
            export(
                self._folder / saved, self._folder / exported,
                prefix=None, max_shard_bytes=None, force=False, counted=lambda _: lambda _: None,
            )  # fmt: skip
        return exported

    def _compare(self, part: Run, losses: Sequence[Sequence[float]]) -> float | str:
        try:
            end = read(self._folder / part.target / "epoch=1.ckpt")
            apart = distance(end, self.wanted)
            return max(apart, *(_losses_apart(each, self._losses) for each in losses))
        except ValueError as error:
            return _short(str(error))


def _losses_apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    return _apart("the loss of each step", torch.tensor(found), torch.tensor(wanted))


def _by_ranks(layouts: Sequence[str]) -> list[list[str]]:
    """Layouts that one start of the ranks serves."""
    groups: dict[int, list[str]] = {}
    for each in layouts:
        groups.setdefault(LAYOUTS[each].mesh.world_size, []).append(each)
    return list(groups.values())


def _short(text: str) -> str:
    return " ".join(text.split())[-600:]


def table(sources: Sequence[str], columns: Mapping[str, Mapping[str, float | str]]) -> list[str]:
    """The matrix, and below it what failed."""
    numbers = {name: number for number, name in enumerate(LAYOUTS, 1)}
    heads = " | ".join(str(numbers[each]) for each in columns)
    lines = [f"| from, to | {heads} |", "|" + " --- |" * (len(columns) + 1)]
    failures = []
    for source in sources:
        cells = []
        for layout, column in columns.items():
            value = column[source]
            if isinstance(value, str):
                failures.append(f"{source} to {layout}: {value}")
            cells.append("**failed**" if isinstance(value, str) else f"{value:.0e}")
        lines.append(f"| {numbers[source]} {source} | {' | '.join(cells)} |")
    return [*lines, *failures]


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--to", nargs="+", choices=LAYOUTS, help="Columns; those of --only.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="resharding-") as folder:
        matrix = Matrix(Path(folder))
        matrix.save(options.only)
        columns = {each: matrix.resume(options.only, each) for each in options.to or options.only}
    print("\n".join(table(options.only, columns)))
    cells = [each for column in columns.values() for each in column.values()]
    sound = [each for each in cells if not isinstance(each, str)]
    apart = [each for each in sound if not each <= TOLERANCE]
    print(f"{len(cells)} pairs, {len(cells) - len(sound)} failed, largest {max(sound):.1e}")
    if apart or len(sound) < len(cells):
        sys.exit(1)


if __name__ == "__main__":
    main()
