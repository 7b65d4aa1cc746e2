"""Of blocks that do the same one is run on tensors without data; all where they may differ."""

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from boltmesh.strategies.patch import Changes
from boltmesh.strategies.pipeline.stage import fake_unit, trace_step
from boltmesh.strategies.pipeline.stage.trace import StepTrace
from boltmesh.strategies.pipeline.stage.unit_outputs import KnownUnits, from_bytes, to_bytes
from boltmesh.strategies.pipeline.stage.units import (
    find_stage_units,
    make_absent,
    refuse_calls_outside,
)
from boltmesh.strategies.tensor.expected_traffic import CountingGroup, OperatorTraffic
from boltmesh.strategies.tensor.plan import Section, ShardedParameter
from boltmesh.strategies.tensor.runtime.collectives import TensorGroup
from boltmesh.strategies.tensor.runtime.signatures import (
    SignatureGuard,
    Verified,
    signature_of,
)
from boltmesh.strategies.torch_compat.tensors import fake_tensors, is_fake

DEPTH, WIDTH = 5, 6


class Plain(nn.Module):
    """A block that knows its own number and does not use it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(x))


class Numbered(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return torch.cat([y, y]) if self.number == 3 else y


class Remembering(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Drawing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Reading(Plain):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        assert lengths is not None
        return super().forward(x) * int(lengths.max())


class Collecting(Plain):
    """It hands a value on by a list that it does not hold itself."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        SEEN.append(y.mean())
        return y


class Divided(Plain):
    """A block around which a tensor plan has put what knows its name in the model."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        group: Any = self._group()
        names = (f"blocks.{number}.inner.weight",)
        sections = (Section(outer=1, count=WIDTH, inner=1),)
        entry = ShardedParameter(names[0], names, (WIDTH, WIDTH), 0, sections, "column", 0)
        verified = Verified(with_gradient={signature_of([torch.ones(2, WIDTH)], {}): True})
        guard = SignatureGuard(
            f"blocks.{number}", self, {"inner.weight": entry}, group, verified, self._reason()
        )
        Changes().wrap(self, guard)

    def _group(self) -> Any:
        return "the group"

    def _reason(self) -> str:
        return "others depend on it"


class Counted(Divided):
    """A block whose collectives were counted, also before."""

    def _group(self) -> Any:
        group = CountingGroup(0, 2)
        group.counted["allreduce"] = OperatorTraffic(num_bytes=self.number, calls=1)
        return TensorGroup(group, torch.device("cpu"))


class DividedOtherwise(Divided):
    """One of its blocks is run in another way."""

    def _reason(self) -> str:
        return f"others depend on {self.number == 3}"


class Absent(Plain):
    """A block of another stage."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        make_absent(self.parameters())
        refuse_calls_outside({f"blocks.{number}": self})


class Hooked(Plain):
    """A block with a hook that all blocks share."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_forward_hook(_double)


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


class HookedOtherwise(Hooked):
    """One of its blocks has a hook of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number == 3:
            self.register_forward_hook(lambda *_: torch.ones(2 * WIDTH, WIDTH))


class Filling(Plain):
    """Writes to a tensor what was computed from it."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        total.add_(self.inner(x) * total)
        y: Tensor = super().forward(x)
        return y


SEEN: list[Tensor] = []


class Model(nn.Module):
    def __init__(self, kind: type[Plain]) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(kind(number) for number in range(DEPTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN.clear()
        x, lengths = batch
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(number != 1):
                x = block(x, lengths) if self.kind is Reading else block(x)
        return x.mean() + sum(SEEN)


COSTS = {"counts_flops": True, "notes_kept": True}


def _traced(
    kind: type[Plain], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[StepTrace, int]:
    """Return what a step does, and how many units were run in the last run of it."""
    runs: list[int] = []
    run_on_fakes, run = fake_unit.run_on_fakes, trace_step._StepTracer.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs[-1] += 1
        return run_on_fakes(*args, **kwargs)

    def begun(*args: Any, **kwargs: Any) -> Any:
        runs.append(0)
        return run(*args, **kwargs)

    monkeypatch.setattr(trace_step, "run_on_fakes", counted)
    monkeypatch.setattr(trace_step._StepTracer, "run", begun)
    torch.manual_seed(0)
    model = Model(kind)
    batch = torch.ones(2, WIDTH), torch.tensor([1, 2])
    units = find_stage_units(model)
    trace = trace_step.trace_step(model, units, "training_step", (batch, 0), seed=1, **options)
    return trace, runs[-1]


def _facts(trace: StepTrace) -> Any:
    values = [
        (each.made_at, each.leaf, each.spec, each.is_side_effect, each.needs_grad, each.uses)
        for each in trace.values
    ]
    kept = {name: sorted(each.values()) for name, each in trace.kept.items()}
    return trace.events, values, trace.flops, kept, trace.answers, trace.draws


@pytest.mark.parametrize(
    ("kind", "num_run"),
    # Of a batch, without gradients, of an input without one, and of one with one.
    [(Plain, 4), (Numbered, DEPTH), (Remembering, DEPTH), (Drawing, DEPTH), (Reading, DEPTH),
     (Collecting, DEPTH), (Divided, 4), (Counted, 4), (DividedOtherwise, DEPTH), (Absent, 4),
     (Hooked, 4), (HookedOtherwise, DEPTH)],
)  # fmt: skip
def test_blocks_give_what_each_gives(
    kind: type[Plain], num_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, counted = _traced(kind, monkeypatch, **COSTS)
    monkeypatch.setattr(KnownUnits, "find", lambda *_: None)
    whole, all_run = _traced(kind, monkeypatch, **COSTS)
    assert _facts(short) == _facts(whole)
    assert counted == num_run
    assert all_run == DEPTH


@pytest.mark.parametrize(
    ("kind", "num_run"),
    [(Plain, 0), (Numbered, 0), (Remembering, DEPTH), (Drawing, DEPTH), (Reading, DEPTH),
     (Collecting, DEPTH), (Divided, 0), (Counted, 0), (Absent, 0), (Hooked, 0)],
)  # fmt: skip
def test_outputs_of_another_rank_give_what_each_block_gives(
    kind: type[Plain], num_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = _traced(kind, monkeypatch)
    sent = to_bytes(whole.learned, torch.device("cpu"))
    known = from_bytes(sent, torch.device("cpu"))
    short, counted = _traced(kind, monkeypatch, remembered=known)
    assert _facts(short) == _facts(whole)
    assert counted == num_run


def test_operations_are_counted_as_torch_counts_them() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=3 * WIDTH, batch_first=True)
    x = torch.randn(2, 4, WIDTH)
    with FlopCounterMode(display=False) as by_torch:
        layer(x)
    counted = fake_unit.run_on_fakes(
        "layer", layer, layer.forward, fake_tensors(), ((x,), {}), counts_flops=True
    )
    assert counted.flops == by_torch.get_total_flops() > 0


def test_a_trace_leaves_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_fakes() -> int:
        gc.collect()
        return sum(map(is_fake, gc.get_objects()))

    before = num_fakes()
    _traced(Filling, monkeypatch, **COSTS)
    SEEN.clear()
    assert num_fakes() <= before
