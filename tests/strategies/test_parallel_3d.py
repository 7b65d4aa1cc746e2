"""What a LightningModule may do around its steps, with shards of what ranks share of a layer."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from boltmesh.errors import ConfigError, LayoutError, UnsupportedError
from boltmesh.strategies import Parallel3DStrategy, gathered_parameters
from boltmesh.strategies.pipeline.stage import plan_cache
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.telemetry.reader.reader import open_job
from tests.fuzz.cases import Case, Module, batches
from tests.support.gpts import TinyGPT, text_data
from tests.support.pipelines import quiet_trainer
from tests.support.planned_meshes import check_memory, planned, said
from tests.support.ranks import run_ranks
from tests.support.recording_path import RecordingPath
from tests.support.turns import in_turn

QKV, UP = "blocks.0.attention.qkv.weight", "blocks.0.up.weight"

# Construction.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_stage": 4}, "zero_stage=4 is no ZeRO stage"),
        ({"zero_stage": 0, "offload_optimizer": "cpu"}, "set zero_stage=1, 2 or 3"),
        ({"zero_stage": 0, "shard_size": 2}, "shard_size=2 is about shards"),
        ({"offload_optimizer": "cpu", "offload_parameters": "cpu"}, "Use zero_stage=3"),
        ({"offload_optimizer": "nvme"}, "offload_path does not say which"),
        ({"zero_stage": 3, "tensor": 2, "tile_linear_bytes": 1 << 20}, "or set tensor=1"),
        ({"zero_stage": 3, "pipeline": 2, "tile_linear_bytes": 1 << 20}, "or set pipeline=1"),
        (
            {"pipeline": 2, "schedule": "pipedream_2bw", "offload_optimizer": "cpu"},
            "two versions of the weights, and offload keeps one",
        ),
        ({"pipeline": 2, "schedule": "zbc"}, "zbv"),
        ({"pipeline": 2, "tensor": 2, "loss_parallel": True}, "Use loss_parallel='auto'"),
        ({"data": 1, "tensor": 2, "shard_size": 1}, "data=1 switches off"),
        ({"schedule": "zbv"}, "the pipeline axis, which pipeline=1 switches off"),
        ({"microbatches": 8, "tensor": 2}, "microbatches=8 is about the pipeline axis"),
        ({"sequence_parallel": True}, "the tensor axis, which tensor=1 switches off"),
        ({"tensor": 2, "plan": "fast"}, "plan='fast' is neither"),
        ({"tensor": 2.0}, "tensor=2.0 is no number of ranks"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Parallel3DStrategy(**options)


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="data=0 holds no rank"):
        Parallel3DStrategy(data=0)
    strategy = Parallel3DStrategy(data=2, tensor=2)
    with pytest.raises(LayoutError, match="needs 4 ranks, but the job has 6"):
        strategy.layout_of(6)
    assert strategy.layout_of(4).sizes == {"pipeline": 1, "data": 2, "tensor": 2}
    with pytest.raises(LayoutError, match="needs 4 ranks, but the job has 2"):
        Trainer(strategy=strategy, accelerator="cpu", devices=2)


class NotedTransfers(Parallel3DStrategy):
    """Notes to which devices it moves the model."""

    def model_to_device(self) -> None:
        self.transfers = [*getattr(self, "transfers", []), self.root_device.type]
        super().model_to_device()


def transfers(rank: int, world_size: int) -> list[list[str]]:
    found = []
    for stage in (0, 1, 3):
        strategy = NotedTransfers(zero_stage=stage, telemetry=False)
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(TinyGPT(), text_data(8, 4))
        found.append(strategy.transfers)
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_a_model_without_others_on_the_data_axis_moves_to_its_device() -> None:
    assert run_ranks(transfers, 1) == [[["cpu"]] * 3]


# Around steps.


def data(rank: int, replicas: int, *, steps: int = 3) -> DataLoader[Any]:
    """Batches of 8, or a replica's share of each."""
    loader = text_data(8 * steps, 8)
    shares = [list(range(8 * at, 8 * at + 8))[rank::replicas] for at in range(steps)]
    return DataLoader(loader.dataset, batch_sampler=shares)


def trainer_of(world_size: int, stage: int, **options: Any) -> Trainer:
    strategy: Any = "auto"
    if world_size > 1:
        strategy = Parallel3DStrategy(telemetry=False, tensor=2, zero_stage=stage)
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": world_size, "max_steps": 3, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "strategy": strategy,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
    }  # fmt: skip
    return Trainer(**{**settings, **options})


class Clipping(TinyGPT):
    """Clips by torch's own function."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        largest = torch.nn.utils.clip_grad_norm_(self.parameters(), 1e9, norm_type=float("inf"))
        self.log("largest", largest)


class Looking(Callback):
    """Reads and writes whole parameters, in the midst of the run."""

    reads_gradients = False

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            with gathered_parameters(pl_module, [UP], writes=True) as whole:
                whole[UP].data[0] = whole[UP].data.sum(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with gathered_parameters(pl_module) as whole:
            self.found = {name: each.detach().clone() for name, each in whole.items()}


def clip_and_look(rank: int, world_size: int, stage: int) -> tuple[dict[str, float], Any, Any]:
    seed_everything(1, verbose=False)
    looking = Looking()
    module = Clipping(optimizer="sgd", ties=True)
    trainer = trainer_of(world_size, stage, callbacks=[looking])
    replicas = max(1, world_size // 2)
    trainer.fit(module, data(rank // 2, replicas))
    logged = {name: float(trainer.callback_metrics[name]) for name in ("norm", "largest")}
    after = trainer.validate(module, text_data(9, 4), verbose=False)[0]
    held = {name: each.numel() for name, each in local_parts(module).items()}
    if world_size > 1:
        strategy: Any = trainer.strategy
        expected = {each.kind: each.predicted_bytes for each in strategy.expected_memory()}
        assert expected["parameters"] == 4 * sum(held.values())
    return {**logged, **after}, looking.found, held


def local_parts(module: LightningModule) -> dict[str, Tensor]:
    return {
        name: each.to_local() if isinstance(each, DTensor) else each
        for name, each in module.named_parameters()
    }


@pytest.mark.full
@pytest.mark.ranks
def test_hooks_see_the_norm_of_all_and_whole_parameters() -> None:
    metrics, whole, sizes = run_ranks(clip_and_look, 1, 0)[0]
    for stages in run_ranks(in_turn, 4, clip_and_look, [(1,), (3,)]):
        for found, values, held in stages:
            assert found == pytest.approx(metrics, rel=1e-5)
            for name, each in whole.items():
                torch.testing.assert_close(values[name], each, rtol=1e-5, atol=1e-6)
            assert held[QKV] == sizes[QKV] // 4  # half of the heads, half of their rows
            assert held["norm.weight"] == sizes["norm.weight"] // 2


class Overflows(Callback):
    """Makes one gradient infinite on the last rank alone."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            gradient = pl_module.get_parameter(QKV).grad
            assert isinstance(gradient, DTensor)
            gradient.to_local()[0] = float("inf")


def overflow(rank: int, world_size: int) -> tuple[float, bool, bool]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1, verbose=False)
    module = TinyGPT(optimizer="sgd")
    trainer = trainer_of(
        world_size, 2, plugins=[plugin], gradient_clip_val=1.0, callbacks=[Overflows()]
    )
    trainer.fit(module, data(rank // 2, 2))
    is_finite = all(bool(each.isfinite().all()) for each in local_parts(module).values())
    return scaler.get_scale(), is_finite, "_unscale_grads_" in vars(scaler)


def evaluate_first(rank: int, world_size: int) -> str:
    seed_everything(1, verbose=False)
    module = TinyGPT(optimizer="sgd")
    trainer = trainer_of(world_size, 1)
    trainer.validate(module, text_data(9, 4), verbose=False)
    with pytest.raises(ConfigError, match=r"Call Trainer\.fit first") as raised:
        trainer.fit(module, data(rank // 2, 2))
    return str(raised.value)


def in_double_precision(rank: int, world_size: int) -> tuple[dict[str, float], Any]:
    seed_everything(1, verbose=False)
    module, replicas = TinyGPT(optimizer="sgd"), max(1, world_size // 2)
    trainer = trainer_of(world_size, 3, precision="64-true")
    trainer.fit(module, data(rank // 2, replicas))
    after: Any = trainer.validate(module, text_data(9, 4), verbose=False)[0]
    with gathered_parameters(module) as whole:
        return after, {name: each.detach().clone() for name, each in whole.items()}


def taken_over(rank: int, world_size: int) -> str:
    module = TinyGPT(optimizer="sgd")
    trainer_of(world_size, 0).fit(module, data(rank // 2, 2, steps=1))
    with pytest.raises(UnsupportedError, match=r"divided by another strategy object") as raised:
        trainer_of(world_size, 0).fit(module, data(rank // 2, 2, steps=1))
    return str(raised.value)


Found = tuple[tuple[float, bool, bool], str, str, tuple[dict[str, float], Any]]


def all_four(rank: int, world_size: int) -> Found:
    double = in_double_precision(rank, world_size)
    return (
        overflow(rank, world_size),
        evaluate_first(rank, world_size),
        taken_over(rank, world_size),
        double,
    )


@pytest.mark.full
@pytest.mark.ranks
def test_runs_after_each_other_and_overflows_are_those_of_one_process_or_refused() -> None:
    wanted = run_ranks(in_double_precision, 1)[0]
    for found, late, other, double in run_ranks(all_four, 4):
        assert found == (64.0, True, False)
        assert "TinyGPT was divided for an evaluation" in late
        assert "of TinyGPT was divided by another strategy object. Give the Trainer the" in other
        torch.testing.assert_close(double, wanted, rtol=1e-12, atol=1e-12)


# Traffic.


class Silent(TinyGPT):
    """Logs nothing, which would be reduced over the data axis, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Texts(LightningDataModule):
    """The share of one replica."""

    def train_dataloader(self) -> DataLoader[Any]:
        return data(0, 2, steps=2)


def train(rank: int, world_size: int, options: Any, trainer_options: Any) -> str:
    seed_everything(1, verbose=False)
    strategy = Parallel3DStrategy(tensor=2, **options)
    recording = RecordingPath()
    trainer = trainer_of(
        world_size, 0, strategy=strategy, max_steps=10, callbacks=[recording], **trainer_options
    )
    trainer.fit(Silent(ties=True), data(rank // 2, 2, steps=20))
    return recording.path


@pytest.mark.full
@pytest.mark.ranks
def test_the_bytes_of_both_axes_are_the_bytes_expected() -> None:
    calls = [
        ({"zero_stage": 1}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
        ({"zero_stage": 3, "sequence_parallel": True}, {}),
    ]
    paths = run_ranks(in_turn, 4, train, calls)[0]
    for path, (options, settings) in zip(paths, calls, strict=True):
        with open_job(Path(path)) as job:
            snapshot = job.snapshot()
        assert snapshot.communication_note is None
        expected = {
            (each.axis, each.operator): (each.payload_bytes, each.calls)
            for each in snapshot.expected
        }
        assert {axis for axis, _ in expected} == {"data", "tensor"}
        for rank in snapshot.ranks:
            counted: dict[tuple[str, str], tuple[float, float]] = {}
            for each in rank.collectives:
                if each.axis in {"data", "tensor"} and each.bytes_per_step:
                    key = each.axis, each.operator
                    known = counted.get(key, (0.0, 0.0))
                    moved = each.bytes_per_step, each.calls_per_step or 0.0
                    counted[key] = known[0] + moved[0], known[1] + moved[1]
            assert counted == expected
        plan = planned(Silent, Texts, 4, {"tensor": 2, **options}, settings, ties=True)
        assert said(plan) == expected
        check_memory(plan, snapshot, num_parameters=len(list(Silent().parameters())))


# Traces.


class Traces(Callback):
    """Counts the traces of a step until the end of each batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._patched = mock.patch.object(plan_cache, "trace_step", wraps=trace_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._traces = self._patched.start()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self._traces.call_count)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patched.stop()


def traced(rank: int, world_size: int) -> list[int]:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    case = Case(0, "phi3", {**sizes, **heads}, padded=(False, False, False))
    traces = Traces()
    strategy = Parallel3DStrategy(pipeline=2, tensor=2, microbatches=2, telemetry=False)
    trainer = quiet_trainer(world_size, strategy, callbacks=[traces])
    loader: DataLoader[Any] = DataLoader(batches(case), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Module(case), loader)
    return traces.counts


def test_steps_of_blocks_whose_products_are_dtensors_are_traced_once() -> None:
    """Phi-3 has one projection for queries, keys and values."""
    for first, *others in run_ranks(traced, 4):
        assert 0 < first < 10
        assert others == [first, first]
