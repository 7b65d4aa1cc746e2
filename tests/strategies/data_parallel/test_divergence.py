"""Ranks that run different layers end with an error that names both, in every way they can part."""

import gc
import itertools
import os
import re
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from boltmesh.errors import DivergenceError
from boltmesh.strategies.data_parallel import order_check
from boltmesh.strategies.data_parallel.order_check import OrderCheck
from tests.support.ranks import RankFailure
from tests.support.ranks import run_ranks as run_ranks_within

pytestmark = [pytest.mark.ranks]

run_ranks = partial(run_ranks_within, grace_s=60.0)
"""With time for a machine that does much else: each rank has to come to what it says."""

PATIENCE_S = 0.4
TIMEOUT_S = 3
"""After which gloo tears out who waits in a gather; long after that is explained."""

WIDTH = 6


class Net(nn.Module):
    """Layers of one size, so that nothing but the guard tells their collectives apart."""

    def __init__(self, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, plan):
        for number in plan:
            x = x + torch.tanh(self.layers[number](x))
        return self.head(x).sum()


class Branches(nn.Module):
    """One unit with several parameters, of which a call uses some."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, which):
        return getattr(self, which)(x)


class Job:
    """A guarded model, sharded by layer."""

    def __init__(self, *, stage=3, prefetches=False, model=None, timeout_s=TIMEOUT_S, **guard):
        torch.manual_seed(0)
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        self.net = Net() if model is None else model
        self.units = units = {}
        for name, unit in self.net.named_modules():
            if name.startswith("layers.") or isinstance(unit, Branches):
                units[name] = fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
        units[""] = fully_shard(
            self.net, mesh=mesh, reshard_after_forward=None if stage == 3 else False
        )
        if prefetches:
            layers = list(self.net.layers)
            for this, following in itertools.pairwise(layers):
                this.set_modules_to_forward_prefetch([following])
        self.guard = OrderCheck(
            dist.new_group(),
            patience_s=PATIENCE_S,
            is_synchronized=lambda: self.is_synchronized,
            **guard,
        )
        self.guard.attach(units, self.net)
        self.guard.start()
        self.is_synchronized = False
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self, *args):
        self.net(torch.ones(2, WIDTH), *args).sum().backward()
        self.optimizer.step()
        self.guard.end_step()
        self.optimizer.zero_grad()

    def evaluate(self, *args):
        with torch.no_grad():
            self.net(torch.ones(2, WIDTH), *args)

    def error_of(self, run):
        """Return what a rank says in the end, as the strategy would have it."""
        try:
            run()
        except RuntimeError as error:
            self.guard.explain(error)
            self.guard.stop()
            return f"{type(error).__name__}: {error}"
        self.guard.stop()
        return None


def parting_worker(rank, world_size, num_steps_before, plans, stage, prefetches):
    if world_size > 2:  # on a busy machine answers do not come together
        vars(order_check)["_GATHER_ANSWERS_S"] = 3.0
    job = Job(stage=stage, prefetches=prefetches)

    def run():
        for _ in range(num_steps_before):
            job.step((0, 1, 2))
        job.step(plans[rank])

    return job.error_of(run)


CASES = {
    "other order": (
        (0, 1, 2),
        (0, 2, 1),
        "rank 1 called all_gather of 'layers.2'",
        "rank 0 called all_gather of 'layers.1'",
    ),
    "skipped": (
        (0, 1, 2),
        (0, 2),
        "rank 1 called all_gather of 'layers.2'",
        "rank 0 called all_gather of 'layers.1'",
    ),
    "last skipped": ((0, 1, 2), (0, 1), "rank 1", "rank 0 called all_gather of 'layers.2'"),
    "once more": (
        (0, 1, 2),
        (0, 1, 1, 2),
        "rank 1 called all_gather of 'layers.1'",
        "rank 0 called all_gather of 'layers.2'",
    ),
}


@pytest.mark.sample("skipped")
@pytest.mark.parametrize("case", CASES)
def test_in_the_first_step_every_rank_names_both(case):
    mine, other, *words = CASES[case]
    for said in run_ranks(parting_worker, 2, 0, (mine, other), 3, False):
        assert said.startswith("DivergenceError: Ranks issued different collectives: ")
        for word in words:
            assert word in said


@pytest.mark.full
@pytest.mark.parametrize("case", ["skipped", "last skipped"])
def test_in_a_later_step_who_leaves_the_common_route_names_both(case):
    mine, other, *words = CASES[case]
    begin = time.monotonic()
    _, left = run_ranks(parting_worker, 2, 2, (mine, other), 3, False)
    assert left.startswith("DivergenceError: Ranks issued different collectives: ")
    for word in words:
        assert word in left
    assert time.monotonic() - begin < 200  # torch's own timeout is half an hour


def leaving_worker(rank, world_size, folder, leaves):
    """Rank 1 leaves the common route, and then its process, or stays until it is killed."""

    def note(error):
        Path(folder, "stuck").write_text(str(error))

    job = Job(timeout_s=60, on_stuck=note)
    if not leaves:
        job.guard._watchdog.board.grace_s = 0.5

    def run():
        for _ in range(2):
            job.step((0, 1, 2))
        job.step((0, 1, 2) if rank == 0 else (0, 2))

    Path(folder, str(rank)).write_text(job.error_of(run))
    if rank == 1 and not leaves:
        time.sleep(600)
    time.sleep(0.5)
    os._exit(3)


PARTED = "rank 1 called all_gather of 'layers.2' while rank 0 called all_gather of 'layers.1'"


@pytest.mark.full
def test_who_stays_says_the_same_when_its_peer_is_gone(tmp_path):
    with pytest.raises(RankFailure, match="rank 0: died with exit code 3"):
        run_ranks(leaving_worker, 2, str(tmp_path), True)
    for rank in range(2):
        assert PARTED in (tmp_path / str(rank)).read_text()


def test_a_rank_that_cannot_be_reached_is_ended_with_the_reason(tmp_path):
    # The one that left keeps its connections, so nothing tears the other out of its gather.
    with pytest.raises(RankFailure, match="rank 0: died with exit code 1"):
        run_ranks(leaving_worker, 2, str(tmp_path), False, grace_s=0.5)
    assert PARTED in (tmp_path / "stuck").read_text()
    assert not (tmp_path / "0").exists()


@pytest.mark.full
def test_of_four_ranks_the_odd_one_is_named():
    plans = ((0, 1, 2), (0, 1, 2), (0, 2, 1), (0, 1, 2))
    wanted = "rank 2 called all_gather of 'layers.2' while ranks 0, 1, 3 called all_gather of "
    for said in run_ranks(parting_worker, 4, 0, plans, 3, False):
        assert f"{wanted}'layers.1'" in said
    later = run_ranks(parting_worker, 4, 2, plans, 3, False)[2]
    # It names those of the others that have said what they called by then.
    assert re.search(r"rank 2 called all_gather of 'layers.2' while ranks? .*of 'layers.1'", later)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2])
def test_where_parameters_stay_gathered_the_reductions_tell(stage):
    for said in run_ranks(parting_worker, 2, 0, ((0, 1, 2), (0, 2)), stage, False):
        assert "rank 1" in said
        assert "'layers.1'" in said or "'layers.2'" in said


@pytest.mark.full
def test_gathers_ahead_of_their_use_are_compared_where_they_happen():
    for said in run_ranks(parting_worker, 2, 0, ((0, 1, 2), (0, 2, 1)), 3, True):
        assert "DivergenceError" in said


def branches_worker(rank, world_size, choices):
    job = Job(model=Chooser())

    def run():
        for choice in choices:
            job.step(choice[rank])

    return job.error_of(run)


class Chooser(nn.Module):
    """A model whose one block runs one of its branches."""

    def __init__(self):
        super().__init__()
        self.block = Branches()

    def forward(self, x, which):
        return self.block(x, which)


@pytest.mark.full
def test_parts_of_one_unit_are_told_apart_though_their_gradients_have_one_size():
    steps = [("left", "left"), ("right", "right"), ("left", "right")]
    for said in run_ranks(branches_worker, 2, steps):
        assert (
            "Ranks issued different collectives: rank 1 reduced the gradients of 'block' without"
            in said
        )
    first = run_ranks(branches_worker, 2, [("left", "right")])
    for said in first:
        assert (
            "rank 1 reduced the gradients of 'block' without block.left.bias, block.left.weight "
            "while rank 0 reduced the gradients of 'block' without block.right.bias, "
            "block.right.weight" in said
        )


def healthy_worker(rank, world_size):
    """Everything that changes on all ranks at once is no divergence, and what repeats is free."""
    job = Job(timeout_s=60)
    asked = []
    agree = job.guard._check

    def ask(event):
        asked.append(event.text)
        agree(event)

    job.guard._check = ask

    def asks(run):
        asked.clear()
        run()
        return len(asked)

    def with_evaluation():
        for _ in range(3):
            job.step((0, 1, 2))
        for _ in range(3):
            job.evaluate((0, 1, 2))
        job.units[""].reshard()
        job.step((0, 1, 2))

    counts = {
        "first": asks(lambda: job.step((0, 1, 2))),
        "second": asks(lambda: job.step((0, 1, 2))),
        "evaluation": asks(with_evaluation),
        "evaluation again": asks(with_evaluation),
        "other layers": asks(lambda: job.step((2, 0))),
        "the same again": asks(lambda: job.step((2, 0))),
    }
    time.sleep(3 * PATIENCE_S * rank)  # a rank that is slow is not taken for one that went away
    counts["after a pause"] = asks(lambda: job.step((2, 0)))

    def accumulate():
        for _ in range(2):
            job.net(torch.ones(2, WIDTH), (2, 0)).sum().backward()
        job.step((2, 0))

    counts["accumulation"] = asks(accumulate)
    counts["again"] = asks(accumulate)
    time.sleep(2 * PATIENCE_S * rank)
    counts["slow while others ask"] = asks(lambda: job.step((1,)))
    job.is_synchronized = True
    job.guard.record(f"did something of its own {rank}")
    assert job.guard._watchdog.board.cause is None
    job.guard.stop()
    job.guard.record(f"did anything {rank}")
    return counts


def restarted_worker(rank, world_size):
    job = Job(timeout_s=60)
    job.step((0, 1, 2))
    job.is_synchronized = rank == 1  # so that a failed run leaves the ranks at different places
    job.guard.record("began a training batch")
    job.is_synchronized = False
    job.guard.start()
    job.step((2, 0))
    job.guard.stop()


@pytest.mark.full
def test_a_run_after_one_that_failed_begins_at_one_place():
    run_ranks(restarted_worker, 2)


@pytest.mark.full
def test_what_all_ranks_do_is_free_once_it_repeats():
    for counts in run_ranks(healthy_worker, 2):
        # A batch begins; root and three layers are gathered, and two of those for the backward
        # pass again; root and layers are reduced; the step.
        assert counts.pop("first") == 1 + 4 + 3 + 4 + 1
        assert counts.pop("evaluation") > 4
        # From here on only the turns: to evaluation, on with it, to training, on with that; the
        # root is gathered for the first batch of evaluation alone.
        assert counts.pop("evaluation again") <= 6
        assert counts.pop("other layers") > 0
        assert counts.pop("accumulation") > 0
        assert counts.pop("slow while others ask") > 0
        assert set(counts.values()) == {0}, counts


def ahead_worker(rank, world_size):
    """Rank 0 goes on without its peer, as it does where gathers only queue on a GPU."""
    job = Job()
    for _ in range(2):
        for text in (
            "called all_gather of 'a'",
            "called all_gather of 'b'",
            "called all_gather of 'c'",
        ):
            job.guard.record(text)
        job.guard.end_step()

    def run():
        if rank == 0:
            job.guard.record("called all_gather of 'a'")
        job.guard.record("called all_gather of 'd'")  # one event, at two places

    return job.error_of(run)


@pytest.mark.full
def test_one_event_at_two_places_is_no_agreement():
    for said in run_ranks(ahead_worker, 2):
        assert "DivergenceError" in said
        assert "rank 1 called all_gather of 'd' while rank 0 called all_gather of 'a'" in said


def notes_worker(rank, world_size):
    job = Job()
    job.guard.record("called all_gather of 'table', tile 3")

    def run():
        job.guard.record(f"called all_gather of 'table', tile {4 + rank}")

    return job.error_of(run)


@pytest.mark.full
def test_other_collectives_can_be_noted_by_name():
    for said in run_ranks(notes_worker, 2):
        assert "rank 1 called all_gather of 'table', tile 5 while rank 0 " in said
        assert "called all_gather of 'table', tile 4" in said


def ended_worker(rank, world_size):
    job = Job(timeout_s=60)
    for _ in range(2):
        job.step((0, 1, 2))
    if rank == 1:
        job.guard.stop()
        time.sleep(4 * PATIENCE_S)
        return None
    verdict = None
    end = time.monotonic() + 20
    job.guard.record("began a training batch")
    while verdict is None and time.monotonic() < end:
        time.sleep(0.05)
        verdict = job.guard._watchdog.board.cause
    job.guard.explain(RuntimeError())
    job.guard.stop()
    return verdict


@pytest.mark.full
def test_a_rank_that_has_ended_its_run_is_named_by_who_waits_for_it():
    verdict = run_ranks(ended_worker, 2)[0]
    assert "rank 1 ended its run while rank 0 began a training batch" in verdict


def slow_then_other_worker(rank, world_size):
    """Rank 0 is slow to agree once, which is no mismatch; later rank 1 leaves a layer out."""
    job = Job()
    time.sleep(0 if rank else 5 * PATIENCE_S)

    def run():
        for _ in range(2):
            job.step((0, 1, 2))
        job.step((0, 1, 2) if rank == 0 else (0, 2))

    return job.error_of(run)


@pytest.mark.full
def test_a_mismatch_is_explained_after_an_agreement_that_was_slow():
    _, said = run_ranks(slow_then_other_worker, 2)
    assert said.startswith("DivergenceError: ")
    assert PARTED in said


def cost_worker(rank, world_size):
    job = Job(timeout_s=60)
    for _ in range(3):
        job.step((0, 1, 2))
    gc.collect()
    begin = time.thread_time()  # what others do on the same cores is not its cost
    for _ in range(2000):
        for _ in range(10):
            job.guard._record(job.guard._event("called all_gather of 'layers.0'"))
        job.guard._order.restart()
    seconds = time.thread_time() - begin
    job.guard.stop()
    return seconds / 20_000


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.alone
def test_a_known_gather_costs_microseconds():
    assert max(run_ranks(cost_worker, 2)) < 100e-6


def test_the_error_is_public():
    import boltmesh

    assert boltmesh.DivergenceError is DivergenceError
