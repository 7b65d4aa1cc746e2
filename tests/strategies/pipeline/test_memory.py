"""What ranks of a pipeline hold and keep, measured, beside what the strategy says."""

import gc
import weakref
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.schedule_sim import peak_live_bytes
from boltmesh.strategies import telemetry
from boltmesh.strategies.pipeline.microbatch_runs import MicrobatchStage
from boltmesh.strategies.pipeline.schedules.registry import schedule_table
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from boltmesh.telemetry.writer.memory import measure
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

MICROBATCHES = 8


class Block(nn.Module):
    """Keeps its input, and what its two operators in between give."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.up(x)).cos())


class Chain(LightningModule):
    """Blocks alone, so that every stage is alike."""

    def __init__(self, depth: int = 8, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saved:
    """Follows what autograd saves, by stage and microbatch, as long as it lives."""

    def __init__(self) -> None:
        self.live: Counter[tuple[int, int]] = Counter()
        """Saved tensors by stage and microbatch."""
        self.storages: dict[int, tuple[int, int]] = {}
        """Bytes of each storage that is not a parameter's, and how many saved tensors share it."""
        self.peak_microbatches: Counter[int] = Counter()
        self.peak_bytes = 0

    def of_chunk(self, stage: int, microbatch: int, left_out: set[int]) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> "Packed":
            packed = Packed(tensor.detach())
            address = tensor.untyped_storage().data_ptr()
            if address not in left_out:
                self.add((stage, microbatch), address, tensor.untyped_storage().nbytes())
                weakref.finalize(packed, self.remove, (stage, microbatch), address)
            return packed

        return saved_tensors_hooks(pack, lambda packed: packed.tensor)

    def add(self, chunk: tuple[int, int], address: int, size: int) -> None:
        self.live[chunk] += 1
        self.storages[address] = size, self.storages.get(address, (0, 0))[1] + 1
        microbatches = Counter(stage for (stage, _), count in self.live.items() if count)
        self.peak_microbatches |= microbatches
        self.peak_bytes = max(self.peak_bytes, sum(size for size, _ in self.storages.values()))

    def remove(self, chunk: tuple[int, int], address: int) -> None:
        self.live[chunk] -= 1
        size, count = self.storages.pop(address)
        if count > 1:
            self.storages[address] = size, count - 1


class Packed:
    """A tensor of which it is known when it is let go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def count_saved(
    rank: int, world_size: int, schedule: str, recompute: Any
) -> tuple[dict[int, int], int, Any]:
    """The most microbatches that each stage kept, the most bytes, and what was expected."""
    seed_everything(1, verbose=False)
    module = Chain()
    strategy = PipelineParallelStrategy(
        telemetry=False,
        schedule=schedule,
        microbatches=MICROBATCHES,
        activation_checkpointing=recompute,
    )
    saved = Saved()
    forward = MicrobatchStage.forward

    def watched(self: MicrobatchStage, microbatch: int, received: tuple[Tensor, ...]) -> Any:
        if trainer.global_step == 0:  # whose loss is tried on a few rows besides
            return forward(self, microbatch, received)
        left_out = {each.untyped_storage().data_ptr() for each in module.parameters()}
        left_out.add(self._run.parts[0][0].untyped_storage().data_ptr())
        with saved.of_chunk(self.index, microbatch, left_out):
            return forward(self, microbatch, received)

    MicrobatchStage.forward = watched
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=2, **QUIET
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(128, 16)), batch_size=64))
    gc.collect()
    assert not +saved.live  # nothing outlives the step
    expected = {each.kind: each.predicted_bytes for each in strategy.expected_memory()}
    return dict(saved.peak_microbatches), saved.peak_bytes, expected["activations"]


@pytest.mark.sample("1f1b")
@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_a_stage_keeps_as_many_microbatches_as_its_schedule_says(schedule: str) -> None:
    world_size = 2 if schedule == "zbv" else 4
    table = schedule_table(schedule, num_ranks=world_size, num_microbatches=MICROBATCHES)
    found = run_ranks(count_saved, world_size, schedule, None)
    for rank, (microbatches, num_bytes, expected) in enumerate(found):
        alone = [[stage == each for each in range(table.num_stages)] for stage in microbatches]
        peaks = [peak_live_bytes(table.order[rank], list(map(int, own))) for own in alone]
        assert list(microbatches) == list(table.stages_of(rank))
        assert list(microbatches.values()) == peaks
        if schedule == "gpipe":
            assert peaks == [MICROBATCHES]
        if schedule == "1f1b":
            assert peaks == [world_size - rank]
        # Behind the last weight a second half of a backward pass needs nothing any more.
        assert 0.94 * expected <= num_bytes <= expected


@pytest.mark.full
@pytest.mark.ranks
def test_blocks_that_run_again_keep_their_inputs_alone() -> None:
    plain = run_ranks(count_saved, 2, "1f1b", None)
    found = run_ranks(count_saved, 2, "1f1b", "full")
    for before, (microbatches, num_bytes, expected) in zip(plain, found, strict=True):
        assert microbatches == before[0]
        assert 0.94 * expected <= num_bytes <= expected
        assert num_bytes < 0.2 * before[1]


class Remembers(Chain):
    """Counts in each batch how many gradients of the batch before are in memory yet."""

    left: ClassVar[list[StorageWeakRef]] = []
    seen: ClassVar[dict[int, int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen[batch_idx] = sum(not each.expired() for each in self.left)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        made = [each.grad for each in self.parameters() if each.grad is not None]
        self.left[:] = [StorageWeakRef(each.untyped_storage()) for each in made]


class ReadsGradients(Callback):
    """Looks at gradients before they are zeroed."""

    def on_before_zero_grad(self, *_: Any) -> None:
        pass


def count_left(rank: int, world_size: int, accumulate: int, watched: bool) -> dict[int, int]:
    seed_everything(1, verbose=False)
    Remembers.left.clear()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, accumulate_grad_batches=accumulate,
        strategy=PipelineParallelStrategy(telemetry=False, microbatches=2), **QUIET,
        callbacks=[ReadsGradients()] if watched else [],
    )  # fmt: skip
    trainer.fit(Remembers(), DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8))
    return dict(Remembers.seen)


@pytest.mark.full
@pytest.mark.ranks
def test_gradients_of_the_step_before_are_gone_when_new_ones_are_made() -> None:
    held = len(list(Chain().parameters())) // 2
    for alone, accumulated, watched in run_ranks(
        in_turn, 2, count_left, [(1, False), (2, False), (1, True)]
    ):
        assert alone == dict.fromkeys(range(4), 0)
        assert accumulated == {0: 0, 1: held, 2: 0, 3: held}
        assert watched == {0: 0, 1: held, 2: held, 3: held}


def hold(rank: int, world_size: int) -> list[dict[str, int]]:
    """By kind the bytes that a rank's parameters, gradients and state take, told and counted."""
    seed_everything(1, verbose=False)
    strategy = PipelineParallelStrategy(telemetry=False, schedule="1f1b", microbatches=4)
    module = Stack(depth=6, ties=True, width=16, hidden=24)
    walked: dict[str, int] = {}

    class Walk(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            found = measure(telemetry.tensors_by_kind(strategy), "host")
            walked.update({kind: size for (kind, _), size in found.items()})

    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, **QUIET,
        callbacks=[Walk()],
    )  # fmt: skip
    trainer.fit(module, token_data(24, 8))
    names = [name for name, _ in module.named_parameters() if strategy.holds(name)]
    held = sum(each.nbytes for name, each in module.named_parameters() if name in names)
    counted = {
        "parameters": held,
        "gradients": held,
        "optimizer": 2 * held + 4 * len(names),  # moments, and the number of steps
        "buffers": 0,
    }
    told = {each.kind: each.predicted_bytes or 0 for each in strategy.expected_memory()}
    del told["activations"]
    return [counted, walked, told, {"whole": sum(each.nbytes for each in module.parameters())}]


@pytest.mark.ranks
def test_a_rank_holds_its_stages_and_says_so() -> None:
    ranks = run_ranks(hold, 3)
    for counted, walked, told, _ in ranks:
        assert walked == counted
        assert {**told, "buffers": 0} == counted
    tied = 13 * 16 * 4  # on the first and the last
    held = [counted["parameters"] for counted, *_ in ranks]
    assert sum(held) == ranks[0][3]["whole"] + tied
    assert max(held) < 0.5 * ranks[0][3]["whole"]


def test_the_most_that_is_kept_is_by_the_bytes_of_each_stage() -> None:
    row = ["0F0", "3F0", None, "0F1", "3I0", "3W0", "0B0", "0B1"]
    assert peak_live_bytes(row, [10, 0, 0, 3]) == 23
    assert peak_live_bytes(row, [0, 0, 0, 3]) == 3
    assert peak_live_bytes([], []) == 0
