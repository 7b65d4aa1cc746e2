"""DeepSpeed's Muon, in the processes and on the data of ours. It needs ``pip install deepspeed``.

Its settings are those of ``torch.optim.Muon``: the first form of the iteration (``standard``) in
bf16, momentum 0.95, decay 0.1; AdamW for what is no matrix of a block. Its kernels are compiled in
the first step.
"""

import logging
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tests.benchmarks.peers.stepping import Clocks, read_clocks
from tests.benchmarks.peers.transformer import Transformer, cross_entropy

RATE = 1e-3


def config_of(stage: int, rows: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {
            "type": "Muon",
            "params": {
                "muon_lr": RATE, "adam_lr": RATE, "momentum": 0.95, "ns_method": "standard",
                "weight_decay": 0.1, "torch_adam": True, "betas": (0.9, 0.999), "eps": 1e-8,
            },
        },
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "gradient_clipping": 0.0,  # it clips to 1 by default, after orthogonalization
    }  # fmt: skip


def train(
    net: Transformer, batches: Iterable[list[Tensor]], *, stage: int, rows: int
) -> tuple[list[Clocks], list[float]]:
    """Return when each step began, and the losses."""
    warnings.simplefilter("ignore")  # deprecated names of torch, several times a step
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    # It steps every matrix by Muon whose name does not say that it is an embedding or a head.
    net.lm_head = net.head
    vars(net)["head"] = net._modules.pop("head")
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=list(net.parameters()), config=config_of(stage, rows)
    )
    groups = engine.optimizer.optimizer.param_groups
    for group in (each for each in groups if not each["use_muon"]):
        group["weight_decay"] = 0.01  # as torch.optim.AdamW
    starts, losses = [], []
    for (tokens,) in batches:
        starts.append(read_clocks())
        loss = cross_entropy(engine(tokens[:, :-1]), tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return starts, losses
