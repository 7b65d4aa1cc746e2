"""What ``ZeROStrategy`` says a step moves is what telemetry counts, to the byte and the call."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from boltmesh.strategies import ZeROStrategy
from boltmesh.telemetry.reader.reader import open_job
from tests.support.ranks import run_ranks
from tests.support.stack import Block, Stack, token_data

pytestmark = pytest.mark.ranks

STEPS = 7


def padded(numel_of_rows: list[tuple[int, int]], world_size: int) -> int:
    """Elements of what is gathered: every shard has as many rows as the largest."""
    return sum(-(-rows // world_size) * world_size * columns for rows, columns in numel_of_rows)


def rows(module: nn.Module) -> list[tuple[int, int]]:
    return [(p.shape[0], p.numel() // p.shape[0]) for p in module.parameters()]


class Silent(Stack):
    """Logs nothing that travels."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class WithStatistics(Silent):
    """Has running statistics and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(self.embedding, nn.BatchNorm1d(5))  # type: ignore[assignment]
        self.register_buffer("mask", self.norm.weight.new_ones(9))


def train(rank: int, world_size: int, strategies: Any, trainer: Any, kind: Any) -> list[str]:
    """Run one job for each strategy and return where its telemetry is."""
    paths = []
    for arguments in strategies:
        shards = ZeROStrategy(**arguments)

        class Notes(Callback):
            def __init__(self, strategy: ZeROStrategy) -> None:
                self.strategy = strategy

            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                paths.append(str(self.strategy.recorder.path))

        run = Trainer(
            accelerator="cpu", devices=world_size, strategy=shards, logger=False, max_steps=STEPS,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Notes(shards)], **trainer,
        )  # fmt: skip
        batches = STEPS * trainer.get("accumulate_grad_batches", 1)
        run.fit(kind(), token_data(2 * batches * world_size, 2))
    return paths


def counted(world_size: int, strategies: Any, trainer: Any, kind: Any = Silent) -> Any:
    """For each strategy: what operators were expected to move in how many calls, what ranks did."""
    found = []
    for path in run_ranks(train, world_size, strategies, trainer, kind)[0]:
        with open_job(Path(path)) as job:
            snapshot = job.snapshot()
        assert snapshot.communication_note is None
        expected = {each.operator: (each.payload_bytes, each.calls) for each in snapshot.expected}
        measured = [
            {
                each.operator: (each.bytes_per_step, each.calls_per_step)
                for each in rank.collectives
                if each.axis == "data" and each.bytes_per_step
            }
            for rank in snapshot.ranks
        ]
        found.append((expected, measured))
    return found


@pytest.mark.full
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_moves_what_the_formula_of_its_stage_says(accumulate: int) -> None:
    stages = [{"stage": stage} for stage in (1, 2, 3)]
    found = counted(2, stages, {"accumulate_grad_batches": accumulate})
    model = Stack()
    block = 4 * padded(rows(Block(7, 11)), 2)
    rest = 4 * padded(rows(model.embedding) + rows(model.norm) + rows(model.head), 2)
    for stage, (expected, measured) in enumerate(found, start=1):
        gathers, root_gathers = (2 * accumulate, accumulate) if stage == 3 else (1, 1)
        reductions = 1 if stage == 1 else accumulate
        formula = {
            "_allgather_base": (
                gathers * 3 * block + root_gathers * rest,
                3 * gathers + root_gathers,
            ),
            "_reduce_scatter_base": (reductions * (3 * block + rest), 4 * reductions),
        }
        assert expected == formula
        assert measured == [formula, formula]


@pytest.mark.full
def test_bf16_halves_what_blocks_gather_and_clipping_adds_a_norm() -> None:
    trainer = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    ((expected, measured),) = counted(2, [{"stage": 3}], trainer)
    model = Stack()
    block = Block(7, 11)
    multiplied = padded(rows(block.up) + rows(block.down), 2)
    norms = padded(rows(model.norm), 2)
    rest = padded(rows(model.embedding) + rows(model.head), 2) + 4 * norms
    formula = {
        "_allgather_base": (2 * 3 * 2 * multiplied + 4 * rest, 7),
        "_reduce_scatter_base": (4 * (3 * multiplied + rest), 4),
        "allreduce": (8, 1),
    }
    assert expected == formula
    assert measured == [formula, formula]


@pytest.mark.full
def test_copies_of_shards_average_what_each_batch_reduces() -> None:
    trainer = {"accumulate_grad_batches": 2}
    ((expected, measured),) = counted(4, [{"stage": 2, "shard_size": 2}], trainer)
    model = Stack()
    whole = 4 * padded(rows(model), 2)
    formula = {
        "_allgather_base": (whole, 4),
        "_reduce_scatter_base": (2 * whole, 8),
        "allreduce": (2 * whole // 2, 8),
    }
    assert expected == formula
    assert measured == [formula] * 4


@pytest.mark.full
def test_all_buffers_are_sent_once_per_step() -> None:
    ((expected, measured),) = counted(2, [{"stage": 3}], {}, WithStatistics)
    size = 5 * 4 * 2 + 8 + 9 * 4
    assert expected["broadcast"][0] == size
    assert [each["broadcast"][0] for each in measured] == [size] * 2
