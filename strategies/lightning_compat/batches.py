"""Loaders, what they give, and what steps are called with."""

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.data_connector import (
    _get_distributed_sampler,
    _request_dataloader,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader


def rank_loader(
    loader: DataLoader[Any], rank: int, num_replicas: int, stage: RunningStage
) -> DataLoader[Any]:
    """The loader that the Trainer would make of ``loader`` for one rank of a data axis."""
    sampler = _get_distributed_sampler(
        loader,
        shuffle=stage == RunningStage.TRAINING,
        overfit_batches=0,
        mode=stage,
        num_replicas=num_replicas,
        rank=rank,
    )
    return _update_dataloader(loader, sampler, mode=stage)


def requested_loader(trainer: Trainer) -> Any:
    """What the user's hook gives for the loop that is about to run; a new one, as a rule."""
    if trainer.state.fn == TrainerFn.FITTING:
        return _request_dataloader(trainer.fit_loop._data_source)
    assert trainer.state.fn is not None
    loop: Any = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]
    loaders = _request_dataloader(loop._data_source)
    # Evaluations run one loader after the other.
    return loaders[0] if isinstance(loaders, list | tuple) else loaders


def transferred_to_host(trainer: Trainer, batch: Any) -> Any:
    """A batch after the module's hooks around its transfer, on the CPU."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, 0)
    return module._apply_batch_transfer_handler(batch, torch.device("cpu"), 0)


def step_arguments(module: LightningModule, step: str) -> tuple[int, ...]:
    """What the loops call a step with behind its batch, for the first batch of the first loader.

    The index of the batch and that of the loader are given where the step has them.
    """
    method = getattr(module, step)
    if not is_param_in_hook_signature(method, "batch_idx", min_args=2):
        return ()
    has_loader = is_param_in_hook_signature(method, "dataloader_idx", explicit=True)
    return (0, 0) if has_loader and step != "training_step" else (0,)


def draws_from_iterator(module: LightningModule, step: str) -> bool:
    """Whether a step takes an iterator over batches instead of a batch."""
    return is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)


def seed_workers(loader: object, rank: int) -> None:
    """Seed a loader's workers as the Trainer is about to, by another rank than the global one."""
    is_asked = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if is_asked and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
