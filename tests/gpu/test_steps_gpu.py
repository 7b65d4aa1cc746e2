"""What one GPU shows of steps: random numbers, stages, copies, memory, and who waits for it.

``BOLTMESH_CAMPAIGN=cpu`` runs these tests on the CPU, as the campaign's dry run does.
"""

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from boltmesh.strategies import (
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from boltmesh.strategies.float8 import convertible_layers
from boltmesh.strategies.offload import stores
from boltmesh.strategies.parameter_access import gathered_parameters
from boltmesh.strategies.pipeline.schedules.registry import schedules
from tests.strategies.test_host_syncs import ALLOWED, ON_HOST, Masked, data, reader
from tests.support.stack import Built, Stack, token_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # of the modules of torch's compiler and of torchao
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

KIND = "cpu" if os.environ.get("BOLTMESH_CAMPAIGN") == "cpu" else "cuda"
DEVICE = torch.device(KIND, 0) if KIND == "cuda" else torch.device("cpu")

CPU = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}


class Notes(Callback):
    """Keeps losses, the parameters at the end, and the most memory after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.seed = 0
        self.whole: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seed = torch.cuda.initial_seed() if KIND == "cuda" else torch.initial_seed()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        if KIND == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with gathered_parameters(pl_module) as whole:
            self.whole = {name: each.detach().cpu().clone() for name, each in whole.items()}


class Expected(Callback):
    """Keeps the traffic that is expected of a step, which is empty once telemetry is closed."""

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        assert trainer.strategy.recorder.is_on
        self.traffic = trainer.strategy.expected_traffic()


def fit(
    strategy: Any, module: LightningModule | None = None, steps: int = 10, **arguments: Any
) -> Notes:
    """Train a small model on the one device."""
    seed_everything(4)
    notes = Notes()
    callbacks = [notes, *arguments.pop("callbacks", [])]
    ckpt_path = arguments.pop("ckpt_path", None)
    loader = arguments.pop("loader", None) or token_data(8 * steps, 8)
    defaults: dict[str, Any] = {"enable_checkpointing": False}
    trainer = Trainer(
        accelerator=KIND, devices=1, strategy=strategy or SingleDeviceStrategy(DEVICE),
        max_steps=steps, logger=False, callbacks=callbacks, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **{**defaults, **arguments},
    )  # fmt: skip
    trainer.fit(module or Stack(optimizer="sgd", depth=4), loader, ckpt_path=ckpt_path)
    return notes


def assert_same(one: Notes, other: Notes, bound: float = 1e-4) -> None:
    """Compare parameters at the end."""
    torch.testing.assert_close(one.whole, other.whole, rtol=bound, atol=bound)


class ByKeyword(nn.Module):
    """Gets its tensor by a name alone, and draws a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, *, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.layer(hidden))


def test_a_block_called_by_keyword_draws_the_same_masks_when_it_is_recomputed() -> None:
    root = nn.Module()
    root.blocks = nn.ModuleList(ByKeyword() for _ in range(2))
    root.to(DEVICE)
    given = torch.ones(4, 16, device=DEVICE, requires_grad=True)
    found = []
    for kind in (None, "full"):
        checkpointing = ActivationCheckpointing(kind)
        checkpointing.put_on(root)
        torch.manual_seed(3)
        x = given
        for block in root.blocks:
            x = block(hidden=x)
        found.append(torch.autograd.grad(x.square().sum(), [given, *root.parameters()]))
        checkpointing.take_off()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", [TensorParallelStrategy, PipelineParallelStrategy])
def test_the_generator_of_the_device_keeps_the_users_seed(strategy: Any) -> None:
    assert fit(strategy(), steps=2).seed == 4


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        (name, count)
        for name, kind in schedules().items()
        for count in (1, 2, 4)
        if kind.has_stages_per_rank(count) and not kind.is_asynchronous
    ],
)
def test_stages_on_one_rank_equal_a_plain_trainer(
    schedule: str, count: int, precision: Any
) -> None:
    strategy = PipelineParallelStrategy(
        schedule=schedule, stages=1, stages_per_rank=count, microbatches=4
    )
    bound = 1e-4 if precision == "32-true" else 2e-2
    assert_same(fit(strategy, precision=precision), fit(None, precision=precision), bound)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: PipelineParallelStrategy(stages=1, microbatches=4),
        lambda: ZeROStrategy(stage=3),
        TensorParallelStrategy,
    ],
    ids=["pipeline", "zero3", "tensor"],
)
def test_a_model_that_is_built_in_configure_model_trains_as_in_a_plain_trainer(
    strategy: Any,
) -> None:
    assert_same(fit(strategy(), Built()), fit(None, Built()))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("options", [CPU, {"offload_optimizer": "cpu", "offload_fraction": 0.5}])
def test_copies_between_host_and_device_change_nothing(
    options: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SMALL_NUMEL", 1)
    seed_everything(4)
    module, twin = (Stack(width=64, hidden=128) for _ in range(2))
    twin.load_state_dict(module.state_dict())
    ours = fit(ZeROStrategy(stage=3, **options), module, 30, **arguments)
    theirs = fit(None, twin, 30, **arguments)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", [PipelineParallelStrategy, TensorParallelStrategy])
def test_what_a_step_is_expected_to_move_on_one_rank_is_nothing(
    strategy: Any, precision: Any
) -> None:
    """The bytes of several ranks are compared by the campaign's third part."""
    expected = Expected()
    fit(strategy(), steps=2, precision=precision, callbacks=[expected])
    assert sum(each.payload_bytes for each in expected.traffic) == 0


@pytest.mark.skipif(KIND == "cpu", reason="tests/strategies/test_compiled_blocks.py has the CPU's")
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: DDPStrategy(compile_blocks=True),
        lambda: ZeROStrategy(stage=3, compile_blocks=True),
        lambda: ZeROStrategy(stage=3, compile_blocks=True, **CPU),  # type: ignore[arg-type]
        lambda: PipelineParallelStrategy(stages=1, microbatches=4, compile_blocks=True),
        lambda: TensorParallelStrategy(compile_blocks=True),
    ],
    ids=["ddp", "zero3", "zero3_cpu", "pipeline", "tensor"],
)
def test_compiled_blocks_differ_by_rounding_alone(strategy: Any) -> None:
    assert_same(fit(strategy(), steps=5), fit(None, steps=5), 1e-3)


@pytest.mark.skipif(KIND == "cpu", reason="tests/strategies/test_float8.py has the CPU's")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    "strategy", [DDPStrategy, lambda **given: ZeROStrategy(stage=3, **given)], ids=["ddp", "zero3"]
)
def test_products_in_float8_are_those_of_torchao(strategy: Any, recipe: Any) -> None:
    float8 = pytest.importorskip("torchao.float8")
    module, theirs, plain = (Stack(width=64, hidden=128, optimizer="sgd") for _ in range(3))
    theirs.load_state_dict(module.state_dict())
    plain.load_state_dict(module.state_dict())
    chosen = set(convertible_layers(theirs))
    float8.convert_to_float8_training(
        theirs,
        config=float8.Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda each, _: each in chosen,
    )
    options: dict[str, Any] = {"steps": 5, "precision": "bf16-mixed"}
    made, want, without = (
        fit(given, one, loader=token_data(80, 16), **options)
        for given, one in ((strategy(float8=recipe), module), (None, theirs), (None, plain))
    )
    # ZeRO-3 rounds parameters once, to bf16, where autocast rounds at each use.
    assert_same(made, want, 1e-3 if strategy is DDPStrategy else 1e-2)
    assert any(not torch.equal(want.whole[name], without.whole[name]) for name in want.whole)


@pytest.mark.parametrize("strategy", [DDPStrategy, ZeROStrategy, PipelineParallelStrategy])
def test_inputs_of_blocks_that_wait_on_the_host_change_nothing(strategy: Any) -> None:
    ours = fit(strategy(activation_checkpointing="full", activation_offload=True))
    assert_same(ours, fit(None))


class Warned(Callback):
    """Keeps where boltmesh waits for the device in steps 5 to 10."""

    def __init__(self) -> None:
        self.places: set[str] = set()
        self.before = warnings.showwarning

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4 and KIND == "cuda":
            warnings.simplefilter("always")
            warnings.showwarning = self.note
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 10 and KIND == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self.before

    def note(self, message: Any, *_: Any, **__: Any) -> None:
        """Called for each warning, within the call that gave it."""
        place = reader()
        if "synchroniz" in str(message) and place is not None:
            self.places.add(place)


class MaskedSteps(Masked):
    """Logs nothing: Lightning's own logging would wait."""

    def log(self, *_: Any, **__: Any) -> None:
        """Take no note."""


@pytest.mark.parametrize(
    "strategy",
    [
        DDPStrategy(),
        ZeROStrategy(stage=2),
        ZeROStrategy(stage=3),
        ZeROStrategy(stage=3, **CPU),  # type: ignore[arg-type]
        PipelineParallelStrategy(stages=1, microbatches=8),
        TensorParallelStrategy(),
        Parallel3DStrategy(zero_stage=1),
    ],
    ids=["ddp", "zero2", "zero3", "zero3_cpu", "pipeline", "tensor", "3d"],
)
def test_no_step_waits_for_the_device(strategy: Any) -> None:
    warned = Warned()
    with warnings.catch_warnings():
        notes = fit(strategy, MaskedSteps(), loader=data(), callbacks=[warned])
    assert len(notes.losses) == 10
    known = (*ON_HOST, *ALLOWED)
    assert not {each for each in warned.places if not each.startswith(known)}


@pytest.mark.parametrize("options", [{}, CPU], ids=["device", "host"])
def test_memory_is_flat_over_twenty_steps(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that overlap take more or less, so the least of ten steps is compared.

    Steps of the host overlap from the eleventh on.
    """
    monkeypatch.setattr(stores, "SMALL_NUMEL", 1)
    module = Stack(width=256, hidden=1024, depth=8)
    peaks = fit(ZeROStrategy(stage=3, **options), module, 35).peaks[15:]
    assert not peaks or min(peaks[10:]) <= 1.02 * min(peaks[:10])


class Overflowing(Stack):
    """Its third gradient does not fit into fp16."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 if batch_idx == 2 else loss


@pytest.mark.skipif(KIND == "cpu", reason="fp16 needs a GPU")
@pytest.mark.parametrize(
    "strategy",
    [ZeROStrategy(stage=2), Parallel3DStrategy(zero_stage=1)],
    ids=["zero2", "3d"],
)
def test_an_overflow_of_fp16_skips_the_step(strategy: Any) -> None:
    module, twin = (Overflowing(optimizer="sgd") for _ in range(2))
    twin.load_state_dict(module.state_dict())
    ours = fit(strategy, module, precision="16-mixed")
    theirs = fit(None, twin, precision="16-mixed")
    assert_same(ours, theirs, 2e-2)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("options", [{}, {"offload_optimizer": "cpu"}], ids=["device", "host"])
def test_a_run_resumed_from_an_asynchronous_save_equals_an_uninterrupted_one(
    options: Any, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=5, save_top_k=-1)
    whole = fit(
        ZeROStrategy(stage=3, async_save=True, **options),
        callbacks=[saving], enable_checkpointing=True,
    )  # fmt: skip
    [path] = (tmp_path / "saved").glob("*step=5.ckpt")
    saving = ModelCheckpoint(tmp_path / "again", every_n_train_steps=5, save_top_k=-1)
    resumed = fit(
        ZeROStrategy(stage=3, **options),
        callbacks=[saving], enable_checkpointing=True, ckpt_path=path,
    )  # fmt: skip
    assert_same(resumed, whole, 1e-5)


@pytest.mark.parametrize("options", [{}, CPU], ids=["device", "host"])
def test_ten_fits_of_one_process_leave_no_memory(options: Any) -> None:
    left = []
    for _ in range(10 if KIND == "cuda" else 2):
        fit(ZeROStrategy(stage=3, **options), steps=2)
        gc.collect()
        left.append(torch.cuda.memory_allocated() if KIND == "cuda" else 0)
    assert left[-1] <= left[1]
