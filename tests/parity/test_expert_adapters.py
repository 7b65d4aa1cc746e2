"""Adapters of peft on stacked experts: switched on and off, few rows, checkpoints of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader
from typing_extensions import override

from boltmesh.cli import run_command
from boltmesh.strategies.engine.data_axis import OwnedColumns
from tests.support import expert_runs
from tests.support.expert_models import MoeModule, tokens
from tests.support.expert_runs import loader, strategy_of, trainer, whole_of
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET

pytestmark = pytest.mark.ranks


def switch(net: Module, *, is_on: bool) -> None:
    """Switch all adapters on or off, as ``PeftModel.disable_adapter`` does."""
    each: Any
    for each in net.modules():
        if hasattr(each, "lora_A"):
            each.enable_adapters(is_on)


class Referenced(MoeModule):
    """Runs without adapters first, as DPO does for the reference."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        switch(self.net, is_on=False)
        with torch.no_grad():
            reference = super().training_step(batch, batch_idx)
        switch(self.net, is_on=True)
        return super().training_step(batch, batch_idx) - 0.5 * reference


class Switched(MoeModule):
    """Trains the head alone in some steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net.lm_head.weight.requires_grad_(True)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # One process sees the batches of both ranks with the index 0.
        is_on = bool((batch == tokens(0, len(batch) - 2)).all()) if batch.ndim else False
        switch(self.net, is_on=is_on)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def train(rank: int, world_size: int, kind: type[MoeModule], options: dict[str, Any]) -> Any:
    vars(expert_runs)["MoeModule"] = kind
    return expert_runs.train(rank, world_size, "mixtral, LoRA", **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Referenced, {"strategy": {"stage": 3}}),
        (Switched, {"strategy": {"stage": 1}, "is_starved": True, "optimizer": "adamw"}),
    ],
    ids=["reference first", "switched, starved"],
)
def test_adapters_are_switched_on_and_off(
    kind: type[MoeModule], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = run_ranks(train, 2, kind, options)
    monkeypatch.setattr(expert_runs, "MoeModule", kind)
    alone = {name: value for name, value in options.items() if name != "strategy"}
    gaps = expert_runs.differences(ranks, expert_runs.train_alone(2, "mixtral, LoRA", **alone))
    assert max(gaps.values()) < 2e-6, gaps


class Later(MoeModule):
    """Trains its head first; an optimizer has no frozen parameters."""

    def __init__(self) -> None:
        super().__init__("mixtral:no aux, LoRA")
        self.net.lm_head.weight.requires_grad_(True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(trained, lr=0.1)


class Unfreezes(BaseFinetuning):
    """Trains the adapters from the second epoch on."""

    def adapters(self, module: LightningModule) -> list[Module]:
        kinds = ("lora_A", "lora_B")
        return [each for name, each in module.named_modules() if name.endswith(kinds)]

    @override
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(self.adapters(pl_module))

    @override
    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(self.adapters(pl_module), optimizer, lr=0.2)


def finetune(rank: int, world_size: int) -> dict[str, Tensor]:
    module = Later()
    callbacks: list[Callback] = [Unfreezes()]
    if world_size > 1:
        strategy = strategy_of(telemetry=False, stage=3, expert=2)
        run = trainer(world_size, strategy, max_epochs=2, callbacks=callbacks)
        run.fit(module, loader(rank, 2))
        return whole_of(module)
    batches: Any = [tokens(number, of_rank) for number in range(2) for of_rank in range(2)]
    options: dict[str, Any] = {**QUIET, "accumulate_grad_batches": 2, "max_epochs": 2}
    run = Trainer(accelerator="cpu", callbacks=callbacks, **options)
    run.fit(module, DataLoader(batches, batch_size=None))
    return {name: each.detach() for name, each in module.named_parameters()}


def test_adapters_that_are_unfrozen_later_are_trained() -> None:
    expected = run_ranks(finetune, 1)[0]
    for found in run_ranks(finetune, 2):
        gaps = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
        assert max(gaps.values()) < 2e-6, gaps


def test_columns_are_those_of_experts_in_turns_of_any_number_of_rows() -> None:
    columns = OwnedColumns([], num_experts=4)
    rows = torch.arange(16).view(2, 8)  # two elements of each expert
    assert columns.part(rows, 1, 2).tolist() == [[2, 3, 6, 7], [10, 11, 14, 15]]
    assert columns.part(rows[:0], 1, 2).shape == (0, 4)


class OfPeft(MoeModule):
    """A Mixtral whose experts have adapters of peft."""

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__("mixtral", "adamw")
        stacks = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        config = LoraConfig(r=4, target_modules=[], target_parameters=stacks)
        self.net = get_peft_model(self.net, config)
        torch.manual_seed(1)
        for name, each in self.net.named_parameters():
            if "lora_B" in name:  # zeros so far
                torch.nn.init.normal_(each, std=0.05)


def train_adapters(
    rank: int, world_size: int, epochs: int, start: str | None, save: str | None
) -> dict[str, Tensor]:
    module = OfPeft()
    strategy = strategy_of(telemetry=False, stage=3, expert=2, save_trainable_only=True)
    run = trainer(world_size, strategy, max_epochs=epochs)
    run.fit(module, loader(0, 2), ckpt_path=start)
    if save is not None:
        run.save_checkpoint(save)
    return whole_of(module)


# torch and transformers meet so in copies that peft makes.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_experts_resume_alone_and_load_into_peft(tmp_path: Path) -> None:
    import peft

    saved, target = tmp_path / "half.ckpt", tmp_path / "adapter"
    half = run_ranks(train_adapters, 2, 1, None, str(saved))[0]
    through = run_ranks(train_adapters, 2, 2, None, None)[0]
    again = run_ranks(train_adapters, 2, 2, str(saved), None)[0]
    assert all(torch.equal(each, again[name]) for name, each in through.items())
    assert run_command(["export", str(saved), "--peft", "--to", str(target)]) == 0
    mine: Any = OfPeft().eval()
    mine.load_state_dict(half)
    bare: Any = MoeModule("mixtral").net
    loaded: Any = peft.PeftModel.from_pretrained(bare, str(target))
    batch = tokens(0, 0)
    with torch.no_grad():
        same = loaded(input_ids=batch).logits, mine.net(input_ids=batch).logits
    assert torch.equal(*same)
    assert (half["net.base_model.model.lm_head.weight"] == bare.lm_head.weight).all()
