"""Without clipping a disk's buckets are stepped, and gradients gone, within the backward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload import step_in_backward, stores
from boltmesh.strategies.offload.stores import OffloadPlan
from boltmesh.strategies.torch_compat.tensors import local_tensor
from tests.support.offloaded import WIDTH, Net, Twin, full
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


def on_ranks(check: Callable[[Path], object], folder: Path, ranks: int = 1) -> list[Any]:
    return run_ranks(_call, ranks, check, folder)


def _call(rank: int, world_size: int, check: Callable[[Path], object], folder: Path) -> object:
    return check(folder)


def on_disk(folder: Path, **options: Any) -> Twin:
    stores.SMALL_NUMEL = 0
    return Twin(OffloadPlan({"disk": 1.0}, "nvme", folder), never_clips=True, **options)


def held_bytes(twin: Twin) -> int:
    held = twin.engine.stored()["gradients"]
    return sum(each.nbytes for each in held if isinstance(each, Tensor))


def _plain(folder: Path) -> None:
    twin = on_disk(folder)
    for steps in range(1, 5):
        twin.backward()
        assert held_bytes(twin) == 0
        assert twin.engine.counts == {"plain": steps * 4}  # all units, before ``step``
        twin.step()
    assert twin.engine.counts == {"plain": 4 * 4}
    assert twin.difference() == 0


@pytest.mark.sample("2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_equal_fused_adamw_to_the_bit_and_keep_no_gradient(
    ranks: int, tmp_path: Path
) -> None:
    on_ranks(_plain, tmp_path, ranks)


def _called_twice(folder: Path) -> None:
    twin = on_disk(folder)
    for _ in range(3):
        twin.backward((1, 2, 1))
        block = twin.units["blocks.1"]
        assert held_bytes(twin) == sum(
            4 * local_tensor(each).numel() for each in block.parameters()
        )
        twin.step()
    assert twin.difference() < 2e-6


@pytest.mark.full
def test_a_unit_that_runs_twice_waits_for_both_gradients(tmp_path: Path) -> None:
    on_ranks(_called_twice, tmp_path)


def _evaluated(folder: Path) -> None:
    twin = on_disk(folder)
    for _ in range(3):
        twin.ours.blocks.eval()  # the root that a Trainer runs stays as it is
        with torch.no_grad():
            twin.ours(torch.ones(2, WIDTH))
        twin.ours.blocks.train()
        twin.backward()
        assert held_bytes(twin) == 0
        twin.step()
    assert twin.difference() == 0


@pytest.mark.full
def test_an_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    on_ranks(_evaluated, tmp_path)


def _unused(folder: Path) -> None:
    twin = on_disk(folder)
    for uses in ((1, 0, 1), (1, 1, 1), (1, 0, 1)):
        twin.backward(uses)
        twin.step()
    assert twin.difference() == 0


@pytest.mark.full
def test_a_unit_without_gradients_is_not_stepped(tmp_path: Path) -> None:
    on_ranks(_unused, tmp_path)


def _checkpointed(folder: Path) -> None:
    twin = on_disk(folder)
    for model in (twin.ours, twin.reference):
        first, second = model.blocks[0], model.blocks[1]

        def forward(
            x: Tensor, uses: object, net: Net = model, a: Any = first, b: Any = second
        ) -> Tensor:
            def pair(y: Tensor) -> Tensor:
                return b(a(y))

            return net.head(checkpoint(pair, x, use_reentrant=False))

        model.forward = forward  # type: ignore[assignment]
    for _ in range(3):
        twin.backward()
        assert held_bytes(twin) == 0
        twin.step()
    assert twin.difference() == 0


@pytest.mark.full
def test_units_that_are_computed_again_in_the_backward_pass_are_stepped_early(
    tmp_path: Path,
) -> None:
    on_ranks(_checkpointed, tmp_path)


def _norm(folder: Path) -> None:
    twin = on_disk(folder)
    twin.backward()
    expected = full(torch.nn.utils.clip_grad_norm_(list(twin.reference.parameters()), 1e9))
    norm = twin.engine.gradient_norm(twin.optimizer)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    twin.step()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norm_of_gradients_that_are_gone_is_known(ranks: int, tmp_path: Path) -> None:
    on_ranks(_norm, tmp_path, ranks)


def _not_finite(folder: Path) -> None:
    twin = on_disk(folder)
    twin.backward(scale=float("inf"))
    twin.step()
    for mine, theirs in zip(twin.ours.parameters(), twin.reference.parameters(), strict=True):
        ours, reference = (local_tensor(each).clone() for each in (mine, theirs))
        assert torch.equal(torch.isnan(ours), torch.isnan(reference))


@pytest.mark.full
def test_gradients_that_are_not_finite_do_what_they_do_in_torch(tmp_path: Path) -> None:
    on_ranks(_not_finite, tmp_path)


def _little_room(folder: Path) -> None:
    step_in_backward.WAITING_BYTES = 1
    twin = on_disk(folder)
    twin.train(3)
    assert twin.difference() == 0


@pytest.mark.full
def test_the_backward_pass_waits_where_gradients_may_not(tmp_path: Path) -> None:
    on_ranks(_little_room, tmp_path)


def _second_backward(twin: Twin) -> None:
    twin.backward()


def _zero_grad(twin: Twin) -> None:
    twin.optimizer.zero_grad()


def _clip(twin: Twin) -> None:
    twin.engine.clip(twin.optimizer, 1.0)


def _read(twin: Twin) -> None:
    local_tensor(next(twin.ours.parameters())).clone()


def _save(twin: Twin) -> None:
    twin.engine.synchronize()


def _new_rate(twin: Twin) -> None:
    twin.optimizer.param_groups[0]["lr"] *= 0.5
    twin.optimizer.step()


def _interrupted(folder: Path, meddle: Callable[[Twin], None]) -> None:
    twin = on_disk(folder)
    twin.train(1)
    twin.backward()
    meddle(twin)


@pytest.mark.sample("_save-is to be read")
@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (_second_backward, "is gathered again"),
        (_zero_grad, "its gradients are dropped"),
        (_clip, "its gradients are clipped"),
        (_read, "is read or written"),
        (_save, "is to be read"),
        (_new_rate, "settings for .* were changed"),
    ],
)
def test_what_needs_the_state_before_the_step_is_refused(
    meddle: Callable[[Twin], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match=f"{message}(.|\n)*Define on_after_backward"):
        run_ranks(_call_interrupted, 1, tmp_path, meddle)


def _call_interrupted(
    rank: int, world_size: int, folder: Path, meddle: Callable[[Twin], None]
) -> None:
    _interrupted(folder, meddle)


def _ended(folder: Path) -> None:
    twin = on_disk(folder)
    twin.train(1)
    twin.backward()
    twin.engine.close()
    with pytest.raises(OffloadError, match="The last step was not finished"):
        local_tensor(next(twin.ours.parameters())).clone()


@pytest.mark.full
def test_what_is_half_stepped_when_a_run_ends_is_not_given_out(tmp_path: Path) -> None:
    on_ranks(_ended, tmp_path)


def _in_memory(folder: Path) -> None:
    twin = Twin(never_clips=True)
    twin.backward()
    assert held_bytes(twin) == sum(4 * local_tensor(p).numel() for p in twin.ours.parameters())
    twin.step()
    assert twin.difference() == 0


@pytest.mark.full
def test_state_in_memory_is_stepped_with_gradients_that_are_kept(tmp_path: Path) -> None:
    on_ranks(_in_memory, tmp_path)
