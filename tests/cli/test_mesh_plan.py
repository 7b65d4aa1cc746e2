"""``boltmesh plan`` of a mesh of several axes: what it shows, and what it refuses."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import (
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh import cli
from boltmesh.strategies import Parallel3DStrategy
from boltmesh.telemetry.reader.reader import open_job
from tests.support.gpts import VOCABULARY, text_data
from tests.support.planned_meshes import check_memory, measured, planned, said
from tests.support.ranks import run_ranks
from tests.support.recording_path import RecordingPath
from tests.support.turns import in_turn

TINY = (
    "model.init_args.n_embd=32",
    "data.init_args.batch_size=8",
    f"data.init_args.path={__file__}",  # any text that is read at once
)


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert cli.run_command(["plan", "threed", *TINY, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["mesh"]
    return found


def moved(found: dict[str, Any], axis: str) -> list[float]:
    """Bytes of a step along an axis, by place of the pipeline."""
    return [
        sum(each["bytes"] for each in place["traffic"] if each["axis"] == axis)
        for place in found["places"]
    ]


# Against real ranks.


class Block(nn.Module):
    """Has a parameter without rows and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift: Tensor
        self.register_buffer("shift", torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x + self.shift)))


class Scaled(LightningModule):
    """Has a tied head, and a frozen layer in one block; logs two numbers."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[1].up.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        self.log_dict({"one": loss, "two": 2 * loss})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad])


class Texts(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return text_data(160, 4)


RUNS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"zero_stage": 0}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
    ({"zero_stage": 2, "schedule": "zbv"}, {"accumulate_grad_batches": 3}),
    ({"zero_stage": 3, "shard_size": 1}, {"accumulate_grad_batches": 2}),
    ({"zero_stage": 3}, {"gradient_clip_val": 1.0}),
)
"""Options of the strategy, and settings of the Trainer."""
SIZES: dict[str, Any] = {"pipeline": 2, "data": 2, "microbatches": 4}


def train(rank: int, world_size: int, options: Any, settings: Any) -> tuple[str, str]:
    """Train with telemetry; return where it is, and what was said when the run was set up."""
    seed_everything(1, verbose=False)
    strategy = Parallel3DStrategy(**SIZES, **options)
    recording = RecordingPath()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=6, logger=False,
        callbacks=[recording], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **settings,
    )  # fmt: skip
    with caught_info() as said_at_setup:
        trainer.fit(Scaled(), text_data(160, 4))
    return recording.path, "".join(each for each in said_at_setup if "zero_stage" in each)


@contextmanager
def caught_info() -> Iterator[list[str]]:
    """What ``rank_zero_info`` logs."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.fabric.utilities.rank_zero"), Keep()
    root = logging.getLogger("lightning.pytorch")
    before = root.level
    for each in (logger, root):
        each.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        root.setLevel(before)
        for each in (logger, root):
            each.removeHandler(handler)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("runs", [RUNS[1:3], pytest.param(RUNS, marks=pytest.mark.full)])
def test_what_a_plan_says_is_what_ranks_of_a_pipeline_measure(workplace: Path, runs: Any) -> None:
    found = run_ranks(in_turn, 4, train, runs)
    count = len(list(Scaled().parameters()))
    for (path, message), (options, settings) in zip(found[0], runs, strict=True):
        with open_job(Path(path)) as job:
            seen = job.snapshot()
        made = planned(Scaled, Texts, 4, {**SIZES, **options}, settings)
        expected, counted = said(made), measured(seen)
        assert expected.keys() == counted.keys(), options
        for key, amount in counted.items():
            if expected[key][1]:
                assert expected[key] == pytest.approx(amount), (key, options)
            else:  # of coalesced buffers only the bytes are known
                assert expected[key][0] == pytest.approx(amount[0]), (key, options)
        check_memory(made, seen, num_parameters=count)
        extra = made.places[0].extra
        sentence = "" if extra is None else extra.sentence(4, rank="rank 0")
        assert message == (sentence and f"Parallel3DStrategy: {sentence}."), options


def test_what_stages_2_and_3_cost_beside_a_pipeline_is_the_difference_of_plans() -> None:
    def bytes_of(stage: int, batches: int) -> float:
        settings = {"accumulate_grad_batches": batches}
        made = planned(Scaled, Texts, 4, {**SIZES, "zero_stage": stage}, settings)
        if stage > 1:
            extras.append(made.extra)
        fullest = max(made.places, key=lambda each: data_bytes(each.traffic))
        return data_bytes(fullest.traffic)

    def data_bytes(traffic: Any) -> float:
        return sum(each.payload_bytes for each in traffic if each.axis == "data")

    extras: list[Any] = []
    for stage, batches in ((2, 3), (3, 1), (3, 3)):
        more = bytes_of(stage, batches) - bytes_of(1, batches)
        extra = extras.pop()
        assert extra.step_bytes == more
        assert extra.per_microbatch(4) == more / (4 * batches)
        assert (more > 0) == (batches > 1)
        assert bool(extra.parameter_bytes) == (stage == 3)
        assert f"{more / (4 * batches):,.0f}" in extra.sentence(4, rank="rank 0")


# The command.


def test_a_recipe_shows_its_mesh_memory_stages_bubble_and_traffic(capsys, workplace) -> None:
    found = plan(capsys)
    assert found["sizes"] == {"pipeline": 2, "data": 2, "tensor": 2}
    assert found["groups"]["pipeline"][0] == [0, 4]
    assert found["groups"]["data"][0] == [0, 2]
    assert found["groups"]["tensor"][0] == [0, 1]
    assert [place["ranks"] for place in found["places"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["pipeline"]["schedule"] == "1f1b"
    assert found["pipeline"]["bubble"] >= found["pipeline"]["even_bubble"] > 0
    for place in found["places"]:
        kept = place["between_steps"]
        # AdamW's two moments of shards over two ranks.
        assert kept["optimizer"]["host"] == 2 * kept["parameters"]["host"]
        assert kept["parameters"]["host"] == pytest.approx(4 * place["parameters"] / 2, rel=0.02)
        assert place["activations"] > 0
        assert place["peak"]["host"] > kept["total"]["host"] + place["activations"]
        assert {each["axis"] for each in place["traffic"]} == {
            "pipeline", "data", "tensor", "control"
        }  # fmt: skip
    options = ["strategy.zero_stage=3", "accumulate_grad_batches=2"]
    assert cli.run_command(["plan", "threed", *TINY, *options]) == 0
    shown = capsys.readouterr().out
    assert "pipeline=2 x data=2 x tensor=2, ZeRO-3 over the data axis" in shown
    assert "expected bubble" in shown
    assert "blocks.3, norm, head" in shown or "... head" in shown
    assert "zero_stage=3 beside a pipeline moves" in shown
    assert "for the second batch of a step" in shown


def test_any_config_can_be_put_on_a_mesh(capsys, workplace) -> None:
    def found(*arguments: str) -> dict[str, Any]:
        command = ["plan", "ddp", "--strategy", "3d", "--devices", "4", *TINY, *arguments]
        assert cli.run_command([*command, "--json"]) == 0
        made: dict[str, Any] = json.loads(capsys.readouterr().out)["mesh"]
        return made

    pipelined = found("strategy.pipeline=2", "strategy.zero_stage=2")
    assert pipelined["sizes"] == {"pipeline": 2, "data": 2, "tensor": 1}
    assert pipelined["zero_stage"] == 2
    alone = found("strategy.data=1", "strategy.tensor=4")
    assert alone["pipeline"] is None
    assert not moved(alone, "data")[0]
    assert moved(alone, "tensor")[0] > 0


@pytest.mark.full
def test_ranks_of_a_context_axis_are_planned_each_with_its_positions(capsys, workplace) -> None:
    options = ("strategy.pipeline=1", "strategy.microbatches=null", "strategy.data=2")
    found = plan(capsys, *options, "strategy.context=2", "strategy.zero_stage=3")
    assert found["sizes"] == {"pipeline": 1, "data": 2, "context": 2, "tensor": 2}
    assert [place["ranks"] for place in found["places"]] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    whole = plan(capsys, *options, "devices=4", "strategy.zero_stage=3")["places"][0]
    first, last = found["places"]
    assert first["activations"] < last["activations"] < 0.8 * whole["activations"]
    # Shards over data x context; the second stretch of positions sees the keys of the first.
    assert (
        first["between_steps"]["optimizer"]["host"]
        < 0.6 * (whole["between_steps"]["optimizer"]["host"])
    )
    assert min(moved(found, "context")) > 0


@pytest.mark.full
def test_offloaded_state_is_in_host_memory(capsys, workplace) -> None:
    Path("cluster.yaml").write_text("host_gib: 0.0001\ndevice_gib: 80\n")
    arguments = (
        "accelerator=cuda", "strategy.pipeline=1", "strategy.microbatches=null",
        "strategy.data=4", "--cluster", "cluster.yaml",
    )  # fmt: skip
    on_device = plan(capsys, *arguments)["places"][0]
    offloaded = plan(capsys, *arguments, "strategy.offload_optimizer=cpu")["places"][0]
    state = on_device["between_steps"]["optimizer"]["device"]
    kept = offloaded["between_steps"]["optimizer"]
    # A master copy of the parameters beside the two moments.
    assert kept["device"] + kept["host"] == pytest.approx(1.5 * state, rel=0.02)
    assert kept["host"] > 0
    assert on_device["too_large"] == []
    assert offloaded["too_large"] == ["host"]


def test_a_dry_run_shows_the_mesh_too(capsys, workplace) -> None:
    assert cli.run_command(["fit", "threed", *TINY, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "on 8 ranks: pipeline=2 x data=2 x tensor=2" in shown
    assert "expected bubble" in shown


@pytest.mark.full
def test_other_strategies_are_planned_beside_a_mesh(capsys, workplace) -> None:
    assert cli.run_command(["plan", "threed", *TINY, "--strategy", "zero3"]) == 0
    assert "zero3, GPT with" in capsys.readouterr().out
    command = ["plan", "ddp", "--strategy", "pipeline", "data.init_args.batch_size=16"]
    assert cli.run_command([*command, "strategy.microbatches=4"]) == 0
    assert "4 microbatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--devices", "6"], "or pipeline=2 x data=3 x tensor=1, or start 8"),
        (["strategy.data=3"], "needs 12 ranks, but the job has 8"),
        (["strategy.tensor=3", "strategy.data=null"], "3 by 3. Set pipeline=2"),
        (["strategy.zero_stage=4"], "zero_stage=4 is no ZeRO stage"),
        (["strategy.stages=2"], "unknown key 'strategy.stages'"),
        (["strategy.expert=3"], "expert=3 does not divide the 4 ranks of a stage"),
        (["strategy.schedule=zbw"], "Did you mean 'zbv'"),
        (["data.class_path=null"], "a mesh is planned by running a batch"),
    ],
)
def test_what_cannot_be_on_a_mesh_is_refused_in_one_line(
    arguments: list[str], status: str, capsys, workplace
) -> None:
    assert cli.run_command(["plan", "threed", *TINY, *arguments]) == 2
    said_about = capsys.readouterr().err
    assert status in said_about
    assert len(said_about.strip().splitlines()) == 1
