"""What a Trainer clips is clipped wherever gradients are kept, also where it clips by hand."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning

from boltmesh.strategies import ZeROStrategy
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET, whole_parameters
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks

LIMIT = 0.05
HOST = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}


class ByHand(Stack):
    """Clips under manual optimisation, where it has Lightning's wrapper of its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if isinstance(self.trainer.strategy, ZeROStrategy):
            self.norms.append(self.trainer.strategy.gradient_norm(optimizer))
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), float("inf"))
            self.norms.append(norm.item())
        self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[1])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[1], optimizer, lr=1.0)


class Finetuned(Stack):
    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(trained, lr=1.0)


def fit(rank: int, world_size: int, kind: type[LightningModule], options: Any) -> Any:
    seed_everything(1)
    module = kind()
    arguments: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
    if kind is Finetuned:
        arguments |= {"callbacks": [Unfreezes()], "gradient_clip_val": LIMIT}
    strategy: Any = "auto" if options is None else ZeROStrategy(telemetry=False, **options)
    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, **{**QUIET, **arguments}
    )
    run.fit(module, token_data(8, 4))
    return whole_parameters(module), getattr(module, "norms", None)


@pytest.mark.full
@pytest.mark.parametrize("kind", [ByHand, Finetuned])
def test_every_gradient_counts_and_is_clipped(kind: type[LightningModule]) -> None:
    """Of parameters that are unfrozen, too, in the step that is their first."""
    ((wanted, norms),) = run_ranks(fit, 1, kind, None)
    for runs in run_ranks(in_turn, 2, fit, [(kind, {}), (kind, HOST)]):
        for parameters, found in runs:
            torch.testing.assert_close(parameters, wanted, rtol=1e-5, atol=1e-6)
            assert found == (None if norms is None else pytest.approx(norms, rel=1e-5))
            assert norms is None or min(norms) > LIMIT
