"""On the host gathers overlap, and no tensor lies in memory that is still used."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from boltmesh.errors import OffloadError
from boltmesh.strategies.data_parallel import cpu_collectives
from boltmesh.strategies.data_parallel.cpu_collectives import (
    REUSED_BYTES,
    BufferPool,
    CpuAllGather,
    CpuCollectives,
    CpuReduceScatter,
)
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.torch_compat import job_store
from tests.support.ranks import run_ranks

NUMEL = REUSED_BYTES // 4
CPU = torch.device("cpu")


def allocate(reduction: CpuReduceScatter, numel: int = NUMEL) -> Tensor:
    return reduction.allocate((numel,), dtype=torch.float32, device=CPU)


def test_memory_comes_back_with_the_last_view() -> None:
    memory = BufferPool()
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
    memory = BufferPool()
    sizes = [NUMEL + 1024 * each for each in range(8)]
    for numel in sizes * 2:  # each unit's reduction: two tensors, both gone before the next
        whole, shard = memory.take(numel, torch.float32), memory.take(numel, torch.float32)
        del whole, shard
    assert memory.num_free_bytes <= 2 * 4 * sizes[-1]


def test_what_has_lain_free_for_longest_makes_room() -> None:
    memory = BufferPool()
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
    memory = BufferPool()
    with monkeypatch.context() as patch:
        patch.setattr(cpu_collectives, "allocate_host", _give_nothing)
        with pytest.raises(OffloadError):
            memory.take(100 * NUMEL, torch.float32)
    for numel in (NUMEL, 2 * NUMEL):
        taken = memory.take(numel, torch.float32)
        del taken
    assert memory.num_free_bytes == 2 * REUSED_BYTES


def _give_nothing(num_bytes: int, *, device: torch.device) -> Tensor:
    raise OffloadError("no memory")


def test_what_is_given_back_is_taken_anew_and_what_is_used_stays_readable() -> None:
    memory = BufferPool()
    used, free = memory.take(NUMEL, torch.float32), memory.take(NUMEL, torch.float32)
    used.fill_(3.0)
    del free
    memory.give_back()
    assert memory.num_free_bytes == 0
    assert used.sum(dtype=torch.float64).item() == 3.0 * NUMEL
    del used
    assert memory.num_free_bytes == REUSED_BYTES
    others = [memory.take(2 * NUMEL, torch.float32) for _ in range(2)]
    del others
    assert memory.num_free_bytes == 4 * REUSED_BYTES


def test_one_process_reduces_in_place_and_two_do_not() -> None:
    for memory in (None, BufferPool()):
        alone, shared = (CpuReduceScatter(memory, size) for size in (1, 2))
        assert allocate(alone) is allocate(alone)
        assert allocate(shared) is not allocate(shared)


def test_after_a_reduction_that_failed_the_next_gets_other_memory() -> None:
    reducing = CpuReduceScatter(BufferPool(), 1)
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


def has_free_memory(collectives: CpuCollectives) -> bool:
    """Whether memory has come back, of which gloo's threads let go after the result is there."""
    deadline = time.monotonic() + 300
    while collectives.num_free_bytes == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    return collectives.num_free_bytes > 0


def gradients(*, is_reused: bool) -> list[Tensor]:
    """Of a step of two micro-batches, the second added to the first, and of a step after it."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, NUMEL // 1024)
    mesh = init_device_mesh("cpu", (1,))
    unit = fully_shard(
        layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    )
    collectives = CpuCollectives([unit] if is_reused else [], takes_gradients_away=True)
    found = []
    for ends_step in (False, True, True):
        layer(torch.randn(2, 1024)).square().mean().backward()
        found += [local_tensor(each.grad).clone() for each in layer.parameters()]  # type: ignore[arg-type]
        if ends_step:
            layer.zero_grad()
    if is_reused:
        assert has_free_memory(collectives)
    return found


def test_gradients_are_those_of_fsdp2_to_the_bit(group) -> None:
    right = gradients(is_reused=False)
    found = gradients(is_reused=True)
    for mine, theirs in zip(found, right, strict=True):
        assert torch.equal(mine, theirs)


def gather_one_by_one(rank: int, world_size: int) -> list[float]:
    """The second rank takes part only when the first one's call has returned."""
    world, store = dist.group.WORLD, job_store("gather_one_by_one")
    assert world is not None
    assert store is not None
    comm = CpuAllGather()
    output = comm.allocate((NUMEL * world_size,), dtype=torch.float32, device=CPU)
    part = output[rank * NUMEL : (rank + 1) * NUMEL].fill_(rank + 1.0)
    if rank > 0:
        store.wait(["posted"])
    work = comm(output, part, world)
    store.set("posted", "")
    work.wait()
    return output.view(world_size, -1).mean(1).tolist()


@pytest.mark.full
@pytest.mark.ranks
def test_a_gather_is_waited_for_only_where_it_is_used() -> None:
    assert run_ranks(gather_one_by_one, 2) == [[1.0, 2.0], [1.0, 2.0]]


def train(rank: int, world_size: int, is_ours: bool, leave_at_once: bool) -> list[Tensor]:
    """Return losses and last shards of a model that frees its blocks."""
    cpu_collectives.REUSED_BYTES = 1 << 20  # of a block here
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = torch.nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (world_size,))
    units = [fully_shard(each, mesh=mesh) for each in (*blocks, model)]
    collectives = CpuCollectives(units if is_ours else [], takes_gradients_away=leave_at_once)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(4):
        batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    if is_ours and leave_at_once:
        assert has_free_memory(collectives)
    else:
        assert collectives.num_free_bytes == 0
    return [*found, *(local_tensor(each).detach().clone() for each in model.parameters())]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("leave_at_once", [False, True])
def test_a_model_trains_as_with_torchs_own_collectives_to_the_bit(leave_at_once: bool) -> None:
    right = run_ranks(train, 2, False, leave_at_once)
    for mine, theirs in zip(run_ranks(train, 2, True, leave_at_once), right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
