"""Memory that ``plan auto`` states of a layout, beside what telemetry measures of its run."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, seed_everything
from omegaconf import OmegaConf
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from boltmesh.advisor.layouts import ConfigLayout, PlannedLayout
from boltmesh.advisor.machine import Hardware
from boltmesh.advisor.search import ConfigSearcher
from boltmesh.configs.classes import build
from boltmesh.configs.load import load
from boltmesh.plan.dry_model import describe_model
from boltmesh.plan.mesh_plan import MeshPlan, plan_mesh
from boltmesh.planner.layout import Layout
from boltmesh.strategies.cost_model.step_time import Machine
from boltmesh.strategies.registry import build_strategy
from boltmesh.telemetry.reader.reader import open_job
from tests.support.ranks import run_ranks
from tests.support.recording_path import RecordingPath
from tests.support.turns import in_turn

RANKS = 4
TEXT = f"data.init_args.path={__file__}"  # any text that is read at once
LINES = {
    "ddp": (
        *("model.init_args.n_layer=4", "model.init_args.n_embd=32"),
        *("model.init_args.block_size=32", "data.init_args.batch_size=8", TEXT),
    ),
    "expert_hf": (
        *("model.init_args.config.num_hidden_layers=2", "precision=32-true", TEXT),
        "model.init_args.config.output_router_logits=false",
        *("model.init_args.config.hidden_size=32", "data.init_args.batch_size=8"),
    ),
}
"""Changes of configs that make their models small."""
LAYOUTS: dict[str, tuple[str, Layout]] = {
    "ddp": ("ddp", Layout(data=4)),
    "zero1": ("ddp", Layout(data=4, zero=1)),
    "zero2": ("ddp", Layout(data=4, zero=2)),
    "zero3": ("ddp", Layout(data=4, zero=3)),
    "shards of two": ("ddp", Layout(data=4, zero=3, shard=2)),
    "optimizer on the host": ("ddp", Layout(data=4, zero=1, offload="optimizer")),
    "all on the host": ("ddp", Layout(data=4, zero=3, offload="all")),
    "pipeline": ("ddp", Layout(pipeline=2, data=2, zero=1)),
    "tensor": ("ddp", Layout(tensor=2, data=2, zero=1)),
    "context": ("ddp", Layout(context=2, data=2, zero=3)),
    "pipeline, tensor": ("ddp", Layout(pipeline=2, tensor=2)),
    "pipeline, context": ("ddp", Layout(pipeline=2, context=2, zero=1)),
    "pipeline on the host": ("ddp", Layout(pipeline=2, data=2, zero=1, offload="optimizer")),
    "recomputed": ("ddp", Layout(tensor=2, data=2, zero=1, recompute="full")),
    "experts": ("expert_hf", Layout(data=4, expert=2, zero=1)),
    "experts, pipeline": ("expert_hf", Layout(pipeline=2, data=2, expert=2, zero=1)),
    "experts, tensor": ("expert_hf", Layout(tensor=2, data=2, expert=2, zero=1)),
    "experts, context": ("expert_hf", Layout(context=2, data=2, expert=2, zero=1)),
}
GROUPS = {
    "whole models": ("ddp", "zero1", "zero3", "optimizer on the host"),
    "divided layers": ("pipeline", "tensor", "context"),
    "more of whole models": ("zero2", "shards of two", "all on the host"),
    "several axes": (
        *("pipeline, tensor", "pipeline, context", "pipeline on the host", "recomputed"),
    ),
    "experts": ("experts", "experts, pipeline", "experts, tensor", "experts, context"),
}
"""Layouts that are run by the same ranks."""
KINDS = ("parameters", "gradients", "optimizer", "buffers")
"""Kinds of memory that are kept between two steps."""
NEAR = 0.05
"""Share by which memory of a rank may differ."""
WITH_ACTIVATIONS = {
    "ddp": ("ddp", Layout(data=4)),
    "tensor": ("ddp", Layout(tensor=2, data=2)),
    "sequence parallel": ("ddp", Layout(tensor=2, data=2, has_sequence_parallel=True)),
    "context": ("ddp", Layout(context=2, data=2)),
    "pipeline": ("ddp", Layout(pipeline=2, data=2)),
    "pipeline, tensor": ("ddp", Layout(pipeline=2, tensor=2)),
    "mixture": ("expert_hf", Layout(data=4)),
}
"""Layouts whose activations are counted; none gathers parameters, which autograd would keep."""


class SavedForBackward(Callback):
    """Bytes that autograd keeps of the last step at most, parameters and buffers apart."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._now = self._before = self.most = 0

    def on_train_batch_start(self, trainer, module, *_: Any) -> None:
        held = [*module.parameters(), *module.buffers()]
        self._own = {each.untyped_storage().data_ptr() for each in held}
        gc.collect()
        # The first step is preceded by one of the whole model.
        self._before = self.most = self._now

    @property
    def in_step(self) -> int:
        """Most bytes beyond those that were kept when the last step began."""
        return self.most - self._before

    def pack(self, tensor: Tensor) -> "SavedTensor":
        return SavedTensor(self, tensor)

    def count(self, tensor: Tensor, change: int) -> None:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at in self._own:
            return
        self._uses[at] += change
        if self._uses[at] == (1 if change > 0 else 0):
            self._now += change * storage.nbytes()
        self.most = max(self.most, self._now)


class SavedTensor:
    """A tensor that autograd keeps."""

    def __init__(self, counter: SavedForBackward, tensor: Tensor) -> None:
        self.counter, self.tensor = counter, tensor
        counter.count(tensor, 1)

    def __del__(self) -> None:
        self.counter.count(self.tensor, -1)


def planned(config: str, axes: Layout) -> PlannedLayout:
    """Plan one layout on CPU ranks."""
    machine = Machine(device_tflops=0.05, memory_gb_s=5.0, host_gib=64.0)
    hardware = Hardware(machine, RANKS, 1, True, "", "")
    line = [*LINES[config], f"devices={RANKS}"]
    searcher = ConfigSearcher(config, line, source=config, hardware=hardware)
    searcher.search()
    found = searcher._planned(ConfigLayout(replace(axes, balance=None)))
    assert found is not None
    return found


def train(rank: int, world_size: int, config: str, name: str, arguments: Any) -> str:
    """Train some steps of one batch, for gradients are seen at any moment; return the recording."""
    loaded = load(config, LINES[config])
    seed_everything(1, verbose=False)
    strategy = build_strategy(name, **arguments)
    recording = RecordingPath()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=4, logger=False,
        callbacks=[recording], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    model = build(loaded.model, "model", source=config)
    trainer.fit(model, build(loaded.data, "data", source=config))
    return recording.path


def shares_off(names: Sequence[str]) -> dict[str, float]:
    """Return by how much of the measured bytes of a rank the planned ones differ, by layout."""
    plans = {name: planned(*LAYOUTS[name]) for name in names}
    runs = [
        (LAYOUTS[name][0], each.layout.name, dict(each.layout.arguments))
        for name, each in plans.items()
    ]
    found = run_ranks(in_turn, RANKS, train, runs)
    off = {}
    for path, (name, each) in zip(found[0], plans.items(), strict=True):
        with open_job(Path(path)) as job:
            seen = job.snapshot()
        held = [
            sum(one.measured_bytes or 0 for one in rank.memory_kinds if one.kind in KINDS)
            for rank in seen.ranks
        ]
        stated = each.memory.between_steps
        off[name] = (stated.host + stated.device + stated.disk) / max(held) - 1
    return off


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(30)
@pytest.mark.parametrize("group", GROUPS)
def test_memory_that_is_planned_is_what_telemetry_measures(group, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOLTMESH_RUN_DIR", str(tmp_path / "telemetry"))
    monkeypatch.setattr("boltmesh.advisor.search.divisions", lambda _: [Layout(data=RANKS)])
    off = shares_off(GROUPS[group])
    assert max(map(abs, off.values())) < NEAR, off


def saved_by_rank(rank: int, world_size: int, config: str, name: str, arguments: Any) -> int:
    """Train two steps, and return the bytes that autograd keeps at most."""
    loaded = load(config, LINES[config])
    seed_everything(1, verbose=False)
    counter = SavedForBackward()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=build_strategy(name, **arguments),
        max_steps=2, logger=False, callbacks=[counter], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    model = build(loaded.model, "model", source=config)
    with saved_tensors_hooks(counter.pack, lambda each: each.tensor):
        trainer.fit(model, build(loaded.data, "data", source=config))
    return counter.in_step


def planned_activations(config: str, layout: ConfigLayout) -> int:
    """Return the bytes that the fullest rank of a layout is planned to keep at most."""
    line = [*LINES[config], f"devices={RANKS}", "trainer.accelerator=cpu"]
    loaded = load(config, line)
    if not layout.axes.is_divided:
        model, _, _ = describe_model(loaded, None, source=config)
        assert model.activations is not None
        return model.activations.saved_bytes
    plan = plan_mesh(loaded, RANKS, dict(layout.arguments), Machine(), source=config)
    return max(each.activation_bytes or 0 for each in plan.places)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(30)
def test_activations_that_are_planned_are_what_autograd_keeps(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    layouts = {
        name: (config, ConfigLayout(replace(axes, balance=None)))
        for name, (config, axes) in WITH_ACTIVATIONS.items()
    }
    runs = [(config, layout.name, dict(layout.arguments)) for config, layout in layouts.values()]
    kept = zip(*run_ranks(in_turn, RANKS, saved_by_rank, runs), strict=True)
    off = {
        name: planned_activations(*layout) / max(ranks) - 1
        for (name, layout), ranks in zip(layouts.items(), kept, strict=True)
    }
    assert max(map(abs, off.values())) < NEAR, off


DIVIDED = {"pipeline": 1, "data": 1, "tensor": 1, "context": RANKS, "zero_stage": 0}
LESS: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": "full"},
    "tiles": {"tile_logits": 32, "tile_tokens": 4},
    "all": {"activation_checkpointing": "full", "tile_logits": 32, "tile_tokens": 4},
}
"""Arguments by which ranks of a context group keep less."""


def divided_plan(more: dict[str, Any], *lines: str) -> MeshPlan:
    """Plan a sequence that is divided over all ranks."""
    line = [*LINES["ddp"], *lines, f"devices={RANKS}", "trainer.accelerator=cpu"]
    config = load("ddp", line)
    for key, value in more.items():
        OmegaConf.update(config, f"strategy.{key}", value, merge=False, force_add=True)
    return plan_mesh(config, RANKS, {**DIVIDED, **more}, Machine(), source="ddp")


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(20)
def test_what_is_kept_of_divided_sequences_is_planned_with_tiles(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [("ddp", "bolt_3d", {**DIVIDED, **more}) for more in LESS.values()]
    kept = zip(*run_ranks(in_turn, RANKS, saved_by_rank, runs), strict=True)
    for more, ranks in zip(LESS.values(), kept, strict=True):
        stated = max(each.activation_bytes or 0 for each in divided_plan(more).places)
        assert stated == pytest.approx(max(ranks), rel=NEAR), more


class SpaceOnDisk(Callback):
    """Bytes of the file that inputs of blocks wait in."""

    num_bytes = 0

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        self.num_bytes = trainer.strategy.recomputation.offload.space.disk_bytes


WIDE = "model.init_args.n_embd=256"
"""Inputs of blocks that are not too small to be moved."""


def disk_bytes(rank: int, world_size: int, arguments: dict[str, Any]) -> int:
    """Train a step, and return the bytes that wait on the disk."""
    loaded, space = load("ddp", [*LINES["ddp"], WIDE]), SpaceOnDisk()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=build_strategy("bolt_3d", **arguments),
        max_steps=1, logger=False, callbacks=[space], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(
        build(loaded.model, "model", source="ddp"), build(loaded.data, "data", source="ddp")
    )
    return space.num_bytes


@pytest.mark.full
@pytest.mark.ranks
def test_inputs_of_blocks_that_wait_on_a_disk_are_planned(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"activation_checkpointing": "full", "activation_offload": str(tmp_path)}
    found = run_ranks(disk_bytes, RANKS, {**DIVIDED, **more})
    plan = divided_plan(more, WIDE)
    assert min(found) > 0
    for measured, each in zip(found, plan.places, strict=True):
        assert each.memory.peak.disk == pytest.approx(measured, rel=NEAR)
    kept = divided_plan({"activation_checkpointing": "full"}, WIDE)
    for less, each in zip(plan.places, kept.places, strict=True):
        assert (less.activation_bytes or 0) + less.memory.peak.disk == each.activation_bytes
