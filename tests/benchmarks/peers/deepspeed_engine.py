"""DeepSpeed's side: its engine, with the settings that were worth a try, each with its reason.

It needs ``pip install deepspeed``. Its operators are compiled at first use, with a C++ compiler,
ninja and, for disks, the headers of libaio.
"""

import importlib.util
import logging
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.benchmarks.peers.network import build_batches, build_network, loss_of
from tests.benchmarks.peers.problem import Problem
from tests.benchmarks.peers.turns import Turns

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes the C library ask for 2 MiB pages for what DeepSpeed allocates. DeepSpeed neither sets nor
mentions it; it is worth more than all of its own settings, so it is measured too."""


@dataclass(frozen=True)
class Setting:
    """A way to run DeepSpeed's offload. What is not here stays at its default."""

    why: str
    aio: str = "default"
    sub_group_blocks: int | None = None
    """Blocks of the model that are stepped as one; None is its default, 1e9 parameters."""
    is_pipelined: bool = False
    """Read the next sub-group and write the last one while one is stepped."""
    stage: int = 3


SETTINGS = {
    "nvme": {
        "default": Setting("as it comes"),
        "8 threads": Setting("its fastest I/O of single tensors", aio="8 threads"),
        "by block": Setting(
            "the only one that holds a part of the state in memory, with reads and writes under "
            "the arithmetic",
            aio="8 threads",
            sub_group_blocks=1,
            is_pipelined=True,
        ),
        "gradients in memory": Setting(
            "I/O blocks larger than any gradient keep gradients off the disk, as ours do; all of "
            "the state is in memory at once",
            aio="huge blocks",
        ),
        "gradients in memory, by block": Setting(
            "the same with a part of the state in memory",
            aio="huge blocks",
            sub_group_blocks=1,
            is_pipelined=True,
        ),
    },
    "cpu": {
        "default": Setting("as it comes"),
        "by block": Setting("flat buffers that fit caches better", sub_group_blocks=1),
        "stage 2": Setting("no gathers", stage=2),
    },
}


def is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def config_of(setting: Setting, problem: Problem) -> dict[str, Any]:
    weight = 4 * problem.width * problem.width
    block = 2 * weight + 5 * problem.width
    offload: dict[str, Any] = {"device": problem.place}
    if problem.place == "nvme":
        offload |= {
            "nvme_path": str(problem.folder),
            "pipeline_read": setting.is_pipelined,
            "pipeline_write": setting.is_pipelined,
            # Parameter, gradient and two moments; of three sub-groups where it is pipelined.
            "buffer_count": 12 if setting.is_pipelined else 4,
        }
    aio = {
        "default": {},
        "8 threads": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 8},
        # Of a power of two; tensors below it are not swapped, sub-groups are larger.
        "huge blocks": {"block_size": 1 << (4 * weight).bit_length(), "queue_depth": 32},
    }
    return {
        "train_micro_batch_size_per_gpu": problem.rows,
        "gradient_clipping": problem.max_norm,
        "bf16": {"enabled": problem.is_bf16},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": problem.lr, "weight_decay": problem.weight_decay},
        },
        "zero_optimization": {
            "stage": setting.stage,
            "sub_group_size": (setting.sub_group_blocks or 0) * block or 1_000_000_000,
            "offload_optimizer": offload,
        },
        "aio": aio[setting.aio],
    }


@dataclass(frozen=True)
class Sharded:
    """A way to run DeepSpeed's sharding without offload."""

    has_small_buffers: bool = True
    """As small as the model's blocks allow; else its own, for larger models."""
    is_summed_in_fp32: bool = False
    """Micro-batches are added up in fp32, as ours are; else in what the model computes in."""


def memory_config_of(
    stage: int, problem: Problem, accumulate: int, setting: Sharded
) -> dict[str, Any]:
    """Sharding without offload."""
    block = 8 * problem.width * problem.width
    zero: dict[str, Any] = {"stage": stage}
    if setting.has_small_buffers:
        zero |= {
            "reduce_bucket_size": block,
            "allgather_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": problem.rows,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": problem.max_norm,
        "bf16": {
            "enabled": problem.is_bf16,
            # Its engine for sums in fp32 otherwise keeps gradients of both types until the step.
            "immediate_grad_update": setting.is_summed_in_fp32,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": problem.lr, "weight_decay": problem.weight_decay},
        },
        "zero_optimization": zero,
        "data_types": {"grad_accum_dtype": "fp32" if setting.is_summed_in_fp32 else None},
    }


def train(connection: Connection, setting: Setting, problem: Problem) -> None:
    """Train in turns, see ``Turns``."""
    warnings.simplefilter("ignore")  # deprecated names of torch, several times a step
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    model = build_network(problem.width, problem.depth)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(setting, problem)
    )
    batches = build_batches(problem.width, problem.rows)
    dtype = torch.bfloat16 if problem.is_bf16 else torch.float32
    turns = Turns(connection)  # nothing to drain: its step returns when all is written
    number = 0
    while turns.begin_step():
        inputs, targets = batches[number % len(batches)]
        loss = loss_of(engine(inputs.to(dtype)), targets, scale=problem.loss_scale)
        engine.backward(loss)
        turns.end_backward()
        engine.step()
        turns.end_step(loss.item(), float(engine.get_global_grad_norm()))
        number += 1
    engine.destroy()
