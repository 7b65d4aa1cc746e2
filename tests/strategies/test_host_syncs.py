"""Steps 5 to 10 read no tensor of the device on the host, apart from the places listed here.

Each read of a GPU's tensor waits for all work that is queued, and so does each copy of a number to
a GPU. On the CPU a mode and patched functions see reads and copies; which of them are of tensors
that lie on the host in a run on GPUs too is said below.
"""

import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import boltmesh
from boltmesh.strategies import (
    ContextParallelStrategy,
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.offload import stores
from tests.support.expert_models import Mixture
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

STRATEGIES = {
    "ddp": lambda folder: DDPStrategy(),
    "zero1": lambda folder: ZeROStrategy(stage=1),
    "zero2": lambda folder: ZeROStrategy(stage=2),
    "zero3": lambda folder: ZeROStrategy(stage=3),
    "zero3_cpu": lambda folder: ZeROStrategy(
        stage=3, offload_optimizer="cpu", offload_parameters="cpu"
    ),
    "zero3_nvme": lambda folder: ZeROStrategy(
        stage=3, offload_optimizer="nvme", offload_parameters="nvme", offload_path=folder
    ),
    "pipeline": lambda folder: PipelineParallelStrategy(microbatches=8),
    "zero_bubble": lambda folder: PipelineParallelStrategy(schedule="zero_bubble", microbatches=4),
    "tensor": lambda folder: TensorParallelStrategy(),
    "3d": lambda folder: Parallel3DStrategy(pipeline=2, microbatches=8),
    "3d of 4, zero3": lambda folder: Parallel3DStrategy(tensor=2, zero_stage=3),
    "context": lambda folder: ContextParallelStrategy(),
    "experts, zero2": lambda folder: ZeROStrategy(stage=2, expert=2),
    "experts, zero3": lambda folder: ZeROStrategy(stage=3, expert=2),
}

CLIPPED = {"zero3", "zero3_cpu"}
"""Strategies that are tried with clipping too."""

ON_HOST = {
    "pipeline/loss/autograd_nodes.py:_number": "a number of the host; of a device none is asked",
    "pipeline/training.py:add": "asked on the host alone",
    "lightning_compat/launchers.py:_reduce_flags": "flags of signals, over gloo",
    "pipeline/runtime/handshake.py:": "rows that ranks tell each other, over gloo",
    "pipeline/step_report.py:take": "one of these rows",
    "pipeline/step_report.py:receive": "these rows",
    "pipeline/step_report.py:hear": "one of these rows",
    "pipeline/step_report.py:row": "one of these rows",
    "telemetry/writer/step_queue.py:_number": "a loss on the host; a device's is copied, and read "
    "once an event has passed",
    "torch_compat/tensors.py:scalar_on": "a number that is on the host",
    "offload/gradient_handler.py:plan_updates": "the number of a parameter's steps",
    "grad_norm.py:scale_to_norm": "asked on the host alone",
    "pipeline/metrics.py:receive": "the length of a message, over gloo",
    "torch_compat/communication.py:sum_flags": "not read where all flags of a rank are set",
    "data_parallel/order_check.py:": "which collectives ranks issue, over gloo",
    "data_parallel/uneven_inputs.py:begin": "how many batches ranks have, once in an epoch",
    "random_state.py:": "states of the CPU's generator",
    "pipeline/stage/rng.py:": "seeds of microbatches",
    "dry_run/batch_check.py:": "digests of batches, over gloo",
}
"""Places that read tensors of the host, in runs on GPUs too."""

ALLOWED = {
    "pipeline/metrics.py:_unpacked": "the author gave a metric a number of Python",
    "pipeline/training.py:_like": "the author's step returned a number of Python",
    "pipeline/merge.py:merge": "the author's step returned a number of Python",
    "pipeline/loss/weights.py:_refuse_uneven": "several means, compared before they train",
    "pipeline/loss/calibration.py:kinds_of_rows": "the first eight batches; more on the host alone",
    "pipeline/loss/loss_check.py:is_open": "logged values that have been zero, or equal in all "
    "microbatches, in every step so far",
    "pipeline/loss/log_rules.py:are_alike": "first steps that tell rules of logged keys apart",
    "offload/stepper.py:square": "with clipping: norms of gradients that are on their way to the "
    "host, where they are stepped",
    "grad_norm.py:joint_norm": "with clipping: the host steps by the norm of all ranks",
    "expert/exchange.py:run": "how many rows go to experts of other ranks: sizes of messages",
    "telemetry/writer/communication.py:write": "rows of each expert, every two seconds",
}
"""Places that wait for the device, and why."""


class Masked(Stack):
    """Counts tokens on the device, as language models with padding do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        mask = targets != -100
        losses = functional.cross_entropy(
            self(tokens).transpose(1, 2), targets.clamp(min=0), reduction="none"
        )
        loss = (losses * mask).sum() / mask.sum()
        self.log("train_loss", loss)
        return loss


def data() -> DataLoader[Any]:
    """In the first row of four nothing counts: with microbatches of one row, weights of 0."""
    tokens, targets = token_data(160, 8).dataset.tensors  # type: ignore[attr-defined]
    targets = targets.masked_fill((torch.arange(160) % 4 == 0)[:, None], -100)
    return DataLoader(TensorDataset(tokens, targets), batch_size=8)


class Reads(TorchDispatchMode):
    """Keeps where boltmesh reads the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in {
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.equal,
        }:
            self.places |= {place for place in [reader()] if place is not None}
        return func(*args, **(kwargs or {}))


class Calls(ExitStack):
    """Keeps where boltmesh copies a number to a device, or reads several, on this thread.

    A mode of torch would not see calls where boltmesh switches modes off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()
        self._thread = threading.get_ident()

    def __enter__(self) -> "Calls":
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (Tensor, "tolist")):
            noted = self._noted(getattr(owner, name))
            self.enter_context(mock.patch.object(owner, name, noted))
        return self

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_copy = kwargs.get("device") is not None and not isinstance(args[0], Tensor)
            is_here = threading.get_ident() == self._thread
            place = reader() if is_here and (is_copy or function is TOLIST) else None
            if place is not None:
                self.places.add(place)
            return function(*args, **kwargs)

        return call


TOLIST = Tensor.tolist


def reader() -> str | None:
    """Return the file of boltmesh and the function that reads; None for others' code."""
    frame: Any = sys._getframe(2)
    package = Path(boltmesh.__file__).resolve().parents[1]
    others = (str(Path(torch.__file__).parent), warnings.__file__, __file__)
    while frame is not None and (
        frame.f_code.co_filename.startswith(others)
        or frame.f_code.co_name.endswith("comp>")  # which is no function from Python 3.12 on
    ):
        frame = frame.f_back
    if frame is None:
        return None
    path = Path(frame.f_code.co_filename).resolve()
    if not path.is_relative_to(package):
        return None
    inside = path.relative_to(package)
    if inside.parts[0] not in {"boltmesh", "strategies"}:  # tests, or an environment in the folder
        return None
    for folder in ("boltmesh", "strategies"):  # an installed package holds what is linked here
        if inside.parts[0] == folder:
            inside = inside.relative_to(folder)
    return f"{inside}:{frame.f_code.co_name}"


class Watch(Callback):
    def __init__(self) -> None:
        self.reads, self.calls = Reads(), Calls()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            self.reads.__enter__()
            self.calls.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 10:
            self.calls.__exit__(None, None, None)
            self.reads.__exit__(None, None, None)


class WithExperts(Masked):
    """Its blocks are mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = Mixture(7, 4, 2), nn.Identity()


def places_read(rank: int, world_size: int, name: str, clips: bool) -> set[str]:
    seed_everything(3)
    vars(stores)["SMALL_NUMEL"] = 1
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=world_size, strategy=STRATEGIES[name](folder), max_steps=10,
            callbacks=[watch], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=0.1 if clips else None,
        )  # fmt: skip
        trainer.fit(WithExperts() if "experts" in name else Masked(), data())
    return watch.reads.places | watch.calls.places


@pytest.mark.sample("zero3", "pipeline", "zero3_cpu, clipped")
@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("name", "clips"),
    [
        pytest.param(name, clips, id=f"{name}, clipped" if clips else name)
        for name in STRATEGIES
        for clips in (False, True)
        if not clips or name in CLIPPED
    ],
)
def test_no_step_waits_for_the_device(name: str, clips: bool) -> None:
    known = (*ON_HOST, *ALLOWED)
    for places in run_ranks(places_read, 4 if "of 4" in name else 2, name, clips):
        unknown = {each for each in places if not each.startswith(known)}
        assert not unknown, "list it with the reason, or keep the value on the device"
