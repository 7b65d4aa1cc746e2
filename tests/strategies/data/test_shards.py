"""What Lightning's features and users' habits do to shards."""

import itertools
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from boltmesh.strategies import ZeROStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(world_size: int, stage: int, **arguments: Any) -> Trainer:
    strategy = ZeROStrategy(telemetry=False, stage=stage)
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, **{**QUIET, **arguments}
    )


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters whole. Collective."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach().clone()
        for name, each in module.named_parameters()
    }


STAGES = [(1,), (2,), (3,)]


def bytes_held(rank: int, world_size: int, stage: int) -> dict[str, list[int]]:
    """Return bytes by kind before training, after a forward pass and after the steps."""
    seen: dict[str, list[int]] = {}

    def note(strategy: Any, when: str) -> None:
        kinds = strategy.data_axis.tensors_by_kind(strategy.model, strategy.optimizers)
        seen[when] = [
            sum(held(tensor) for tensor in kinds[kind])
            for kind in ("parameters", "gradients", "optimizer")
        ]

    def held(tensor: Tensor) -> int:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.numel() * local.element_size()

    class Notes(Callback):
        reads_gradients = False

        def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
            note(trainer.strategy, "after the forward pass")

        def on_after_backward(self, trainer: Any, *args: Any) -> None:
            note(trainer.strategy, "after the backward pass")

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            note(trainer.strategy, "after the step")

    run = trainer(world_size, stage, max_steps=2, callbacks=[Notes()])
    run.fit(Even(), token_data(16, 2))
    return seen


class Even(Stack):
    """Sizes that 4 ranks divide."""

    def __init__(self) -> None:
        super().__init__(width=8, hidden=16)
        self.embedding = nn.Embedding(16, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_holds_its_share_of_each_kind(world_size: int) -> None:
    model = Even()
    model.head = nn.Linear(8, 13, bias=False)
    size = 4 * sum(each.numel() for each in model.parameters())
    padding = 4 * 8 * (-13 % world_size)  # of the head, on the last rank
    steps = 4 * len(list(model.parameters()))
    root = size - 4 * sum(each.numel() for each in model.blocks.parameters())
    ranks = run_ranks(in_turn, world_size, bytes_held, STAGES)
    for stage in (1, 2, 3):
        first = ranks[0][stage - 1]
        share = (size + padding) // world_size
        gathered = root if stage == 3 else size
        assert first["after the forward pass"][0] == share + gathered
        assert first["after the backward pass"][:2] == [share, share]
        assert first["after the step"] == [share, share, 2 * share + steps]
        total = sum(rank[stage - 1]["after the step"][0] for rank in ranks)
        assert total == size


def accumulate(rank: int, world_size: int, stage: int) -> list[int]:
    """Return the bytes of gradients between two batches of one accumulation window."""
    seen = []

    class Notes(Callback):
        reads_gradients = False

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, at: int
        ) -> None:
            if at == 0:
                kinds = trainer.strategy.data_axis.tensors_by_kind(trainer.strategy.model, [])
                for each in kinds["gradients"]:
                    local = each.to_local() if isinstance(each, DTensor) else each
                    seen.append(local.numel() * 4)

    run = trainer(world_size, stage, max_steps=1, callbacks=[Notes()], accumulate_grad_batches=2)
    run.fit(Even(), token_data(16, 2))
    return [sum(seen)]


def test_stage_1_accumulates_whole_gradients_and_stage_2_shards() -> None:
    size = 4 * sum(each.numel() for each in Even().parameters())
    padding = 4 * 8
    whole_gradients, shards, _ = run_ranks(in_turn, 2, accumulate, STAGES)[0]
    assert whole_gradients == [size]
    assert shards == [(size + padding) // 2]


class Overflows(Callback):
    """Makes a gradient infinite on one rank, in one step."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            gradient = pl_module.head.weight.grad
            assert isinstance(gradient, DTensor)
            gradient.to_local()[0] = float("inf")


def fit_in_fp16(rank: int, world_size: int, stage: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1)
    module = Stack(optimizer="sgd")
    values = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            values.append(whole(pl_module))

    run = trainer(
        world_size, stage, max_steps=4, plugins=[plugin], gradient_clip_val=1.0,
        callbacks=[Overflows(), Notes()],
    )  # fmt: skip
    run.fit(module, token_data(32, 4))
    moved = [
        any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in itertools.pairwise(values)
    ]
    is_finite = all(bool(each.isfinite().all()) for each in values[-1].values())
    return moved, is_finite, scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for stages in run_ranks(in_turn, 2, fit_in_fp16, STAGES):
        assert stages == [([False, True, True], True, 64.0)] * 3


class ScalarFirst(Stack):
    """Its optimizer looks first, or last, at a parameter that all ranks hold whole."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__(has_scalar=True)
        self.is_first = is_first

    def configure_optimizers(self) -> Any:
        ordered = sorted(self.parameters(), key=lambda each: (each.dim() == 0) != self.is_first)
        return torch.optim.SGD(ordered, lr=0.1)


def fit_scalar_in_fp16(rank: int, world_size: int, *, is_first: bool) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1)
    module = ScalarFirst(is_first=is_first)
    callbacks = [Overflows()]
    run = trainer(world_size, 3, max_steps=4, plugins=[plugin], callbacks=callbacks)
    run.fit(module, token_data(32, 8 // world_size))
    assert "_unscale_grads_" not in vars(scaler)
    return whole(module), scaler.get_scale()


@pytest.mark.parametrize("is_first", [True, False])
def test_an_overflow_is_agreed_on_wherever_a_whole_parameter_stands(is_first: bool) -> None:
    ranks = run_ranks(partial(fit_scalar_in_fp16, is_first=is_first), 2)
    ((alone, alone_scale),) = run_ranks(partial(fit_scalar_in_fp16, is_first=is_first), 1)
    for values, scale in ranks:
        assert scale == alone_scale == 64.0
        for name, value in values.items():
            # Halves of a batch are rounded to fp16 apart from each other.
            torch.testing.assert_close(value, alone[name], rtol=2e-3, atol=2e-3)


class Unfreezes(BaseFinetuning):
    """Trains a block from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[1])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[1], optimizer, lr=0.05)


def finetune(rank: int, world_size: int, stage: int, precision: Any) -> dict[str, Tensor]:
    seed_everything(1)
    module = Stack(optimizer="sgd")
    arguments: dict[str, Any] = {
        "max_epochs": 3,
        "callbacks": [Unfreezes()],
        "precision": precision,
    }
    if stage == 0:
        run = Trainer(accelerator="cpu", devices=1, **{**QUIET, **arguments})
    else:
        run = trainer(world_size, stage, use_distributed_sampler=False, **arguments)
    run.fit(module, token_data(8, 4))
    return whole(module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_layer_that_is_unfrozen_later_is_trained(precision: str) -> None:
    reference = run_ranks(finetune, 1, 0, precision)[0]
    for stages in run_ranks(in_turn, 2, finetune, [(2, precision), (3, precision)]):
        for found in stages:
            for name, value in reference.items():
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def fit_with_different_beginnings(rank: int, world_size: int, stage: int) -> Any:
    torch.manual_seed(rank)
    module = Stack()
    module.register_buffer("told", torch.full((3,), float(rank)))
    first = {name: each.detach().clone() for name, each in module.named_parameters()}
    seen = {}

    class Notes(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.update(whole(pl_module))

    trainer(world_size, stage, max_steps=1, callbacks=[Notes()]).fit(module, token_data(8, 2))
    return first, seen, module.told.tolist()  # type: ignore[operator]


def test_every_rank_begins_with_the_first_ranks_model() -> None:
    ranks = run_ranks(fit_with_different_beginnings, 2, 3)
    beginning = ranks[0][0]
    for _, seen, told in ranks:
        assert told == [0.0, 0.0, 0.0]
        for name, value in beginning.items():
            assert torch.equal(seen[name], value)


def validate_at_every_step(rank: int, world_size: int, stage: int) -> list[float]:
    seed_everything(1)
    losses = []

    class Notes(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["val_loss"]))

    run = trainer(world_size, stage, max_steps=4, val_check_interval=1, callbacks=[Notes()])
    run.fit(Stack(optimizer="sgd"), token_data(32, 4), token_data(16, 4))
    return losses


def test_validation_between_steps_sees_the_newest_parameters() -> None:
    first, second, third = run_ranks(in_turn, 2, validate_at_every_step, STAGES)[0]
    assert first == second == third
    assert len(set(first)) == len(first) == 5


def fit_twice(rank: int, world_size: int, stage: int) -> Any:
    """Fit, validate, fit on: with one Trainer, on one module."""
    seed_everything(1)
    module = Stack()
    run = trainer(world_size, stage, max_epochs=1)
    run.fit(module, token_data(16, 4))
    first = run.validate(module, token_data(16, 4), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module, token_data(16, 4))
    second = run.validate(module, token_data(16, 4), verbose=False)
    return first[0]["val_loss"], second[0]["val_loss"], run.global_step


def test_a_module_may_be_used_again_by_its_trainer() -> None:
    for first, second, steps in run_ranks(fit_twice, 2, 3):
        assert steps == 4
        assert second < first


def fit_scalars(rank: int, world_size: int, folder: Any) -> Any:
    """Train, save in the middle of an accumulation window, load into another stage."""
    seed_everything(1)
    path = folder / "saved"
    found = []

    class Saves(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, at: int
        ) -> None:
            if at == 2:
                trainer.save_checkpoint(path)
                found.append(float(whole(module)["temperature"]))

    run = trainer(world_size, 1, max_steps=2, accumulate_grad_batches=2, callbacks=[Saves()])
    run.fit(Stack(has_scalar=True), token_data(16, 2))
    module = Stack(has_scalar=True)
    trainer(world_size, 3).validate(module, token_data(8, 2), ckpt_path=path, verbose=False)
    found.append(float(whole(module)["temperature"]))
    return found


def resume_with_scalar(rank: int, world_size: int, folder: Any) -> Any:
    """Save in the middle of a run, and go on from there in another stage."""
    found = []

    class Saves(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, at: int
        ) -> None:
            if at == 1:
                trainer.save_checkpoint(folder / "saved")

    for stage, path, callbacks in ((3, None, [Saves()]), (2, folder / "saved", [])):
        seed_everything(1)
        module = Unfused(has_scalar=True)
        run = trainer(world_size, stage, max_steps=4, callbacks=callbacks)
        run.fit(module, token_data(16, 2), ckpt_path=path)
        found.append(whole(module))
    return found


class Unfused(Stack):
    """Steps by the implementation that looks at one parameter after the other."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False, fused=False)


def test_a_run_with_a_scalar_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    for at_once, resumed in run_ranks(resume_with_scalar, 2, tmp_path):
        torch.testing.assert_close(resumed, at_once, rtol=1e-5, atol=1e-6)


def test_a_scalar_is_saved_in_the_middle_of_a_window_and_loaded(tmp_path: Any) -> None:
    for saved, loaded in run_ranks(fit_scalars, 2, tmp_path):
        assert saved == loaded != 1.5


def order_of_collectives(rank: int, world_size: int) -> list[str]:
    """Return the gathers (G) and reductions (R) of the second step."""
    seen: list[str] = []
    module = Stack(depth=4)
    run = trainer(world_size, 3, max_steps=2)

    class Listens(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, at: int) -> None:
            if at == 1:
                for kind, names in FSDP_CALLS.items():
                    name = next(each for each in names if hasattr(dist, each))
                    setattr(dist, name, named(kind, getattr(dist, name)))

    def named(kind: str, call: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            whole = max(each.numel() for each in tensors)
            seen.append(kind if whole == BLOCK_NUMEL else kind.lower())
            return call(*args, **kwargs)

        return collective

    run.callbacks.append(Listens())  # type: ignore[attr-defined]
    run.fit(module, token_data(16, 2))
    return seen


FSDP_CALLS = {
    "G": ("all_gather_single", "all_gather_into_tensor"),
    "R": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""What FSDP2 calls, in torch 2.13 and before."""

BLOCK_NUMEL = 2 * (4 + 4 + 6 * 7 + 6 + 4 * 11 + 4)
"""Elements of a gathered block of ``Stack`` on two ranks, padding included."""


def test_a_block_is_gathered_before_the_gradients_of_the_one_behind_it_are_reduced() -> None:
    # Small letters are the root's. Backward: block 3 and, ahead, block 2 are gathered before block
    # 3 is reduced, and so on down to block 0; so the links are never idle for want of a request.
    expected = "g GGGG GGR GR GR R r".replace(" ", "")
    assert "".join(run_ranks(order_of_collectives, 2)[0]) == expected


class Normalised(Stack):
    """Keeps running statistics, of which every rank sees other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(7)
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.statistics(self.embedding(tokens).flatten(0, 1)).view(*tokens.shape, -1)
        return self.head(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.statistics.running_mean is not None
        self.seen.append(self.statistics.running_mean.clone())


class Codebook(Stack):
    """Writes buffers past autograd's counter, and on each rank other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        codes, scratch = self.get_buffer("codes"), self.get_buffer("scratch")
        self.seen.append(torch.cat([codes, scratch]))
        codes.data += batch[0].sum()
        if self.global_rank == 1:
            scratch.add_(1.0)
        return super().training_step(batch, batch_idx)


def fit_codebook(rank: int, world_size: int, stage: int) -> list[Tensor]:
    module = Codebook()
    trainer(world_size, stage, max_steps=3).fit(module, token_data(16, 2))
    return module.seen


def test_buffers_are_the_first_ranks_however_they_were_written() -> None:
    first, second = run_ranks(fit_codebook, 2, 3)
    assert len(first) == 3
    assert first[-1][:3].min() > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def timeouts_of_groups(rank: int, world_size: int) -> list[float]:
    strategy = ZeROStrategy(telemetry=False, shard_size=1, timeout_s=77.0)
    found: list[float] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            axis = cast("Any", strategy.data_axis)
            mesh = axis.sharded.mesh
            for group in (mesh.shard_group, mesh.replica_group, axis._guard._group):
                options = group._get_backend(torch.device("cpu")).options
                found.append(options._timeout.total_seconds())

    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1, callbacks=[Looks()],
        **QUIET,
    )  # fmt: skip
    run.fit(Stack(), token_data(4, 2))
    return found


def test_groups_that_are_made_later_have_the_timeout_that_was_asked() -> None:
    assert run_ranks(timeouts_of_groups, 2) == [[77.0] * 3] * 2


class Alternates(LightningModule):
    """Runs one head in the first batch of a step and the other one in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.gradients: list[Tensor] = []
        self.kinds: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.heads[batch_idx % 2](batch) * self.scale).sum() * (
            self.global_rank + 1
        )
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.kinds.append(isinstance(self.scale, DTensor))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [each.grad for each in self.heads.parameters()]
        for each in grads:
            assert isinstance(each, DTensor)
            self.gradients.append(each.full_tensor())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_alternating(rank: int, world_size: int, stage: int) -> Any:
    strategy = ZeROStrategy(telemetry=False, stage=stage, shard_size=1, blocks=["heads.*"])
    module = Alternates()
    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=1,
        accumulate_grad_batches=2, **QUIET,
    )  # fmt: skip
    run.fit(module, DataLoader(cast("Any", torch.ones(4, 2)), batch_size=1))
    return module.gradients, module.kinds


def test_a_unit_that_rests_in_the_last_batch_keeps_its_gradient_in_every_copy() -> None:
    for stages in run_ranks(in_turn, 2, fit_alternating, STAGES):
        for gradients, kinds in stages:
            # 2 per element, by the mean of the ranks' factors 1 and 2, by half of the batches.
            assert [each.tolist() for each in gradients] == [[[1.5, 1.5]] * 2] * 2
            assert kinds == [True, True]  # between batches too, a scalar is no plain tensor


def fit_with_statistics(rank: int, world_size: int, stage: int) -> list[Tensor]:
    seed_everything(1)
    module = Normalised()
    run = trainer(world_size, stage, max_steps=3, val_check_interval=1, num_sanity_val_steps=0)
    run.fit(module, token_data(16, 2), token_data(4, 2))
    return module.seen


def test_ranks_evaluate_with_the_running_statistics_of_the_first() -> None:
    first, second = run_ranks(fit_with_statistics, 2, 3)
    assert len(first) == 3
    assert not torch.equal(first[0], first[1])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
