"""A dry run for a GPU, on the CPU, has the types of the run."""

import warnings

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision

from boltmesh.strategies import PipelineParallelStrategy

BATCH, WEIGHT = torch.ones(2, 3), torch.ones(3, 4)


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (MixedPrecision("bf16-mixed", "cuda"), torch.bfloat16),
        (Precision(), torch.float32),
    ],
    ids=["bf16-mixed", "32-true"],
)
def test_autocast_of_a_gpu_casts_on_the_cpu_too(plugin: Precision, dtype: torch.dtype) -> None:
    strategy = PipelineParallelStrategy(
        stages=1, parallel_devices=[torch.device("cuda", 0)], telemetry=False
    )
    strategy.precision_plugin = plugin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of autocast for a GPU that is not there
        with strategy.host_step_context("training_step")():
            assert (BATCH @ WEIGHT).dtype == dtype
        with strategy.step_context("training_step")():
            assert (BATCH @ WEIGHT).dtype == torch.float32
