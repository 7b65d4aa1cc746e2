"""Unmodified Hugging Face models run in stages."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from tests.support.expert_models import MoeModule, tokens
from tests.support.hugging_face import HuggingFace, batches
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.staged import check_parity

pytest.importorskip("transformers")

KINDS = ["llama", "gpt2_tied", "gpt2", "bert", "t5", "vit"]


@pytest.mark.sample("llama")
@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_what_the_whole_step_gives(kind: str) -> None:
    torch.manual_seed(0)
    check_parity(HuggingFace(kind), batches(kind), stages=4)


@pytest.mark.sample("llama-True")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_activation_checkpointing(kind: str, is_reentrant: bool) -> None:
    torch.manual_seed(0)
    module = HuggingFace(kind)
    module.net.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    check_parity(module, batches(kind)[:1], stages=4)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_blocks_that_run_again(kind: Any) -> None:
    for name in ("llama", "t5"):
        torch.manual_seed(0)
        module = HuggingFace(name)
        recomputation = ActivationCheckpointing(kind)
        recomputation.put_on(module)
        assert len(recomputation.blocks) >= 4
        check_parity(module, batches(name)[:1], stages=4)


class Attentive(MoeModule):
    """Its loss takes part of what layers record beside the logits of their routers."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        net: Any = self.net
        made = net(input_ids=batch, labels=batch, output_attentions=True)
        loss: Tensor = made.loss
        for each in made.attentions:
            loss = loss + each.square().mean()
        return loss


def test_what_layers_of_transformers_record_for_the_loss_reaches_it() -> None:
    module = Attentive("mixtral")
    net: Any = module.net
    net.set_attn_implementation("eager")
    check_parity(module, [tokens(0, 0), tokens(1, 1)], stages=2)


class Recorded(LightningModule):
    """Logs how many values hooks record, and trains on them all."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            attn_implementation="eager",
        )
        self.net = LlamaForCausalLM(config)
        self.seen: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        made = self.net(batch, labels=batch, output_attentions=True, output_hidden_states=True)
        recorded = (*made.attentions, *made.hidden_states)
        self.log("count", float(len(recorded)))
        loss: Tensor = made.loss + sum(each.square().mean() for each in recorded)
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["train"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_recorded(rank: int, world_size: int, options: dict[str, Any] | None) -> Tensor:
    rows = torch.cat([tokens(number, 0) for number in range(3)])
    module = Recorded()
    loader: Any = DataLoader(rows, 4)  # type: ignore[arg-type]
    strategy: Any = "auto" if options is None else pipeline(**options)
    trainer = quiet_trainer(world_size, strategy, max_epochs=2)
    trainer.fit(module, loader, loader)
    metrics = trainer.callback_metrics
    return torch.tensor([*module.seen, *(float(metrics[key]) for key in ("val", "count"))])


@pytest.mark.ranks
def test_hooks_of_transformers_record_once_with_several_stages_on_a_rank() -> None:
    (wanted,) = run_ranks(train_recorded, 1, None)
    options = {"schedule": "interleaved_1f1b", "microbatches": 2, "stages_per_rank": 2}
    for got in run_ranks(train_recorded, 2, options):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
