"""What a rank has of a model is not taken for the model, and one process gets all of it."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from boltmesh.errors import CheckpointError
from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline.stage.units import is_absent
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.forked_python import run_python
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks


def quiet(strategy: Any, devices: int, **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **arguments,
    )  # fmt: skip


def refusals(rank: int, world_size: int, folder: str) -> Any:
    """Train, save, and try to get at the parts that this rank has."""
    seed_everything(1, verbose=False)
    module = Stack(depth=4, ties=True)
    strategy = PipelineParallelStrategy(telemetry=False, microbatches=4, split=["blocks.2"])
    trainer = quiet(strategy, world_size, max_steps=2, precision="64-true")
    trainer.fit(module, token_data(16, 8))
    for path, weights_only in (("whole", False), ("weights", True)):
        trainer.save_checkpoint(f"{folder}/{path}", weights_only=weights_only)
    said = []
    for attempt in (
        module.state_dict,
        copy.deepcopy(module).state_dict,
        module.blocks.state_dict,
        lambda: torch.save(module, io.BytesIO()),
    ):
        with pytest.raises(CheckpointError) as refused:
            attempt()
        said.append(str(refused.value))
    module.blocks[3 * rank].state_dict()  # which this rank holds
    named = dict(module.named_parameters())
    held = {name: each.detach().clone() for name, each in named.items() if strategy.holds(name)}
    absent = {name for name, each in named.items() if is_absent(each)}
    return said, held, absent


def one_file(rank: int, world_size: int, source: str, target: str) -> None:
    """Make a plain file of a directory."""
    module = Stack(depth=4, ties=True).double()
    trainer = quiet(DDPStrategy(telemetry=False), 1, limit_val_batches=1)
    trainer.validate(module, token_data(16, 8), ckpt_path=source, verbose=False)
    trainer.save_checkpoint(target, weights_only=True)


@pytest.mark.full
@pytest.mark.parametrize("saved", ["whole", "weights"])
def test_parts_are_refused_and_one_process_loads_the_whole(tmp_path: Path, saved: str) -> None:
    ranks = run_ranks(refusals, 2, str(tmp_path))
    for said, held, absent in ranks:
        assert all("Trainer.save_checkpoint" in each for each in said)
        assert said[0].startswith("state_dict() of Stack would hold NaN for")
        assert said[3].startswith("A pickle of this module would hold NaN for")
        assert absent
        assert not absent & held.keys()
    merged: dict[str, Tensor] = {name: each for _, held, _ in ranks for name, each in held.items()}
    assert len(merged) == len(ranks[0][1]) + len(ranks[1][1]) - 1  # the tied weight
    target = tmp_path / "plain.ckpt"
    run_ranks(one_file, 1, str(tmp_path / saved), str(target))
    plain = Stack.load_from_checkpoint(target)
    for name, each in plain.named_parameters():
        assert torch.equal(each.double(), merged[name].to(each.dtype).double()), name
    assert plain.head.weight is plain.embedding.weight


SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Trainer, seed_everything
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.stateful import Stateful, vector_data

seed_everything(1)
module = Stateful()
before = {
    name: each.clone() for name, each in module.state_dict().items() if torch.is_tensor(each)
}
strategy = PipelineParallelStrategy(telemetry=False, microbatches=2, start_method="fork")
trainer = Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, vector_data(16, 8))
for name, each in module.state_dict().items():
    if torch.is_tensor(each):
        assert bool(each.isfinite().all()), name
        # No bias before a batch norm has a gradient.
        assert "bias" in name or not torch.equal(each, before[name]), name
assert [each.calls for each in module.blocks] == [4] * 4
print("whole")
"""


@pytest.mark.slow
def test_forked_ranks_give_the_whole_model_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_python(str(script))
    assert done.stdout.strip().endswith("whole"), done.stderr
