"""Flags of SIGTERM on GPUs go over gloo, and never make the host wait for the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def batches_until_the_end(rank: int, world_size: int) -> tuple[int, bool]:
    connector = SimpleNamespace(received_sigterm=False)
    fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace())
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", rank)),
        _signal_connector=connector,
        fit_loop=fit_loop,
    )
    agreement = SigtermAgreement(trainer)
    for batch in range(6):
        if batch == 2 and rank == 1:
            agreement._has_sigterm = True  # as the handler of the signal sets it
        try:
            agreement._reduce_flags()
        except SIGTERMException:
            agreement.end()
            return batch, connector.received_sigterm
    return -1, False


def test_all_ranks_end_before_the_same_batch_one_after_the_signal() -> None:
    assert run_ranks(batches_until_the_end, 2) == [(3, True)] * 2
