"""Callbacks that read and write whole parameters do in every layout what they do in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import trace_layout, trace_one_process
from boltmesh.strategies import DDPStrategy, ZeROStrategy, gathered_parameters
from tests.support.cases import CLIP, Case
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDE = {"width": 101, "hidden": 103, "depth": 2}
HOST = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
DISK = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_path": "here"}
STRATEGIES: dict[str, Any] = {
    "ddp": None,
    "stage 1": {"stage": 1},
    "stage 2, offloaded optimizer": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3": {},
    "stage 3 on the host, tiled": {**HOST, "tile_linear_bytes": 4096},
    "stage 3 on a disk": DISK,
}


class Access(Callback):
    """Looks at weights after each step, and halves some after the second."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.has_written = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        with gathered_parameters(pl_module) as whole:
            assert pl_module.head.weight is whole["head.weight"]
            self.seen.append({name: each.detach().clone() for name, each in whole.items()})
        if trainer.global_step == 2 and not self.has_written:
            self.has_written = True
            names = ["head.weight", "blocks.0.*"]
            with gathered_parameters(pl_module, names, writes=True) as whole:
                for each in whole.values():
                    # The first rank's values count.
                    each.data.mul_(0.5 + (dist.get_rank() if dist.is_initialized() else 0))


def traced(rank: int, world_size: int, kind: str | None, folder: str) -> Any:
    access = Access()
    case = Case("access", model=WIDE, trainer=CLIP, steps=4)
    problem = replace(case.problem(), validation=None, prediction=None)
    problem.trainer["callbacks"] = [access]
    if kind is None:
        trace = trace_one_process(problem, data_size=2)
        # Two batches a step here: what the second one leaves is what a step leaves.
        return trace, access.seen[1::2]
    options = dict(STRATEGIES[kind] or {}, telemetry=False)
    if "offload_path" in options:
        options["offload_path"] = folder
    strategy = DDPStrategy(telemetry=False) if kind == "ddp" else ZeROStrategy(**options)
    return trace_layout(problem, strategy, devices=2), access.seen


@pytest.fixture(scope="module")
def reference() -> tuple[Trace, list[dict[str, Tensor]]]:
    result: tuple[Trace, list[dict[str, Tensor]]] = run_ranks(traced, 1, None, "")[0]
    return result


@pytest.mark.sample("stage 3")
@pytest.mark.parametrize("kind", STRATEGIES)
def test_what_callbacks_see_and_write_is_what_they_would_in_one_process(
    kind: str, reference: tuple[Trace, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    expected, values = reference
    assert len(values) == 4
    for trace, seen in run_ranks(traced, 2, kind, str(tmp_path)):
        assert [str(each) for each in find_differences(expected, trace)] == []
        assert len(seen) == len(values)
        for ours, theirs in zip(seen, values, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4, msg=name)
