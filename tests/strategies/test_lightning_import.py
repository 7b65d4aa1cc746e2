"""``pytorch_lightning`` and ``lightning.pytorch`` are one package for a program with boltmesh."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

FIT = """
import sys, warnings
{imports}
import torch

assert pl.LightningModule is boltmesh.strategies.engine.strategy.LightningModule
assert not boltmesh.strategies.blocks.has_forward(pl.LightningModule())

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

rows = torch.arange(32.0).view(8, 4) / 32
trainer = Trainer(
    strategy={strategy}, accelerator="cpu", devices={devices}, max_steps=2, logger=False,
    use_distributed_sampler=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
)
trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=2))
if trainer.is_global_zero:
    with open(sys.argv[1] + "/weights", "wb") as file:
        torch.save(torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
                   ["state_dict"]["layer.weight"], file)
"""

ORDERS = {
    "theirs first, by name": (
        """import pytorch_lightning as pl
from pytorch_lightning import Trainer
import boltmesh.strategies.engine.strategy""",
        "'bolt_ddp'",
    ),
    "ours first, modules of the one and Trainer of the other": (
        """import boltmesh.strategies.engine.strategy
from lightning.pytorch import Trainer
import pytorch_lightning as pl""",
        "boltmesh.DDPStrategy()",
    ),
}


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    if code:
        command[3:3] = ["-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.ranks
@pytest.mark.sample("theirs first, by name-1")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_both_imports_train_as_one_process(order: str, devices: int, tmp_path: Path) -> None:
    imports, strategy = ORDERS[order]
    script = tmp_path / "script.py"
    script.write_text(FIT.format(imports=imports, strategy=strategy, devices=devices))
    done = run("", script, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]

    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    for batch in (torch.arange(32.0).view(8, 4) / 32).split(2)[:2]:
        (gradient, bias) = torch.autograd.grad(
            layer(batch).square().mean(), [layer.weight, layer.bias]
        )
        layer.weight.data -= 0.1 * gradient
        layer.bias.data -= 0.1 * bias
    found = torch.load(tmp_path / "weights", weights_only=True)
    torch.testing.assert_close(found, layer.weight.data)


@pytest.mark.full
def test_both_loaded_before_is_refused_with_the_way_out() -> None:
    done = run(
        "import lightning.pytorch, pytorch_lightning, warnings\n"
        "warnings.simplefilter('always')\n"
        "import boltmesh\n"
        "lightning.pytorch.Trainer(strategy='bolt_ddp', accelerator='cpu', logger=False)\n"
        "pytorch_lightning.Trainer(strategy='bolt_ddp', accelerator='cpu', logger=False)\n"
    )
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("boltmesh.errors.ConfigError: strategy='bolt_ddp' was asked of the ")
    assert last.count("Write `import boltmesh` before the first import of either") == 1
    assert any("work with the Trainer of lightning.pytorch alone" in line for line in before)


@pytest.mark.full
def test_modules_have_one_identity_and_keep_their_own_specs() -> None:
    done = run(
        "import boltmesh, importlib.util\n"
        "import pytorch_lightning.callbacks, lightning.pytorch.callbacks, lightning_fabric\n"
        "import lightning.fabric.plugins\n"
        "assert lightning.pytorch.callbacks is pytorch_lightning.callbacks\n"
        "assert lightning.fabric.plugins is lightning_fabric.plugins\n"
        "assert pytorch_lightning.callbacks.__spec__.name == 'pytorch_lightning.callbacks'\n"
        "assert importlib.util.find_spec('lightning.pytorch.nothing') is None\n"
    )
    assert done.returncode == 0, done.stderr[-3000:]
