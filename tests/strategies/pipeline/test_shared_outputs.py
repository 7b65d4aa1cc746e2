"""Of ranks that need a unit's output on tensors without data, one runs it for all of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from boltmesh.errors import BoltMeshError
from boltmesh.strategies import gathered_parameters
from boltmesh.strategies.pipeline.stage import fake_unit, trace_step
from boltmesh.strategies.pipeline.stage.trace import Argument, Place, TensorSpec, UnitOutput
from boltmesh.strategies.pipeline.stage.unit_outputs import (
    from_bytes,
    needed_to_derive,
    outputs_for_rows,
    to_bytes,
)
from boltmesh.strategies.pytree import take_apart
from tests.support.pipeline_tensor import PipelineTensor
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

CPU, META = torch.device("cpu"), torch.device("meta")


class OfFirstRank(Stack):
    """Its first rank alone computes something of what layers give, as for a picture."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        if self.trainer.is_global_zero:
            self.largest = logits.detach().abs().amax()
        return logits


class Thin(nn.Module):
    """A layer that gives less in evaluation mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made if self.training else made[..., :1]


class Turned(Stack):
    """A hook sets the mode of a layer, before a step reads a value from its batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.thin = Thin(options["width"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.thin.train(batch_idx < 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.thin(x) * (int(tokens.sum()) >= 0)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Followed(Stack):
    """Its step keeps on the last layer what it sees of it, in a number and in a buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        vars(self.head)["calls"] = 0
        self.head.register_buffer("largest", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        head: Any = self.head
        head.calls += 1
        head.largest.copy_(torch.maximum(head.largest, logits.detach().abs().amax()))
        return logits / (1 + 0.1 * head.calls)


class Lines(nn.Module):
    """A layer that gives a second value if it has seen rows, and notes in an object how many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(width, width), SimpleNamespace(rows=0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.rows = len(x)
        return self.inner(x), x.mean(-1, keepdim=True)


class Noted(Stack):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lines = Lines(options["width"])

    def forward(self, tokens: Tensor) -> Tensor:
        self.lines.seen.rows = 0
        x, second = self.lines(self.embedding(tokens))
        if self.lines.seen.rows:
            x = x + second
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Repeat(nn.Module):
    """A layer whose step sets how much it gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(width, width), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).repeat(1, self.times, 1)


class Repeated(Stack):
    """It sets that by what it reads from a batch, and before each of several calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.repeat = Repeat(options["width"])

    def forward(self, tokens: Tensor) -> Tensor:
        x, taken = self.embedding(tokens), tokens.shape[1]
        parts = []
        for times in (1, 2, int(tokens.max()) % 3 + 2):
            self.repeat.times = times
            parts.append(self.repeat(x))
        x = torch.cat(parts, 1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits[:, :taken] + logits[:, taken:].mean(1, keepdim=True)


class Padding(nn.Module):
    """A layer that pads its rows to a power of two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        missing = 2 ** (len(x) - 1).bit_length() - len(x)
        made: Tensor = self.inner(nn.functional.pad(x, (0, 0, 0, 0, 0, missing)))
        return made


class Padded(Stack):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.padding = Padding(options["width"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.padding(self.embedding(tokens))[: len(tokens)]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(rank: int, world_size: int, kind: type[Stack], strategy: Any, sizes: Any) -> Any:
    """Return parameters, units run without data, the number of ranks that share, and the module."""
    runs: list[tuple[str, tuple[int, ...]]] = []
    run_on_fakes = fake_unit.run_on_fakes

    def counted(name: str, unit: Any, call: Any, mode: Any, arguments: Any, **options: Any) -> Any:
        if not options["counts_flops"]:  # which is for the division of the model
            shapes = [each.shape for each in take_apart(arguments)[0] if isinstance(each, Tensor)]
            runs.append((name, tuple(shapes[0])))
        return run_on_fakes(name, unit, call, mode, arguments, **options)

    vars(trace_step)["run_on_fakes"] = counted
    seed_everything(1, verbose=False)
    module = kind(depth=4, **sizes)
    trainer = quiet_trainer(world_size, strategy, max_steps=6)
    trainer.fit(module, token_data(24, 4))
    with gathered_parameters(module):
        values = {name: each.detach().clone() for name, each in module.named_parameters()}
    axis = getattr(trainer.strategy, "pipeline_axis", None)
    group = None if axis is None else axis.staged._tracing_group
    return values, runs, None if group is None else group.size(), module


EVEN: dict[str, Any] = {"width": 8, "hidden": 12}


def share(rank: int, world_size: int, kind: type[Stack], strategy: Any, sizes: Any) -> Any:
    return train(rank, world_size, kind, strategy, sizes)[:3]


@pytest.mark.ranks
def test_each_unit_is_run_on_one_rank_for_each_kind_of_batch() -> None:
    ((wanted, *_),) = run_ranks(share, 1, Stack, "auto", EVEN)
    found = run_ranks(share, 2, Stack, pipeline(), EVEN)
    for values, _, _ in found:
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    times = Counter(run for _, runs, _ in found for run in runs)
    of_blocks = {shape[0]: count for (name, shape), count in times.items() if name == "blocks.0"}
    # One row was run for the division of the model; two rows, for checks, follow from these.
    assert of_blocks == {3: 1, 4: 1}


@pytest.mark.ranks
def test_a_layer_is_run_for_each_number_of_rows_where_its_sizes_are_not_linear() -> None:
    ((wanted, *_),) = run_ranks(share, 1, Padded, "auto", EVEN)
    found = run_ranks(share, 2, Padded, pipeline(), EVEN)
    for values, _, _ in found:
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    runs = Counter((name, shape[0]) for _, each, _ in found for name, shape in each)
    assert {rows: runs["padding", rows] for rows in (2, 3, 4)} == {2: 1, 3: 1, 4: 1}
    assert runs["blocks.0", 2] == 0


@dataclass
class Numbered:
    """An output that also knows its number of rows."""

    x: Tensor

    def __post_init__(self) -> None:
        self.rows = len(self.x)


class Numbering(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Numbered:
        return Numbered(self.inner(x))


class Counted(Stack):
    """The step uses that number, which is none of the output's tensors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.numbering = Numbering(options["width"])

    def forward(self, tokens: Tensor) -> Tensor:
        numbered = self.numbering(self.embedding(tokens))
        x = numbered.x * (numbered.rows / len(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train_longer(rank: int, world_size: int, strategy: Any) -> Any:
    """Train with batches of 4 rows, and then with those of 8 and 12, in which parts have 2 and 3.

    Of both numbers outputs were derived for the checks of the first batch.
    """
    seed_everything(1, verbose=False)
    module = Counted(depth=4, **EVEN)
    trainer = quiet_trainer(world_size, strategy, max_steps=4)
    batches: Any = [next(iter(token_data(24, rows))) for rows in (4, 4, 8, 12)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    with gathered_parameters(module):
        return {name: each.detach().clone() for name, each in module.named_parameters()}


@pytest.mark.ranks
def test_later_batches_have_outputs_of_their_own() -> None:
    (wanted,) = run_ranks(train_longer, 1, "auto")
    for values in run_ranks(train_longer, 2, pipeline(schedule="1f1b")):
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [OfFirstRank, Repeated, Noted, Turned])
def test_outputs_are_those_of_the_rank_the_batch_and_the_call(kind: type[Stack]) -> None:
    ((wanted, *_),) = run_ranks(share, 1, kind, "auto", EVEN)
    for values, *_ in run_ranks(share, 2, kind, pipeline(), EVEN):
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)


def follow(rank: int, world_size: int, strategy: Any) -> tuple[Any, float]:
    values, *_, module = train(rank, world_size, Followed, strategy, EVEN)
    return values, float(module.head.largest)


@pytest.mark.ranks
@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_a_step_keeps_on_a_layer_is_of_its_batches_alone(microbatches: int) -> None:
    ((wanted, largest),) = run_ranks(follow, 1, "auto")
    *_, (values, seen) = run_ranks(follow, 2, pipeline(microbatches=microbatches))
    if microbatches == 1:  # the number counts microbatches
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
        assert seen == pytest.approx(largest, rel=1e-5)
    else:
        assert seen == pytest.approx(largest, rel=0.2)  # of made-up values it is ten times that


class OnceUncuttable(IterableDataset[Any]):
    """The first batch of training, and not the one before it, cannot be cut on one rank."""

    def __init__(self, rank: int) -> None:
        self.is_bad, self.begun = rank == 1, 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        for tokens, targets in token_data(8, 4):
            yield tokens, targets[:3] if self.is_bad and self.begun > 1 else targets


def train_uncuttable(rank: int, world_size: int) -> None:
    trainer = quiet_trainer(world_size, pipeline(timeout_s=60.0), max_steps=1)
    module, loader = Stack(depth=4, **EVEN), DataLoader(OnceUncuttable(rank), batch_size=None)
    with pytest.raises(BoltMeshError, match="cannot be cut into microbatches"):
        trainer.fit(module, loader)
    trainer.fit(module, token_data(8, 4))
    assert trainer.global_step == 1


@pytest.mark.ranks
def test_a_first_batch_that_one_rank_cannot_cut_ends_the_others_and_no_later_run() -> None:
    run_ranks(train_uncuttable, 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "schedule", ["gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "pipedream_2bw"]
)
def test_outputs_are_shared_under_each_schedule(schedule: str) -> None:
    ((wanted, *_),) = run_ranks(share, 1, Stack, "auto", EVEN)
    for values, runs, _ in run_ranks(share, 2, Stack, pipeline(schedule=schedule), EVEN):
        assert max(Counter(runs).values()) == 1
        if schedule != "pipedream_2bw":  # which steps by weights of one step before
            torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plan", "num_sharing"),
    # The vocabulary has an odd number of tokens.
    [({"embedding.weight": "whole", "head.weight": "whole"}, 4), ("auto", 2)],
    ids=["even", "uneven"],
)
def test_ranks_that_divide_layers_share_outputs_if_their_parts_are_equal(
    plan: Any, num_sharing: int
) -> None:
    ((wanted, *_),) = run_ranks(share, 1, Stack, "auto", EVEN)
    strategy = PipelineTensor(stages=2, size=2, plan=plan, telemetry=False)
    for values, _, sharing in run_ranks(share, 4, Stack, strategy, EVEN):
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
        assert sharing == num_sharing


def _known(*leaves: object) -> dict[Place, UnitOutput]:
    build = take_apart(["leaf"] * len(leaves))[1]
    place = Place("unit", (), (TensorSpec((2,), (1,), torch.float32, CPU), CPU), ())
    return {place: UnitOutput(leaves, build, (False,) * len(leaves))}


def _of_rows(
    rows: int, *, number: int | None = None, pads: bool = False, keys: int | None = None
) -> Any:
    """Return what is known of a layer that gives its rows first, second, and in a dim alone."""
    count = rows + (rows % 2 if pads else 0)
    layout = torch.float32, CPU
    given = TensorSpec((rows, 5), (5, 1), *layout), rows if number is None else number, CPU
    leaves = (
        TensorSpec((count, 4), (4, 1), *layout),
        TensorSpec((3, rows, 2), (2 * rows, 2, 1), *layout),
        TensorSpec((2 * rows,), (1,), *layout),
        Argument(1),
        rows,
        torch.float32,
        True,
    )
    nested = [{str(number): "leaf"} for number in range(keys or 1)][-1:]
    build = take_apart([*nested, *["leaf"] * (len(leaves) - 1)])[1]
    output = UnitOutput(leaves, build, (False,) * len(leaves))
    return {Place("unit", (rows, "gelu"), (given, 1), ()): output}


def test_outputs_follow_from_those_for_other_rows() -> None:
    known = {rows: _of_rows(rows) for rows in (1, 2, 8)}
    for rows in (3, 5, 16):
        ((place, output),) = outputs_for_rows(known, rows).items()
        ((wanted, other),) = _of_rows(rows).items()
        assert (place, output.leaves) == (wanted, other.leaves)
        assert output.build([*"abcdefg"]) == [{"0": "a"}, *"bcdefg"]


@pytest.mark.parametrize(
    "known",
    [
        {rows: _of_rows(rows) for rows in (1, 8)},
        {rows: _of_rows(rows, pads=True) for rows in (1, 2, 8)},
        {rows: _of_rows(rows, number=rows * rows) for rows in (1, 2, 8)},
        {1: _of_rows(1), 2: {}, 8: _of_rows(8)},
        {rows: _of_rows(rows, keys=rows) for rows in (1, 2, 8)},
    ],
    ids=["two points", "padded", "a square", "missing", "other keys"],
)
def test_outputs_of_other_rows_do_not_follow_where_sizes_are_not_linear(known: Any) -> None:
    assert outputs_for_rows(known, 3) == {}


def test_outputs_for_a_number_that_is_no_power_of_two_are_known() -> None:
    assert needed_to_derive({1, 8}, {2, 3, 5}) == [3]
    assert needed_to_derive({2, 12}, {3, 5}) == [3]
    assert needed_to_derive({1, 3, 9}, {2, 5}) == []
    assert needed_to_derive({1, 2}, {4}) == [4]


def test_only_whole_sizes_follow() -> None:
    known = {rows: _of_rows(rows, number=rows // 2) for rows in (2, 4, 8)}
    assert outputs_for_rows(known, 6)
    assert outputs_for_rows(known, 3) == {}


def test_the_device_of_a_rank_becomes_that_of_another() -> None:
    spec = TensorSpec((2, 3), (3, 1), torch.float32, CPU)
    ((place, output),) = from_bytes(to_bytes(_known(spec, Argument(1), 5), CPU), META).items()
    assert place == Place("unit", (), (TensorSpec((2,), (1,), torch.float32, META), META), ())
    assert output.leaves == (TensorSpec((2, 3), (3, 1), torch.float32, META), Argument(1), 5)
    assert output.build(["a", "b", "c"]) == ["a", "b", "c"]
    ((_, other),) = from_bytes(to_bytes(_known(spec), META), META).items()
    assert other.leaves == (spec,)


class Cache:
    """What a layer may return beside tensors."""


class Unwritten:
    """Which cannot be written."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")


class OfFunction:
    """A constant, as a class, that other ranks cannot find."""


OfFunction.__qualname__ = "function.<locals>.OfFunction"


@pytest.mark.parametrize(
    "leaf", [Cache(), OfFunction, torch.ones(1)], ids=["object", "class", "tensor"]
)
def test_an_output_with_an_object_of_one_rank_is_not_shared(leaf: object) -> None:
    assert to_bytes(_known(leaf), CPU) == []


def test_arguments_that_cannot_be_written_are_not_shared() -> None:
    ((place, output),) = _known(1).items()
    unwritten: Any = (Unwritten(),)
    assert to_bytes({place._replace(given=unwritten): output}, CPU) == []
    assert from_bytes([b"nothing"], CPU) == {}
