"""Errors of CUDA devices say what to change, and ranks keep to the cores near their GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from boltmesh.errors import ConfigError
from boltmesh.strategies import DDPStrategy, Parallel3DStrategy, PipelineParallelStrategy
from boltmesh.strategies.topology import devices
from boltmesh.strategies.topology.devices import (
    CoreBinding,
    cores_of,
    explain_cuda,
    near_cores,
    refuse_devices,
)

CUDA = [torch.device("cuda", index) for index in range(4)]


@pytest.mark.parametrize(
    ("devices", "count", "environment", "message"),
    [
        (CUDA[:3], 2, {}, r"cuda:2 does not exist: torch sees 2 CUDA devices\. Use devices=2"),
        (CUDA[:1], 0, {}, r"torch sees no CUDA device\. Use accelerator='cpu'"),
        (
            CUDA[:2],
            1,
            {"CUDA_VISIBLE_DEVICES": "GPU-8f3c"},
            r"torch sees one CUDA device \(CUDA_VISIBLE_DEVICES=GPU-8f3c\)\. Use devices=1",
        ),
        (
            CUDA[:2],
            1,
            {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"},
            r"a process uses one slice of a GPU \(MIG\) at most",
        ),
        ([CUDA[1], CUDA[1]], 2, {}, r"2 ranks of this host were given cuda:1.*devices=1"),
    ],
)
def test_devices_that_cannot_be_used_are_named(devices, count, environment, message):
    with pytest.raises(ConfigError, match=message):
        refuse_devices(devices, lambda: count, environment)


def test_devices_that_can_be_used_are_not_refused():
    refuse_devices(CUDA[:2], lambda: 2, {})
    refuse_devices(
        [CUDA[0]] * 4, lambda: 1, {"NCCL_HOSTID": "3"}
    )  # several ranks on one on purpose
    refuse_devices([torch.device("cpu")] * 2, lambda: 0, {})


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            "NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000",
            "two ranks of this host use the same GPU",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 11040).",
            "driver is too old for this torch",
        ),
        (
            "CUDA error: invalid device ordinal",
            r"a GPU that CUDA does not offer \(CUDA_VISIBLE_DEVICES=GPU-1\)",
        ),
        ("No CUDA GPUs are available", r"finds no GPU \(CUDA_VISIBLE_DEVICES=GPU-1\)"),
    ],
)
def test_errors_of_cudas_start_say_what_to_change(raised: str, message: str) -> None:
    explained = explain_cuda(RuntimeError(raised), {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    with pytest.raises(ConfigError, match=message):
        raise explained or AssertionError
    assert "\n" not in str(explained)


def test_other_errors_stay_as_they_are() -> None:
    assert explain_cuda(RuntimeError("Connection refused"), {}) is None


def test_near_cores_are_those_that_the_kernel_lists(tmp_path: Path) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x18, pci_device_id=0)
    assert near_cores(properties, tmp_path) == frozenset(), "not known"
    folder = tmp_path / "0000:18:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-2,8,10-11\n")
    assert near_cores(properties, tmp_path) == {0, 1, 2, 8, 10, 11}
    assert cores_of("\n") == frozenset()


class Cores:
    """Stands for the kernel: 8 cores, two threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, bound: set[int]) -> None:
        self.of_thread: dict[int, set[int]] = {}
        for thread in (11, 12):
            (folder / str(thread)).mkdir()
        monkeypatch.setattr(devices, "_TASKS", folder)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: bound, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self.of_thread.__setitem__, raising=False)


def test_all_threads_are_bound_to_the_cores_near_the_device(tmp_path, monkeypatch):
    cores = Cores(monkeypatch, tmp_path, set(range(8)))
    binding = CoreBinding()
    assert binding.num_cores() == 8
    assert binding.bind(frozenset({4, 5, 6, 7}))
    assert cores.of_thread == {11: {4, 5, 6, 7}, 12: {4, 5, 6, 7}}
    assert binding.num_cores() == 8, "which ranks share, each bound to a part"


@pytest.mark.parametrize(
    ("bound", "near"),
    [({0, 1}, {0, 1, 2, 3}), (set(range(8)), set()), (set(range(8)), set(range(8)))],
    ids=["chosen by the caller", "not known", "all equally near"],
)
def test_cores_stay_as_they_are_where_there_is_nothing_to_choose(
    tmp_path, monkeypatch, bound, near
):
    cores = Cores(monkeypatch, tmp_path, bound)
    assert not CoreBinding().bind(frozenset(near))
    assert not cores.of_thread


@pytest.mark.parametrize(
    ("strategy", "is_eager"), [(DDPStrategy, False), (PipelineParallelStrategy, True)]
)
def test_a_pipeline_loads_all_kernels_before_a_receive_keeps_the_gpu_busy(
    strategy, is_eager, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("CUDA_MODULE_LOADING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    strategy(parallel_devices=CUDA[:1])._prepare_cuda()
    assert os.environ.get("CUDA_MODULE_LOADING") == ("EAGER" if is_eager else None)
    assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0, "for the explanation of hangs"


@pytest.mark.parametrize(("tensor", "order"), [(1, None), (2, "1")])
def test_communicators_of_several_axes_start_in_the_order_of_calls(tensor, order, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    strategy = Parallel3DStrategy(tensor=tensor, parallel_devices=CUDA)
    strategy.cluster_environment = LightningEnvironment()
    strategy._prepare_cuda()
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == order


def test_a_flight_recorder_that_the_user_has_set_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    DDPStrategy(parallel_devices=CUDA[:1])._prepare_cuda()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
