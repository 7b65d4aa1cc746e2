"""Trains an entry of the zoo under one strategy, and compares it with one process."""

import builtins
import importlib
import math
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from boltmesh.errors import BoltMeshError, PipelineError
from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    gathered_parameters,
)
from tests.support.ranks import RankFailure, run_ranks
from tests.zoo.entry import DATA_SIZE, STEPS, Entry, even_draws

CELL_S = 150.0
"""Most seconds of a cell."""

LOSS_TOLERANCE = 2e-4
"""Of a loss, relative: steps add up what rounding changes."""

CHANGE_TOLERANCE = 0.02
"""Of what training changed in a parameter, relative, in the 2-norm."""

ROUNDING = 2e-6
"""Differences below it, relative to the parameter, are rounding."""


@dataclass(frozen=True)
class Column:
    """A strategy of the table."""

    ranks: int
    build: Callable[[Entry], Any]
    data_size: int = 1
    """How many ranks have batches of their own."""
    has_pipeline: bool = False


def _zero(stage: int, **options: Any) -> Column:
    return Column(2, lambda entry: ZeROStrategy(stage=stage, telemetry=False, **options), DATA_SIZE)


def _pipeline(schedule: str) -> Column:
    return Column(
        2,
        lambda entry: PipelineParallelStrategy(
            schedule=schedule, microbatches=entry.microbatches, telemetry=False
        ),
        has_pipeline=True,
    )


DISK = Path(tempfile.gettempdir(), "boltmesh-zoo")
"""Where ``zero3_nvme`` offloads to."""

COLUMNS = {
    "ddp": Column(
        2,
        lambda entry: DDPStrategy(find_unused_parameters=entry.has_unused, telemetry=False),
        DATA_SIZE,
    ),
    "zero1": _zero(1),
    "zero3": _zero(3),
    "zero3_cpu": _zero(3, offload_optimizer="cpu", offload_parameters="cpu"),
    "zero3_nvme": _zero(
        3,
        offload_optimizer="nvme",
        offload_parameters="nvme",
        offload_path=DISK,
    ),
    "gpipe": _pipeline("gpipe"),
    "1f1b": _pipeline("1f1b"),
    "interleaved": _pipeline("interleaved_1f1b"),
    "tensor": Column(2, lambda entry: TensorParallelStrategy(telemetry=False)),
    "3d": Column(
        4,
        lambda entry: Parallel3DStrategy(
            pipeline=2, tensor=2, microbatches=entry.microbatches, telemetry=False
        ),
        has_pipeline=True,
    ),
    "context": Column(2, lambda entry: ContextParallelStrategy(telemetry=False)),
}


@dataclass(frozen=True)
class Cell:
    """What became of an entry under a strategy."""

    kind: str
    """``equal``, ``refused``, ``wrong``, ``crashed``; ``failed``: in one process already."""
    text: str = ""


Result = dict[str, Any]
"""Losses of the steps, parameters, buffers; or ``error``, ``kind`` of it and ``traceback``."""

Results = tuple[str, list[Result]]
"""Column, and the results by rank."""


def entries_of(package: str) -> dict[str, Entry]:
    """Return the entries of a file in ``modules``, by name."""
    found: list[Entry] = importlib.import_module(f"tests.zoo.modules.{package}").ENTRIES
    return {each.name: each for each in found}


def by_one_process(package: str, name: str, data_size: int) -> Result:
    """Train in one process, as Lightning does, on the batches of all data ranks."""
    (found,) = run_ranks(_train, 1, package, name, None, data_size, timeout_s=CELL_S)
    result: Result = found
    return result


def by_strategies(package: str, name: str, columns: Sequence[str]) -> Iterator[Results]:
    """Train under strategies of one number of ranks, in one start of them; results by rank.

    A rank that dies or hangs ends the others; what remains is then run by new ones.
    """
    waiting = list(columns)
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            ranks = COLUMNS[waiting[0]].ranks
            try:
                run_ranks(_train_some, ranks, package, name, waiting, folder,
                          timeout_s=CELL_S * len(waiting))  # fmt: skip
                failure = ""
            except RankFailure as error:
                failure = str(error)[-2000:]
            files = {each: [Path(folder, f"{each}-{rank}.pt") for rank in range(ranks)]
                     for each in waiting}  # fmt: skip
            count = len(waiting)
            for column, kept in files.items():
                if all(file.exists() for file in kept):
                    yield column, [torch.load(file, weights_only=False) for file in kept]
                    waiting.remove(column)
        if waiting and failure and len(waiting) == count:
            yield waiting.pop(0), [{"error": failure, "kind": "crashed"}]


def _train_some(
    rank: int, world_size: int, package: str, name: str, columns: list[str], folder: str
) -> None:
    DISK.mkdir(exist_ok=True)
    for column in columns:
        result = _train(rank, world_size, package, name, column, COLUMNS[column].data_size)
        path = Path(folder, f"{column}-{rank}")
        torch.save(result, path)
        path.rename(path.with_suffix(".pt"))
        if result.get("kind") == "crashed":  # the others may wait for it
            raise RuntimeError(result["traceback"])


def _train(
    rank: int, world_size: int, package: str, name: str, column: str | None, data_size: int
) -> Result:
    entry = entries_of(package)[name]
    if entry.is_shared_batch:
        data_size = 1
    chosen = COLUMNS[column] if column else None
    seed_everything(7, verbose=False)
    with even_draws() if entry.draws else nullcontext():
        try:
            return _fit(entry, chosen, rank, world_size, data_size)
        except Exception as error:  # noqa: BLE001 - any is a result
            return {
                "error": f"{type(error).__name__}: {' '.join(str(error).split())}",
                "kind": "refused" if _is_refusal(error) else "crashed",
                "traceback": traceback.format_exc(),
            }


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, PipelineError):  # a stage failed: by an error of Python's, or of ours
        names = re.findall(r": (\w+(?:Error|Exception)): ", str(error))
        return bool(names) and not hasattr(builtins, names[0])
    # Some errors of torch keep their class, and are told what to do by boltmesh.
    is_ours = isinstance(error, (BoltMeshError, MisconfigurationException))
    return is_ours or "boltmesh.strategies." in str(error)


def _fit(entry: Entry, column: Column | None, rank: int, world_size: int, data_size: int) -> Result:
    module = entry.build()
    for each in module.modules():
        if type(each).__name__.endswith("Dropout") or hasattr(each, "drop_prob"):
            _silence(each)
    numbers = range(STEPS * data_size)
    if column is not None and data_size > 1:
        numbers = range(rank % data_size, STEPS * data_size, data_size)
    recorder = Recorder()
    arguments: dict[str, Any] = dict(entry.trainer)
    if column is None and data_size > 1:
        arguments["accumulate_grad_batches"] = data_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(_Batches(entry, numbers), batch_size=None, collate_fn=_itself)
        Trainer(
            strategy=column.build(entry) if column else "auto",
            accelerator="cpu", devices=world_size, logger=False,
            max_steps=STEPS * steps_of_a_batch(module), max_epochs=-1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, callbacks=[recorder], **arguments,
        ).fit(module, loader)  # fmt: skip
    return recorder.result


def _silence(module: Any) -> None:
    for key in ("p", "drop_prob"):
        if isinstance(getattr(module, key, None), float):
            setattr(module, key, 0.0)


def steps_of_a_batch(module: LightningModule) -> int:
    """Count the optimizer steps that manual optimization makes of a batch: one by optimizer."""
    return 1 if module.automatic_optimization else int(getattr(module, "steps_of_a_batch", 1))


def _itself(batch: Any) -> Any:
    return batch


class _Batches(torch.utils.data.Dataset[Any]):
    def __init__(self, entry: Entry, numbers: range) -> None:
        self.entry, self.numbers = entry, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.entry.batch(self.numbers[index])


class Recorder(Callback):
    """Keeps losses, and the parameters before and after."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.result: Result = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(float(loss) * trainer.accumulate_grad_batches)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if "eps" in group:  # Adam would scale a gradient that is zero but for rounding
                    group["eps"] = max(group["eps"], 1e-4)
        self.result["before"] = _values(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.result["losses"] = self.losses
        self.result["after"] = _values(module)
        self.result["buffers"] = {
            name: each.detach().cpu().clone()
            for name, each in module.named_buffers()
            if each.is_floating_point()
        }


def _values(module: LightningModule) -> dict[str, Tensor]:
    with gathered_parameters(module) as whole:
        return {name: each.detach().cpu().clone() for name, each in whole.items()}


def judged(entry: Entry, column: str, found: list[Result], one: Result) -> Cell:
    """Compare the results of all ranks with those of one process."""
    errors = [each for each in found if "error" in each]
    if errors:
        crashes = [each for each in errors if each["kind"] == "crashed"]
        first = (crashes or errors)[0]
        return Cell(first["kind"], first["error"][:1500])
    chosen = COLUMNS[column]
    data_size = 1 if entry.is_shared_batch else chosen.data_size
    pairs = [(each["losses"], each) for each in found]
    wanted = one["losses"]
    if data_size > 1:
        wanted = [sum(wanted[i : i + data_size]) / data_size
                  for i in range(0, len(wanted), data_size)]  # fmt: skip
        mean = [
            sum(each) / len(found) for each in zip(*(each["losses"] for each in found), strict=True)
        ]
        pairs = [(mean, each) for each in found]
    for rank, (losses, result) in enumerate(pairs):
        text = differing_losses(losses, wanted) or differing_values(entry, result, one)
        if not text and not chosen.has_pipeline and data_size == 1:
            text = differing_buffers(result["buffers"], one["buffers"])
        if text:
            return Cell("wrong", f"rank {rank}: {text}")
    return Cell("equal")


def differing_losses(found: list[float], wanted: list[float]) -> str:
    """Return what differs, or nothing."""
    is_equal = len(found) == len(wanted) and all(
        math.isclose(one, other, rel_tol=LOSS_TOLERANCE, abs_tol=1e-6)
        for one, other in zip(found, wanted, strict=True)
    )
    return "" if is_equal else f"losses {found} instead of {wanted}"


def differing_values(entry: Entry, found: Result, one: Result) -> str:
    """Return the parameter that differs most, or nothing."""
    worst, text = 1.0, ""
    if missing := one["after"].keys() ^ found["after"].keys():
        return f"parameters {sorted(missing)[:4]} are on one side only"
    for name, wanted in one["after"].items():
        if any(each in name for each in entry.without_gradient):
            continue
        value, start = found["after"][name], one["before"][name]
        if value.shape != wanted.shape:
            return f"{name} has shape {tuple(value.shape)} instead of {tuple(wanted.shape)}"
        if not value.is_floating_point():
            continue
        error = _norm(value - wanted)
        change = _norm(wanted - start)
        allowed = CHANGE_TOLERANCE * change + ROUNDING * (_norm(wanted) + 0.05)
        if not error / allowed <= worst:
            worst = error / allowed
            text = f"{name} is off by {error:.3g}, and training changed it by {change:.3g}"
    return text


def differing_buffers(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Return the first buffer that differs, or nothing."""
    for name, each in wanted.items():
        if name in found and not torch.allclose(found[name], each, rtol=1e-3, atol=1e-5,
                                                equal_nan=True):  # fmt: skip
            error = (found[name] - each).abs().max()
            return f"buffer {name} is off by {error:.3g}"
    return ""


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))
