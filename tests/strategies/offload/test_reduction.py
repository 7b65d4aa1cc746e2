"""Gradients are reduced to memory that is used again, and never to memory that is still used."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload import reduction
from boltmesh.strategies.offload.reduction import REUSED_BYTES, HostReduction, ReusedMemory
from boltmesh.strategies.torch_compat import DefaultReduceScatter, local_tensor, reduce_with

NUMEL = REUSED_BYTES // 4
CPU = torch.device("cpu")


def allocate(reduction: HostReduction, numel: int = NUMEL) -> Tensor:
    return reduction.allocate((numel,), dtype=torch.float32, device=CPU)


def test_memory_comes_back_with_the_last_view() -> None:
    memory = ReusedMemory()
    first = memory.take(NUMEL, torch.float32)
    address, view = first.data_ptr(), first[5:10]
    del first
    assert memory.num_free_bytes == 0
    second = memory.take(NUMEL, torch.float32)
    assert second.data_ptr() != address
    view.fill_(1.0)
    del view
    assert memory.num_free_bytes == REUSED_BYTES
    assert memory.take(NUMEL, torch.float32).data_ptr() == address


def test_no_more_is_kept_than_was_used_at_a_time_whatever_the_sizes() -> None:
    memory = ReusedMemory()
    sizes = [NUMEL + 1024 * each for each in range(8)]
    for numel in sizes * 2:  # each unit's reduction: two tensors, both gone before the next
        whole, shard = memory.take(numel, torch.float32), memory.take(numel, torch.float32)
        del whole, shard
    assert memory.num_free_bytes <= 2 * 4 * sizes[-1]


def test_what_has_lain_free_for_longest_makes_room() -> None:
    memory = ReusedMemory()
    small, large = (memory.take(count * NUMEL, torch.float32) for count in (2, 4))
    address = large.data_ptr()
    del small
    del large
    other = memory.take(3 * NUMEL // 2, torch.float32)
    assert memory.num_free_bytes == 4 * REUSED_BYTES
    assert memory.take(4 * NUMEL, torch.float32).data_ptr() == address
    del other


def test_memory_that_the_system_does_not_give_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = ReusedMemory()
    with monkeypatch.context() as patch:
        patch.setattr(reduction, "allocate_host", _give_nothing)
        with pytest.raises(OffloadError):
            memory.take(100 * NUMEL, torch.float32)
    for numel in (NUMEL, 2 * NUMEL):
        taken = memory.take(numel, torch.float32)
        del taken
    assert memory.num_free_bytes == 2 * REUSED_BYTES


def _give_nothing(num_bytes: int, *, device: torch.device) -> Tensor:
    raise OffloadError("no memory")


def test_what_is_used_when_it_is_closed_stays_readable_and_is_not_kept() -> None:
    memory = ReusedMemory()
    used, free = memory.take(NUMEL, torch.float32), memory.take(NUMEL, torch.float32)
    used.fill_(3.0)
    del free
    memory.close()
    assert memory.num_free_bytes == 0
    assert used.sum(dtype=torch.float64).item() == 3.0 * NUMEL
    del used
    assert memory.num_free_bytes == 0


def test_one_process_reduces_in_place_and_two_do_not() -> None:
    alone, shared = HostReduction(ReusedMemory(), 1), HostReduction(ReusedMemory(), 2)
    assert allocate(alone) is allocate(alone)
    assert allocate(shared) is not allocate(shared)


def test_after_a_reduction_that_failed_the_next_gets_other_memory() -> None:
    reducing = HostReduction(ReusedMemory(), 1)
    failed = allocate(reducing)
    reducing.finish()
    following = allocate(reducing)
    assert following.data_ptr() != failed.data_ptr()
    assert allocate(reducing) is following


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(*, is_reused: bool) -> tuple[list[Tensor], int]:
    """Of a step of two micro-batches, the second added to the first, and of a step after it."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, NUMEL // 1024)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    memory = ReusedMemory()

    def build(num_ranks: int):
        reduction = HostReduction(memory, num_ranks)
        return reduction, reduction.finish

    restore = reduce_with(layer, build) if is_reused else lambda: None  # type: ignore[arg-type]
    found = []
    for ends_step in (False, True, True):
        layer(torch.randn(2, 1024)).square().mean().backward()
        found += [local_tensor(each.grad).clone() for each in layer.parameters()]  # type: ignore[arg-type]
        if ends_step:
            layer.zero_grad()
    num_free = memory.num_free_bytes
    restore()
    return found, num_free


def test_gradients_are_those_of_fsdp2_to_the_bit(group) -> None:
    right, _ = gradients(is_reused=False)
    found, num_free = gradients(is_reused=True)
    assert num_free > 0
    for mine, theirs in zip(found, right, strict=True):
        assert torch.equal(mine, theirs)


def test_a_comm_that_somebody_has_set_stays(group) -> None:
    class Own(DefaultReduceScatter):
        pass

    layer = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    layer.set_custom_reduce_scatter(Own())
    reduce_with(layer, lambda _: pytest.fail("replaced"))()
