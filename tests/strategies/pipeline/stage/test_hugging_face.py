"""Unmodified Hugging Face models run in stages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from tests.support.expert_models import MoeModule, tokens
from tests.support.hugging_face import HuggingFace, batches
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
