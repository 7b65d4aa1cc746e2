"""PipeDream-2BW computes what one process computes that applies each gradient one step late."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

STEPS = 9
CLIP = 0.3


class Trained(Stack):
    """Keeps the loss of each step, and the norm of the gradients that it is to apply."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []
        self.norms: list[float] = []

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if self.trainer.world_size > 1:
            self.norms.append(strategy.gradient_norm(optimizer))


def data() -> Any:
    """9 batches, the last of which has fewer rows than a batch has microbatches."""
    return token_data(8 * (STEPS - 1) + 3, 8)


def late(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train in a loop of a few lines, without Lightning."""
    seed_everything(1, verbose=False)
    module = Trained(depth=4, **options)
    made = module.configure_optimizers()
    optimizer, scheduler = (made[0][0], made[1][0]["scheduler"]) if options.get("groups") else (made, None)
    pending: dict[Parameter, Tensor] = {}
    for batch in data():
        parameters = list(module.parameters())
        loss = module.loss(batch)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter in parameters:
            parameter.grad = pending.get(parameter)
        found = [each.grad for each in parameters if each.grad is not None]
        module.losses.append(loss.item())
        module.norms.append(float(torch.nn.utils.get_total_norm(found)) if found else 0.0)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        pending = dict(zip(parameters, gradients, strict=True))
    return told(module, lambda _: True)


def told(module: Trained, holds: Any) -> dict[str, Any]:
    named = module.named_parameters()
    return {
        "losses": module.losses,
        "norms": module.norms,
        "parameters": {name: each.detach().clone() for name, each in named if holds(name)},
    }


def staged(
    rank: int, world_size: int, options: dict[str, Any], trainer: dict[str, Any]
) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    module = Trained(depth=4, **options)
    strategy = pipeline(schedule="pipedream_2bw")
    fitted = quiet_trainer(world_size, strategy, gradient_clip_val=CLIP, **trainer)
    fitted.fit(module, data(), token_data(11, 4) if "val_check_interval" in trainer else None)
    return told(module, strategy.holds)


@pytest.mark.parametrize(
    ("ranks", "options", "trainer"),
    [
        (2, {"optimizer": "sgd"}, {}),
        (4, {"groups": True, "ties": True}, {}),
        (2, {"groups": True, "ties": True}, {"val_check_interval": 2}),
    ],
    ids=["SGD", "AdamW, a learning rate that changes, tied weights", "drained every other step"],
)
def test_each_gradient_is_applied_one_step_late(
    ranks: int, options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    wanted = run_ranks(late, 1, options)[0]
    found = run_ranks(staged, ranks, options, trainer)
    assert wanted["norms"][0] == 0.0
    assert min(wanted["norms"][1:]) > CLIP
    assert wanted["losses"][-1] < 0.95 * wanted["losses"][0]
    names = set()
    for each in found:
        assert each["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert each["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        names |= each["parameters"].keys()
        for name, parameter in each["parameters"].items():
            torch.testing.assert_close(
                parameter, wanted["parameters"][name], rtol=1e-4, atol=1e-6, msg=name
            )
    assert names == wanted["parameters"].keys()
