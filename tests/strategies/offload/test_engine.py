"""The engine computes what torch computes on the device, whatever it guesses meanwhile."""

import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LinearLR

from boltmesh.errors import ConfigError, OffloadError
from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.engine import OffloadEngine
from boltmesh.strategies.offload.gradient_handler import WARMUP_STEPS
from boltmesh.strategies.offload.shard_tensor import OffloadedShard
from boltmesh.strategies.offload.stores import OffloadPlan
from boltmesh.strategies.torch_compat.tensors import local_tensor
from tests.support import offloaded
from tests.support.offloaded import Twin, full, sharded_net
from tests.support.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

CLOSE = 2e-6
"""Of corrected and of scaled steps; parameters move by 1e-2 a step."""


def on_ranks(check: Callable[[], object], ranks: int = 1) -> list[Any]:
    return run_ranks(_call, ranks, check)


def _call(rank: int, world_size: int, check: Callable[[], object]) -> object:
    return check()


def _steps_without_clipping() -> Counter[str]:
    twin = Twin()
    twin.train(WARMUP_STEPS + 6)
    assert twin.difference() == 0
    return twin.engine.counts


@pytest.mark.sample("2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_equal_fused_adamw_to_the_bit_where_nothing_is_clipped(ranks: int) -> None:
    for counts in on_ranks(_steps_without_clipping, ranks):
        assert counts["plain"] >= WARMUP_STEPS
        assert counts["committed"] + counts["plain"] == (WARMUP_STEPS + 6) * 4
        assert counts["corrected"] == counts["undone"] == 0


def _guesses() -> Counter[str]:
    twin = Twin()
    twin.train(WARMUP_STEPS)
    twin.drains = True
    twin.train(4, max_norm=1e3)
    assert twin.difference() == 0
    return twin.engine.counts


@pytest.mark.full
def test_buckets_are_stepped_while_the_backward_pass_goes_on() -> None:
    (counts,) = on_ranks(_guesses)
    assert counts == {"plain": WARMUP_STEPS * 4, "committed": 4 * 4}


def _wrong_guess() -> tuple[Counter[str], float]:
    twin = Twin()
    twin.train(WARMUP_STEPS + 1, max_norm=1e3)
    twin.drains = True
    twin.backward()
    assert twin.clip(1e-2)  # far below the limit that the guess relied on
    twin.step()
    return twin.engine.counts, twin.difference()


def test_a_guess_that_was_wrong_is_corrected() -> None:
    for counts, difference in on_ranks(_wrong_guess, 2):
        assert counts["corrected"] == 4
        assert difference < CLOSE


def _use_only(twin: Twin, layer: str) -> None:
    for model in (twin.ours, twin.reference):
        used = getattr(model.blocks[0], layer)
        model.blocks[0].forward = lambda x, used=used: x + used(torch.tanh(x))


def _wrong_guess_of_a_first_step() -> tuple[Counter[str], float]:
    twin = Twin()
    _use_only(twin, "up")
    twin.train(WARMUP_STEPS + 1, max_norm=1e3)
    twin.drains = True
    _use_only(twin, "down")  # as many gradients as before
    twin.backward()
    assert twin.clip(1e-3)
    twin.step()
    return twin.engine.counts, twin.difference()


def test_first_steps_of_a_parameter_are_not_guessed_late_in_a_run() -> None:
    ((counts, difference),) = on_ranks(_wrong_guess_of_a_first_step)
    assert counts["corrected"] == 3
    assert difference < CLOSE


def _always_clipped() -> tuple[Counter[str], float]:
    twin = Twin()
    assert twin.train(WARMUP_STEPS + 4, max_norm=1e-2) == WARMUP_STEPS + 4
    return twin.engine.counts, twin.difference()


@pytest.mark.full
def test_nothing_is_guessed_while_every_step_is_clipped() -> None:
    ((counts, difference),) = on_ranks(_always_clipped)
    assert counts == {"plain": (WARMUP_STEPS + 4) * 4}
    assert difference < CLOSE


def _exposed() -> None:
    twin = Twin(exposes_gradients=True)
    for _ in range(3):
        twin.backward()
        for reference, ours in zip(
            twin.reference.parameters(), twin.ours.parameters(), strict=True
        ):
            assert reference.grad is not None
            assert ours.grad is not None
            torch.testing.assert_close(local_tensor(ours.grad), local_tensor(reference.grad))
            with torch.no_grad():  # what a user's hook might do
                local_tensor(reference.grad).mul_(0.5)
                local_tensor(ours.grad).mul_(0.5)
        twin.clip(1e-2)
        twin.step()
    assert twin.difference() < CLOSE


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_exposed_gradients_are_where_torch_has_them_and_what_is_done_to_them_counts(
    ranks: int,
) -> None:
    on_ranks(_exposed, ranks)


def _second_backward() -> Counter[str]:
    twin = Twin()
    twin.train(WARMUP_STEPS)
    twin.drains = True
    for _ in range(3):
        twin.backward((1, 2, 1))
        twin.backward()  # gathers parameters, and adds gradients, that a guess has used
        twin.step()
    assert twin.difference() < CLOSE
    return twin.engine.counts


@pytest.mark.full
def test_a_gradient_that_comes_after_the_guess_counts() -> None:
    for counts in on_ranks(_second_backward, 2):
        assert counts["undone"] == 4  # and nothing is guessed of these buckets any more


def _unused_block() -> None:
    twin = Twin()
    uses = [(1, 1, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
    for step in range(WARMUP_STEPS + 4):
        twin.backward(uses[step % len(uses)])
        twin.step()
    assert twin.difference() == 0
    steps = {float(state["step"]) for state in twin.optimizer.state.values()}
    assert len(steps) > 1  # each parameter counts its own


@pytest.mark.full
def test_a_parameter_without_gradient_neither_decays_nor_counts() -> None:
    on_ranks(_unused_block, 2)


def _accumulation() -> None:
    twin = Twin()
    for step in range(WARMUP_STEPS + 2):
        for micro in range(3):
            if micro < 2:
                with twin.engine.no_sync():
                    twin.backward((1, 1, 1) if micro else (1, 1, 0), scale=1 / 3)
            else:
                # What only an earlier micro-batch used is not forgotten.
                twin.backward((1, step % 2, 1), scale=1 / 3)
        twin.step()
    assert twin.difference() == 0


def test_accumulated_gradients_are_all_of_them() -> None:
    on_ranks(_accumulation, 2)


def _schedule_and_groups() -> None:
    def grouped(kind: Any, **options: Any) -> Callable[[Any], Any]:
        def make(parameters: Any) -> Any:
            matrices = [p for p in parameters if p.dim() > 1]
            vectors = [p for p in parameters if p.dim() <= 1]
            return kind(
                [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.03}],
                0.01,
                **options,
            )

        return make

    twin = Twin(make=grouped(AdamW), make_reference=grouped(AdamW, fused=True))
    schedules = [
        LinearLR(optimizer, 0.1, total_iters=8)
        for optimizer in (twin.optimizer, twin.reference_optimizer)
    ]
    for _ in range(WARMUP_STEPS + 3):
        twin.backward()
        twin.step()
        for schedule in schedules:
            schedule.step()
    assert twin.difference() == 0


@pytest.mark.full
def test_groups_and_schedules_are_read_at_each_step() -> None:
    on_ranks(_schedule_and_groups)


def _late_learning_rate() -> Counter[str]:
    twin = Twin()
    twin.train(WARMUP_STEPS)
    twin.drains = True
    twin.backward()
    for optimizer in (twin.optimizer, twin.reference_optimizer):
        optimizer.param_groups[0]["lr"] = 0.001  # after the guess
    twin.step()
    assert twin.difference() < CLOSE
    return twin.engine.counts


@pytest.mark.full
def test_a_learning_rate_that_changes_after_the_guess_is_the_one_that_counts() -> None:
    (counts,) = on_ranks(_late_learning_rate)
    assert counts["undone"] == 4


def _discarded() -> None:
    twin = Twin()
    twin.train(WARMUP_STEPS)
    twin.drains = True
    twin.backward()
    for optimizer in (twin.optimizer, twin.reference_optimizer):
        optimizer.zero_grad()  # and no step
    assert twin.difference() < CLOSE
    twin.train(2)
    assert twin.difference() < CLOSE


@pytest.mark.full
def test_gradients_that_are_thrown_away_leave_no_step() -> None:
    on_ranks(_discarded)


def _reading_between() -> None:
    twin = Twin()
    twin.train(WARMUP_STEPS)
    before = [full(each).detach().clone() for each in twin.ours.parameters()]
    twin.drains = True
    twin.backward()
    for was, parameter in zip(before, twin.ours.parameters(), strict=True):
        torch.testing.assert_close(full(parameter).detach(), was, rtol=1e-4, atol=1e-6)
    twin.step()
    assert twin.difference() < CLOSE


@pytest.mark.full
def test_whoever_reads_between_gradient_and_step_sees_the_parameters_before_it() -> None:
    on_ranks(_reading_between)


def _state_travels() -> None:
    twin = Twin()
    twin.train(4)
    saved = twin.optimizer.state_dict()
    copied = {
        number: {k: full(v).clone() for k, v in state.items()}
        for number, state in saved["state"].items()
    }
    expected = twin.reference_optimizer.state_dict()
    twin.train(3)
    # Back to the state of step 4, on top of the parameters of step 7, in both.
    loaded = {
        number: {k: v.clone() for k, v in state.items()}
        for number, state in expected["state"].items()
    }
    for number, state in loaded.items():
        for name in ("exp_avg", "exp_avg_sq"):
            whole = copied[number][name]
            shard = state[name]
            rows = local_tensor(shard).shape[0]
            first = torch.distributed.get_rank() * -(-whole.shape[0] // shard.device_mesh.size())
            local_tensor(shard).copy_(whole[first : first + rows])
        state["step"] = copied[number]["step"]
    for optimizer in (twin.optimizer, twin.reference_optimizer):
        optimizer.load_state_dict({**saved, "state": copy.deepcopy(loaded)})
        for group in optimizer.param_groups:
            group["fused"] = optimizer is twin.reference_optimizer
    twin.train(3)
    assert twin.difference() == 0
    assert all(
        isinstance(local_tensor(state["exp_avg"]), OffloadedShard)
        for state in twin.optimizer.state.values()
    )


@pytest.mark.full
def test_state_that_is_loaded_is_taken_over() -> None:
    on_ranks(_state_travels, 2)


def _later_group(plan: OffloadPlan) -> None:
    stores.SMALL_NUMEL = 0

    def make(**options: Any) -> Callable[[Any], AdamW]:
        def made(parameters: Any) -> AdamW:
            for parameter in parameters[:4]:
                parameter.requires_grad_(False)
            return AdamW(parameters[4:], 0.01, **options)

        return made

    twin = Twin(plan, make=make(), make_reference=make(fused=True))
    twin.train(2)
    for model, optimizer in (
        (twin.ours, twin.optimizer),
        (twin.reference, twin.reference_optimizer),
    ):
        parameters = list(model.parameters())[:4]
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": parameters, "lr": 0.002})
    twin.train(3)
    assert twin.difference() == 0
    assert all(
        place is not None for place in map(twin.engine.kept.place.get, twin.ours.parameters())
    )


@pytest.mark.full
@pytest.mark.parametrize("parameters", [None, "cpu"])
def test_parameters_that_are_thawed_later_are_stepped(parameters: str | None) -> None:
    run_ranks(_with_plan, 2, _later_group, OffloadPlan({"host": 1.0}, parameters))


def _with_plan(
    rank: int, world_size: int, check: Callable[[OffloadPlan], object], plan: OffloadPlan
) -> object:
    return check(plan)


def _restored() -> None:
    twin = Twin()
    twin.train(2)
    twin.engine.restore()
    for parameter in twin.ours.parameters():
        assert not isinstance(local_tensor(parameter), OffloadedShard)
    # The optimizer is torch's again, and so are the shards.
    twin.optimizer.state.clear()
    twin.reference_optimizer.state.clear()
    twin.optimizer.param_groups[0]["fused"] = True
    twin.train(2)
    assert twin.difference() == 0


@pytest.mark.full
def test_restoring_gives_everything_back() -> None:
    on_ranks(_restored, 2)


def _after_closing() -> None:
    twin = Twin()
    twin.train(2)
    twin.engine.close()
    assert twin.difference() == 0
    x = torch.randn(4, 64)
    assert torch.equal(twin.ours(x), twin.reference(x))


@pytest.mark.full
def test_what_a_run_has_left_can_be_read_and_evaluated() -> None:
    on_ranks(_after_closing, 2)


def _step_and_wait(twin: Twin) -> None:
    twin.step()
    twin.engine.synchronize()


def _failed_step() -> None:
    twin = Twin()
    twin.train(2)
    twin.engine.synchronize()

    def fail(*_: object) -> None:
        raise OffloadError("a disk that is full")

    twin.engine.kept.copies.update = fail  # type: ignore[assignment]
    twin.backward()
    with pytest.raises(OffloadError, match="full"):
        _step_and_wait(twin)
    with pytest.raises(OffloadError, match="full"):
        twin.engine.close()
    parameter = next(iter(twin.ours.parameters()))
    for shard in (parameter, twin.optimizer.state[parameter]["exp_avg"]):
        with pytest.raises(OffloadError, match="full"):
            local_tensor(shard).read()  # type: ignore[attr-defined]
    with pytest.raises(OffloadError, match="full"):
        twin.ours(torch.randn(4, 64))


@pytest.mark.full
def test_what_a_failed_step_has_left_cannot_be_read_nor_saved() -> None:
    on_ranks(_failed_step)


def _deterministic() -> Counter[str]:
    torch.use_deterministic_algorithms(True)
    twin = Twin()
    twin.drains = True
    twin.train(WARMUP_STEPS + 4)
    assert twin.difference() == 0
    return twin.engine.counts


@pytest.mark.full
def test_nothing_is_guessed_where_steps_have_to_repeat_to_the_bit() -> None:
    (counts,) = on_ranks(_deterministic)
    assert counts == {"plain": (WARMUP_STEPS + 4) * 4}


def _copied_shards(max_norm: float | None) -> Counter[str]:
    offloaded.init_device_mesh = lambda kind, shape: init_device_mesh(  # type: ignore[assignment,misc,attr-defined]
        kind, (*shape, 1), mesh_dim_names=("copies", "shards")
    )
    twin = Twin()
    twin.drains = True
    twin.train(WARMUP_STEPS + 4, max_norm)
    return twin.engine.counts


def _clipped_copies() -> Counter[str]:
    return _copied_shards(1e3)


def _unclipped_copies() -> Counter[str]:
    return _copied_shards(None)


@pytest.mark.full
def test_copies_of_shards_are_not_guessed() -> None:
    for train in (_clipped_copies, _unclipped_copies):
        for counts in on_ranks(train, 2):
            assert counts == {"plain": (WARMUP_STEPS + 4) * 4}


def _foreign_parameter() -> None:
    net, units = sharded_net()
    engine = OffloadEngine(OffloadPlan({"host": 1.0}), device=torch.device("cpu"))
    engine.attach(net, units)
    other = torch.nn.Parameter(torch.zeros(3, 5))
    engine.adopt([Adam([*net.parameters(), other])], exposes_gradients=False)


def test_a_parameter_that_would_never_be_stepped_is_refused() -> None:
    with pytest.raises(
        RankFailure, match=r"Adam updates 1 parameters, of the shapes \(3, 5\), .*head\.weight"
    ):
        on_ranks(_foreign_parameter)


def _exposed_and_kept() -> None:
    twin = Twin(exposes_gradients=True)
    update = twin.engine.kept.copies.update

    def update_slowly(*arguments: Any) -> None:
        time.sleep(0.02)  # the buckets behind this one are still to read their gradients
        update(*arguments)

    twin.engine.kept.copies.update = update_slowly  # type: ignore[assignment]
    for _ in range(3):
        twin.backward()
        for optimizer in (twin.reference_optimizer, twin.optimizer):
            optimizer.step()
        for model in (twin.reference, twin.ours):
            for parameter in model.parameters():
                assert parameter.grad is not None
                local_tensor(parameter.grad).zero_()  # no zero_grad is there to wait
        for unit in twin.units.values():
            unit.reshard()
    assert twin.difference() < CLOSE


@pytest.mark.full
def test_exposed_gradients_may_be_written_to_once_the_step_returns() -> None:
    on_ranks(_exposed_and_kept)


def _half_precision() -> None:
    net, units = sharded_net()
    net.double()
    engine = OffloadEngine(OffloadPlan({"host": 1.0}), device=torch.device("cpu"))
    engine.attach(net, units)
    engine.adopt([Adam(net.parameters())], exposes_gradients=False)


def test_parameters_of_another_type_are_refused_with_what_to_write_instead() -> None:
    with pytest.raises(
        RankFailure, match=r"is float64, and offloaded state is kept in fp32.*32-true"
    ):
        on_ranks(_half_precision)
    assert issubclass(ConfigError, ValueError)


def _momentum() -> None:
    def make(parameters: Any) -> SGD:
        return SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01)

    twin = Twin(make=make, make_reference=make)
    twin.train(5, max_norm=0.3)
    twin.engine.synchronize()
    assert twin.difference() < CLOSE


@pytest.mark.full
def test_another_optimizer_runs_through_its_own_code() -> None:
    on_ranks(_momentum, 2)
