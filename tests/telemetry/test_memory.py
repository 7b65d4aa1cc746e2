"""Memory by kind: what is measured is what is there, and what is predicted comes true."""

import lightning.pytorch as lightning
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.telemetry import layout
from boltmesh.telemetry.snapshot import MEMORY_KINDS, MEMORY_PLACES, MemoryKind
from boltmesh.telemetry.writer import memory
from boltmesh.telemetry.writer.memory import MemoryWalk, measure
from boltmesh.telemetry.writer.recorder import Recorder
from tests.support.ranks import run_ranks
from tests.telemetry.test_callback import loader, look, trainer
from tests.telemetry.test_reader import make_job, make_rank, snapshot
from tests.telemetry.test_recorder import CPU, make_info, run_step


class Model(lightning.LightningModule):
    """Has a shared weight, a frozen one, a buffer, and an optimizer of choice."""

    def __init__(self, optimizer):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 32).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return self.norm(self.second(self.first(batch[0]))).square().mean()

    def configure_optimizers(self):
        cls, arguments = self.optimizer
        return cls(self.parameters(), lr=0.01, **arguments)


def memory_worker(rank, world_size, optimizer):
    fit = trainer(max_epochs=1, limit_val_batches=0)
    fit.fit(Model(optimizer), loader())
    return look().ranks[rank].memory_kinds


TRAINED = 4 * (16 + 4 + 4 + 4)
"""A shared weight, one bias, and the scale and shift of the norm; five parameters with the other
bias, four of them trained."""

OPTIMIZERS = {
    "sgd": ((torch.optim.SGD, {}), 0),
    "momentum": ((torch.optim.SGD, {"momentum": 0.9}), TRAINED),
    "adam": ((torch.optim.Adam, {}), 2 * TRAINED + 4 * 4),
    "adamw": ((torch.optim.AdamW, {"amsgrad": True}), 3 * TRAINED + 4 * 4),
    "fused": ((torch.optim.AdamW, {"fused": True}), 2 * TRAINED + 4 * 4),
}


@pytest.mark.sample("adamw")
@pytest.mark.ranks
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fit_measures_to_the_byte_what_its_strategy_predicts(name):
    optimizer, state = OPTIMIZERS[name]
    for kinds in run_ranks(memory_worker, 2, optimizer):
        found = {each.kind: (each.measured_bytes, each.predicted_bytes) for each in kinds}
        assert {each.place for each in kinds} == {"host"}
        whole = TRAINED + 4 * (4 * 32 + 32)
        assert found["parameters"] == (whole, whole)
        assert found["gradients"] == (TRAINED, TRAINED)
        assert found["optimizer"] == (state, state)
        assert found["buffers"] == (4 * (4 + 4) + 8,) * 2
        measured, predicted = found["other"]
        assert measured > 10**7
        assert predicted is None


def test_an_optimizer_that_nobody_knows_is_not_predicted():
    module = nn.Linear(2, 2)
    kinds = expected_held_memory(module, [torch.optim.LBFGS(module.parameters())])
    assert {each.kind for each in kinds} == {"parameters", "gradients"}

    class Odd(torch.optim.Adam):
        """May keep anything."""

    kinds = expected_held_memory(module, [Odd(module.parameters())])
    assert "optimizer" not in {each.kind for each in kinds}


def test_a_storage_counts_once_and_under_the_first_kind_that_has_it():
    whole = torch.zeros(100)
    found = measure(
        {
            "parameters": [whole[:10], whole[50:], torch.zeros(3, device="meta")],
            "gradients": [whole, torch.zeros(5, dtype=torch.float64)],
            "optimizer": [],
        },
        "host",
    )
    assert found == {
        ("parameters", "host"): 400,
        ("gradients", "host"): 40,
        ("optimizer", "host"): 0,
    }


def sharded_worker(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(64, 6, bias=False)  # six rows on four ranks: 2, 2, 2 and none
    fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return measure(
        {
            "parameters": list(module.parameters()),
            "gradients": [each.grad for each in module.parameters() if each.grad is not None],
            "optimizer": [each for state in optimizer.state.values() for each in state.values()],
        },
        "host",
    )


@pytest.mark.ranks
def test_of_a_sharded_parameter_only_the_local_part_counts():
    found = run_ranks(sharded_worker, 4)
    part = 2 * 64 * 4
    # torch pads the storage of each shard to the size of the largest.
    assert [each["parameters", "host"] for each in found] == [part] * 4
    assert [each["gradients", "host"] for each in found][:3] == [part] * 3
    assert found[0]["optimizer", "host"] == 2 * part + 4


def test_of_a_quantized_parameter_its_tensors_count():
    weight = nn.Parameter(TwoTensor(torch.zeros(6), torch.zeros(6)), requires_grad=False)
    assert measure({"parameters": [weight, weight]}, "host") == {("parameters", "host"): 48}
    module = nn.Module()
    module.weight = weight
    (found, *_) = expected_held_memory(module, [])
    assert found == MemoryKind("parameters", "host", None, 48)


def test_activations_and_cache_are_what_the_allocator_has_beyond_the_known_kinds():
    file = make_rank(make_job())
    values = dict.fromkeys([(kind, place) for kind in MEMORY_KINDS for place in MEMORY_PLACES], -1)
    values["parameters", "device"] = 100
    values["optimizer", "disk"] = 700
    values["optimizer", "host"] = 30
    file.memory(list(values.values()))
    file.status(1, 0, 0, 0, 1, 1, 1.0, 1000, 150, 400, 350)
    predicted = [
        {"kind": "parameters", "place": "device", "predicted_bytes": 90},
        {"kind": "gradients", "place": "device", "predicted_bytes": 90},
        {"kind": "nonsense", "place": "device", "predicted_bytes": 90},
        {"kind": "buffers", "place": "host", "predicted_bytes": -5},
        {"kind": [], "place": {}, "predicted_bytes": "many"},
    ]
    file.write_facts({"expected_memory": predicted})
    assert snapshot().ranks[0].memory_kinds == (
        MemoryKind("parameters", "device", 100, 90),
        MemoryKind("gradients", "device", None, 90),
        MemoryKind("optimizer", "host", 30, None),
        MemoryKind("optimizer", "disk", 700, None),
        MemoryKind("activations", "device", 250, None),
        MemoryKind("cache", "device", 250, None),
        MemoryKind("other", "host", 970, None),
    )
    file.close()


def test_a_walk_waits_five_seconds_and_a_thousand_times_its_own_duration(monkeypatch):
    clock = iter([0, 20_000_000, 10**12, 10**12 + 1000])
    monkeypatch.setattr("boltmesh.telemetry.writer.memory.time.monotonic_ns", lambda: next(clock))
    walk = MemoryWalk(dict, "host")
    assert walk.is_due(0)
    assert walk.walk() == [layout.UNKNOWN] * (len(MEMORY_KINDS) * len(MEMORY_PLACES))
    assert not walk.is_due(20_019_000_000)
    assert walk.is_due(20_021_000_000)
    walk.walk()
    assert not walk.is_due(10**12 + 4_999_000_000)
    assert walk.is_due(10**12 + 5_001_000_000)


def test_tensors_that_cannot_be_walked_are_one_warning_and_no_end_of_telemetry(monkeypatch):
    monkeypatch.setattr(memory, "MEMORY_EVERY_NS", 0)
    recorder = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})

    def broken():
        raise RuntimeError("no storage")

    recorder.watch_memory(broken)
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(3):
        run_step(recorder, number)
    assert recorder.is_on
    recorder.close()
    lines = [each.message for each in snapshot().events if each.kind == "warning"]
    assert lines == ["memory by kind is not measured: RuntimeError: no storage"]


def test_the_model_is_not_walked_before_its_first_update(monkeypatch):
    monkeypatch.setattr(memory, "MEMORY_EVERY_NS", 0)
    recorder = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    walks: list[int] = []

    def tensors():
        walks.append(len(walks))
        return {}

    recorder.watch_memory(tensors)
    recorder.begin_loop(epoch=0, global_step=7)
    recorder.begin_batch(index=0, epoch=0)
    recorder.end_batch(global_step=7, loss=None, samples=1, tokens=None)
    assert walks == []
    recorder.begin_batch(index=1, epoch=0)
    recorder.end_batch(global_step=8, loss=None, samples=1, tokens=None)
    assert len(walks) == 1
    recorder.close()
