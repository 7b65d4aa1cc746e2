"""What a stage receives, runs, leaves alone and refuses."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from boltmesh.errors import ConfigError, DivergenceError, UnsupportedError
from boltmesh.strategies.pipeline.partition.choose import units_in_call_order
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.strategies.pipeline.stage.units import find_stage_units, is_absent, make_absent
from tests.support import pipeline_models as models
from tests.support.held import held_bytes
from tests.support.pipeline_models import WIDTH, Block, Words
from tests.support.staged import Staged, assert_same_gradient, check_parity, split_evenly

TOKENS = torch.arange(18).reshape(3, 6) % models.WORDS


def _stages(module: Any, count: int = 4, batch: Any = TOKENS, step: str = "training_step") -> Any:
    split = split_evenly(module, step, (batch, 0), count)
    return StagePlans(module, find_stage_units(module), split).stages(step, batch, 0)


def _seeded(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind", [Words, models.Tied, models.Checkpointed])
def test_nothing_is_watched_where_units_make_all_values(kind: Any) -> None:
    plans = [run.plan for run in _stages(kind())]
    assert [each.last_watched for each in plans] == [-1, -1, -1, -1]
    assert plans[0].values_in == plans[-1].values_out == ()


def test_a_chain_hands_on_one_value_and_skips_as_many_as_are_open() -> None:
    assert [len(run.plan.values_in) for run in _stages(Words())] == [0, 1, 1, 1]
    images = torch.randn(2, 1, 8, 8)
    # Two skips and x; two skips and x beside the third; x beside the first.
    assert [len(run.plan.values_in) for run in _stages(models.UNet(), 4, images)] == [0, 3, 3, 1]


def test_frozen_start_needs_no_gradient_until_a_layer_that_trains() -> None:
    needs = [[each.needs_grad for each in r.plan.values_in] for r in _stages(models.FrozenStart())]
    assert needs == [[], [False], [True], [True]]


@pytest.mark.parametrize("step", ["validation_step", "predict_step"])
@pytest.mark.parametrize("kind", [models.Words, models.OutsideResidual])
def test_steps_without_gradients(kind: Any, step: str) -> None:
    module = _seeded(kind)
    with torch.no_grad():
        split = split_evenly(module, step, (TOKENS, 0), 4)
        got = Staged(module, [TOKENS], split, step).forward(TOKENS)
        wanted = getattr(module, step)(TOKENS, 0)
    torch.testing.assert_close(got.result, wanted)
    assert not any(spec.needs_grad for boundary in got.specs for spec in boundary)


@pytest.mark.parametrize("kind", [models.Words, models.OutsideResidual, models.Convolutions])
def test_autocast(kind: Any) -> None:
    batch = torch.randn(4, 1, 8, 8) if kind is models.Convolutions else TOKENS
    module = _seeded(kind)
    with torch.autocast("cpu", torch.bfloat16):
        staged = check_parity(module, [batch], stages=4)
        specs = staged.forward(batch).specs
    if kind is models.Convolutions:
        assert torch.bfloat16 in {spec.dtype for boundary in specs for spec in boundary}


def test_a_probe_under_autocast_leaves_no_cast_weights_behind() -> None:
    module = Words()
    with torch.autocast("cpu", torch.bfloat16):
        _stages(module)
        assert torch.is_autocast_cache_enabled()
        assert type(module.training_step(TOKENS, 0)) is Tensor


def test_random_numbers_between_layers_are_the_same_on_all_stages() -> None:
    module = _seeded(models.DropoutBetweenUnits)
    split = split_evenly(module, "training_step", (TOKENS, 0), 4)
    staged = Staged(module, [TOKENS], split, seed=5)
    before = torch.get_rng_state()
    got = [staged.train(TOKENS) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    wanted = module.training_step(TOKENS, 0)
    torch.testing.assert_close(got, [wanted, wanted])
    (2 * wanted).backward()
    for name, parameter in module.named_parameters():
        assert_same_gradient(name, staged.gradient(name), parameter.grad, 1e-6)
    staged.seed = 6
    assert staged.forward(TOKENS).result != got[0]


class DropoutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.dropped = F.dropout(torch.ones(64), 0.5)
        return super().forward(x)


class RandomMask(Words):
    """Draws for the batch after layers that draw too; first and last stage have to agree."""

    def __init__(self) -> None:
        super().__init__(make=DropoutBlock)

    def body(self, x: Tensor, batch: Any) -> Tensor:
        self.drawn = []
        for block in self.blocks:
            x = block(x)
            self.drawn.append(torch.rand(4))
        return x


def test_layers_that_draw_do_not_part_the_stages() -> None:
    module = _seeded(RandomMask)
    staged = Staged(module, [TOKENS], split_evenly(module, "training_step", (TOKENS, 0), 3), seed=5)
    staged.forward(TOKENS)
    copies: list[Any] = staged.copies
    first, *others = [torch.stack(each.drawn) for each in copies]
    for other in others:
        count = min(len(first), len(other))
        assert torch.equal(first[:count], other[:count])
    masks = [b.dropped for each in copies for b in each.blocks if hasattr(b, "dropped")]
    assert len({tuple(each.tolist()) for each in masks}) == len(module.blocks)


def test_probing_and_running_leave_the_module_as_it_was() -> None:
    module = _seeded(models.UNet)
    batch = torch.randn(2, 1, 8, 8)
    before, random_state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    attributes = {name: set(vars(each)) for name, each in module.named_modules()}
    runs = _stages(module, 2, batch)
    torch.testing.assert_close(dict(module.state_dict()), dict(before))
    assert torch.equal(torch.get_rng_state(), random_state)
    runs[0].forward((), (batch, 0))
    assert {name: set(vars(each)) for name, each in module.named_modules()} == attributes
    # Statistics of the layers that ran moved, others did not.
    changed = {key for key, value in module.state_dict().items() if not value.equal(before[key])}
    assert {key.rsplit(".", 2)[0] for key in changed} == {"down.0", "down.1", "down.2", "middle"}


@pytest.mark.sample("DataclassState", "Streams")
@pytest.mark.parametrize("kind", [models.DataclassState, models.Streams, models.OutsideResidual])
def test_a_plan_holds_no_tensor_of_its_trace(kind: Any) -> None:
    def tensors() -> list[Tensor]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) in {Tensor, FakeTensor}]

    module = kind()
    before = {id(each) for each in tensors()}
    runs = _stages(module)
    left = [each for each in tensors() if id(each) not in before]
    # Stand-ins for what units give: one element each.
    assert all(type(each) is Tensor for each in left)
    assert sum(each.untyped_storage().nbytes() for each in left) <= 4 * len(left)
    assert runs[0].forward((), (TOKENS, 0))


def test_absent_parameters_keep_their_places_and_no_memory() -> None:
    module: Any = nn.Linear(300, 200)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    make_absent([module.weight])
    assert next(module.parameters()) is parameters[0]
    assert (module.weight.shape, module.weight.requires_grad) == ((200, 300), True)
    assert is_absent(module.weight)
    assert not is_absent(module.bias)
    assert held_bytes(module.parameters()) == 4 + 200 * 4
    assert module(torch.ones(1, 300)).isnan().all()
    module.bias.grad = torch.ones(200)
    optimizer.step()
    assert list(optimizer.state) == [module.bias]
    assert is_absent(module.weight)


def test_costs_of_units_in_call_order() -> None:
    module = Words(count=2)
    units = find_stage_units(module)
    trace = trace_step(module, units, "training_step", (TOKENS, 0), counts_flops=True)
    costs = units_in_call_order(trace, units)
    assert [each.name for each in costs] == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    block, head = costs[1], costs[-1]
    assert block.flops == 2 * 18 * WIDTH * WIDTH
    assert head.flops == 2 * 18 * WIDTH * models.WORDS
    assert head.num_parameters == WIDTH * models.WORDS
    assert all(each.is_called for each in costs)


def test_tied_and_loose_parameters_are_used_where_the_step_uses_them() -> None:
    for kind in (models.Tied, models.HeadBetweenUnits):
        used = [run.plan.parameters for run in _stages(kind())]
        sharing = [i for i, names in enumerate(used) if "embedding.weight" in names]
        assert sharing == [0, 3]
        assert [i for i, names in enumerate(used) if "positions" in names] == [0]


class CalledAgain(Words):
    def body(self, x: Tensor, batch: Any) -> Tensor:
        return self.blocks[0](super().body(x, batch))


class Tempered(nn.Module):
    """As the quantizer of fairseq, returns its temperature, which hooks lower."""

    def __init__(self, *, is_tensor: bool) -> None:
        super().__init__()
        self.linear, self.temperature, self.is_tensor = nn.Linear(WIDTH, WIDTH), 1.0, is_tensor

    def forward(self, x: Tensor) -> tuple[Tensor, float | Tensor]:
        temperature = torch.tensor(self.temperature) if self.is_tensor else self.temperature
        return self.linear(x) / self.temperature, temperature


class Quantized(Words):
    def __init__(self, *, is_tensor: bool, at: int = 0) -> None:
        super().__init__()
        self.blocks[at] = Tempered(is_tensor=is_tensor)

    def body(self, x: Tensor, batch: Any) -> Tensor:
        temperature: Any = 0.0
        for block in self.blocks:
            if isinstance(block, Tempered):
                x, temperature = block(x)
            else:
                x = block(x)
        return (x * (1 + temperature)).tanh()


@pytest.mark.parametrize(("is_tensor", "at"), [(False, 0), (True, 0), (False, 5)])
def test_a_number_that_a_layer_returns_may_change_where_no_later_stage_has_it(
    is_tensor: bool, at: int
) -> None:
    module: Any = Quantized(is_tensor=is_tensor, at=at)
    split = split_evenly(module, "training_step", (TOKENS, 0), 2)
    staged = Staged(module, [TOKENS], split)
    torch.testing.assert_close(staged.train(TOKENS), module.training_step(TOKENS, 0))
    for each in (module, *staged.copies):
        each.blocks[at].temperature = 0.5
    if is_tensor or at == 5:
        torch.testing.assert_close(staged.train(TOKENS), module.training_step(TOKENS, 0))
    else:
        with pytest.raises(DivergenceError, match=r"'blocks\.0' returns 0\.5, and returned 1\.0"):
            staged.train(TOKENS)


class KeepsState(Words):
    """Gives its first block what the last one gave in the batch before, as in truncated BPTT."""

    state: tuple[Tensor, ...] | None = None

    def body(self, x: Tensor, batch: Any) -> Tensor:
        x = x if self.state is None else x + self.state[0].mean(0)
        x = super().body(x, batch)
        self.state = (x.detach(),)
        return x


class KeepsMean(Words):
    """Keeps a moving average of the loss."""

    mean: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.mean = loss.detach() if self.mean is None else 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


def test_a_layer_that_gets_a_state_of_the_batch_before_is_refused() -> None:
    module = KeepsState()
    with pytest.raises(UnsupportedError, match=r"gives 'blocks\.0' a state .* kept in 'state'"):
        trace_step(module, find_stage_units(module), "training_step", (TOKENS, 0))
    assert module.state is None


def test_a_moving_average_of_the_loss_is_that_of_the_step() -> None:
    module: Any = _seeded(KeepsMean)
    staged = Staged(module, [TOKENS], split_evenly(module, "training_step", (TOKENS, 0), 2))
    for _ in range(3):
        torch.testing.assert_close(staged.train(TOKENS), module.training_step(TOKENS, 0))


class ReadBetween(Words):
    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.mean().item() > 1e9:
                x = x / 2
        return x


class SkipsByData(Words):
    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            if x.mean() > 0:
                x = block(x)
        return x


class MapsOutput(Words):
    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = torch.vmap(lambda row: row.softmax(-1))(x)
        return super().loss(weights * x, tokens)


class LeavesBehind(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return super().forward(x)


class SideEffect(Words):
    def __init__(self) -> None:
        super().__init__(make=LeavesBehind)

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        return super().loss(x, tokens) + first.penalty


class KeptActivations(Words):
    """Regularizes activations that hooks within layers put into a list, as is often published."""

    hooked: tuple[int, ...] = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for index in self.hooked:
            block: Any = self.blocks[index]
            block.mix.register_forward_hook(self.keep)

    def keep(self, module: Any, args: Any, out: Tensor) -> None:
        self.kept.append(out)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + sum(each.square().mean() for each in self.kept)


class KeptOfEqualLayers(KeptActivations):
    hooked = (0, 1, 2, 3, 4, 5)


class KeptOnLastStage(KeptActivations):
    hooked = (4, 5)


class KeptActivation(Words):
    def __init__(self) -> None:
        super().__init__()
        block: Any = self.blocks[1]
        block.mix.register_forward_hook(self.keep)

    def keep(self, module: Any, args: Any, out: Tensor) -> None:
        self.hidden = out

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().loss(x, tokens) + self.hidden.square().mean()


class LoggedActivation(KeptActivation):
    def keep(self, module: Any, args: Any, out: Tensor) -> None:
        self.log("activation", out.mean())


class Kept:
    """A hook that keeps what a layer gives, as fastai's ``Hook`` does."""

    stored: Any = None

    def __call__(self, module: Any, args: Any, out: Tensor) -> None:
        self.stored = out


class Joining(nn.Module):
    """A layer that finds an earlier one's output in a hook, as ``UnetBlock`` of fastai does."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.hook, self.mix = hook, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.cat([x, self.hook.stored], -1))


class DynamicUnet(Words):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()
        self.hooked().register_forward_hook(self.kept)
        self.joining = Joining(self.kept)

    def hooked(self) -> nn.Module:
        return self.blocks[1]

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().loss(self.joining(x), tokens)


class InnerUnet(DynamicUnet):
    def hooked(self) -> nn.Module:
        block: Any = self.blocks[1]
        return block.mix


class Memory(Words):
    """The step leaves an earlier layer's output on a later one, as a decoder's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.joining = Joining(Kept())

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                hook: Any = self.joining.hook
                hook.stored = 2 * x
        made: Tensor = self.joining(x)
        return made


class Positions:
    """Positions that the first layer to need them computes for all, as of lucidrains' rotary."""

    cached: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        if self.cached is None:
            angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
            self.cached = (angles / torch.arange(1, x.shape[2] + 1)).cos()
        return self.cached


class Turned(Block):
    positions: Positions

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.positions.of(x))


class Rotary(Words):
    def __init__(self) -> None:
        super().__init__(make=Turned)
        positions, blocks = Positions(), self.blocks
        for each in blocks:
            vars(each)["positions"] = positions


class FromFirst(Block):
    """Adds what the first layer of all has given."""

    kept: Any

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        return made + 0.1 * self.kept.stored


class FromEmbedding(Words):
    """The first of its equal blocks has as its argument what all of them find in a hook."""

    make: type[Block] = FromFirst

    def __init__(self) -> None:
        super().__init__(make=self.make)
        kept = Kept()
        self.embedding.register_forward_hook(kept)
        for each in self.blocks:
            vars(each)["kept"] = kept

    def embed(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.embedding(tokens)
        return made


class Causal(Block):
    """Makes a mask of its input's shape, for all layers that come later."""

    kept: Any

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.stored is None:
            self.kept.stored = torch.full_like(x[0, :, :1], 0.5) * x.new_ones(x.shape[1], 1)
        return super().forward(x * self.kept.stored)


class Observed(Block):
    """Adds up a statistic over layers, which no result depends on."""

    kept: Any

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        total = made.detach().abs().mean()
        self.kept.stored = total if self.kept.stored is None else self.kept.stored + total
        return made


class SharedKept(Words):
    make: type[Block]

    def __init__(self) -> None:
        super().__init__(make=self.make)
        for each in self.blocks:
            vars(each)["kept"] = SHARED


SHARED = Kept()


class SharedMask(SharedKept):
    make = Causal


class SharedStatistic(SharedKept):
    make = Observed


@pytest.mark.parametrize("kind", [SharedMask, SharedStatistic])
def test_what_layers_keep_of_shapes_or_for_no_result_may_cross_stages(kind: Any) -> None:
    SHARED.stored = None
    assert [len(run.plan.values_in) for run in _stages(kind())] == [0, 1, 1, 1]


class Recomputed(FromFirst):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


class RecomputedFromEmbedding(FromEmbedding):
    make = Recomputed


@pytest.mark.parametrize("kind", [DynamicUnet, FromEmbedding, Memory, Rotary])
def test_layers_find_values_of_earlier_ones_where_they_look(kind: Any) -> None:
    split = split_evenly(_seeded(kind), "training_step", (TOKENS, 0), 4)
    check_parity(_seeded(kind), [TOKENS, TOKENS[:2]], split=split)


@torch.library.custom_op("boltmesh_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Nobody registered what it gives for tensors without data."""
    return 2 * x


class CustomBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(twice(x.detach()))


class Untraceable(Words):
    def __init__(self) -> None:
        super().__init__(make=CustomBlock)


class BufferWrite(Words):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(WIDTH))

    def body(self, x: Tensor, batch: Any) -> Tensor:
        memory: Any = self.memory
        memory.mul_(0.9).add_(self.blocks[0](x).detach().mean((0, 1)))
        return super().body(x, batch) + memory


class MomentumWeight(Words):
    """Moves a weight towards another one, as momentum encoders do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(self.blocks[1].mix.weight)
        return super().training_step(batch, batch_idx)

    def write(self, weight: Any) -> None:
        other: Any = self.blocks[2]
        weight.data = weight.data * 0.5 + other.mix.weight.data * 0.5


class WrittenByBatch(MomentumWeight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight: Any = self.blocks[1].mix.weight
        weight.data.mul_(batch.float().mean())
        return Words.training_step(self, batch, batch_idx)


class WrittenWithOthers(MomentumWeight):
    @torch.no_grad()
    def write(self, weight: Any) -> None:
        torch._foreach_mul_([weight, self.positions], 0.5)


class WrittenBetweenUses(MomentumWeight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight: Any = self.blocks[1].mix.weight
        before = weight.sum()
        weight.data.mul_(0.5)
        return Words.training_step(self, batch, batch_idx) * before


class WrittenTooLate(MomentumWeight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Words.training_step(self, batch, batch_idx)
        weight: Any = self.blocks[0].mix.weight
        weight.data.mul_(0.5)
        return loss


_WRITTEN = r"'blocks.1.mix.weight' is written to in the step \(.*\) "
REFUSED = [
    (MomentumWeight, f"{_WRITTEN}with other values than its own.*gathered_parameters"),
    (WrittenByBatch, f"{_WRITTEN}with other values than its own"),
    (WrittenWithOthers, f"{_WRITTEN}beside other tensors"),
    (WrittenBetweenUses, f"{_WRITTEN}between uses of it"),
    (WrittenTooLate, "'blocks.0.mix.weight' is written to .* behind the stage that uses it"),
    (CalledAgain, r"'blocks.0' is on stage 0 and the step calls it after 'blocks.5' of stage"),
    (ReadBetween, r"item\(\) of mean at .* of stage 0 that later stages do not have.*inside a la"),
    (SkipsByData, r"__bool__\(\) of gt at .* decides which layers the step runs"),
    (MapsOutput, r"softmax at .* is called within torch.vmap .* output of a layer.*inside a layer"),
    (SideEffect, r"uses blocks.0.penalty on stage .* did not return.*Return it from the layer"),
    (KeptActivation, r"uses hidden on stage .* did not return"),
    (KeptActivations, r"uses a tensor of 'blocks.1' on stage .* did not return"),
    (KeptOfEqualLayers, r"uses a tensor of 'blocks.0' on stage .* did not return"),
    (RecomputedFromEmbedding, r"'blocks.1' computes with an earlier .* runs again in its backward"),
    (InnerUnet, r"uses a tensor of 'blocks.1' on stage .* did not return"),
    (LoggedActivation, r"A layer logs 'activation'.*Return it from the layer, and log it"),
    (Untraceable, r"'blocks.0' \(CustomBlock\) cannot be run on .*test_stage_run.py"),
    (BufferWrite, r"add_ at .* writes what a layer computes into a buffer.*inside a layer"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_what_cannot_be_cut_is_refused_by_name(kind: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _stages(kind())


def test_activations_kept_by_layers_of_the_last_stage_train() -> None:
    module = _seeded(KeptOnLastStage)
    split = {
        name: 0 if name in {"embedding", "blocks.0", "blocks.1"} else 1
        for name in find_stage_units(module)
    }
    check_parity(module, [TOKENS], split=split)


def test_a_stage_without_a_layer_is_refused() -> None:
    module = Words(count=2)
    split = {"embedding": 0, "blocks.0": 0, "blocks.1": 2, "norm": 2, "head": 2}
    with pytest.raises(ConfigError, match="stage 1 of 3 runs no layer"):
        StagePlans(module, find_stage_units(module), split).stages("training_step", TOKENS, 0)


class ByState(Words):
    reverses = False
    drops = False

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in reversed(self.blocks) if self.reverses else self.blocks:
            x = x - block(x) if self.drops else x + block(x)
        return x


@pytest.mark.parametrize("attribute", ["reverses", "drops"])
def test_a_step_that_changed_since_its_probe_is_refused(attribute: str) -> None:
    module: Any = ByState()
    runs = _stages(module, 3)
    sent = runs[0].forward((), (TOKENS, 0))
    setattr(module, attribute, True)
    received = tuple(each.detach() for each in sent)
    with pytest.raises(DivergenceError, match="other things than for an earlier batch"):
        runs[1].forward(received, (TOKENS, 0))
    assert not any("forward" in vars(each) for each in module.modules())
    setattr(module, attribute, False)
    assert len(runs[1].forward(received, (TOKENS, 0))) == 1


class Shared(Words):
    """A layer that blocks hold too, and one method of a unit that is not its forward."""

    def body(self, x: Tensor, batch: Any) -> Tensor:
        for block in self.blocks:
            x = checkpoint_free(block, x)
        return x


def checkpoint_free(block: Any, x: Tensor) -> Tensor:
    return x + block.mix(block.norm(x))


def test_layers_called_past_the_forward_of_their_unit_count_as_code_between_units() -> None:
    # Nothing but embedding, norm and head is left to part; what the blocks' weights meet is seen.
    module = _seeded(Shared)
    split = dict.fromkeys(find_stage_units(module), 0) | {"norm": 1, "head": 1}
    staged = check_parity(module, [TOKENS], split=split)
    assert "blocks.3.mix.weight" in staged.used[0]
    assert "blocks.3.mix.weight" not in staged.used[1]


class Packed(Words):
    """Reads positions that follow from the shape of the batch, or from the batch."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        positions = torch.arange(batch.shape[1])[None] - 1
        if self.read == "written":
            positions[:, 0] += batch.max()
        elif self.read == "random":
            positions = positions + torch.randint_like(positions, 1, 9)
        if bool((positions.diff() != 1).any()):
            batch = batch.flip(1)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


@pytest.mark.parametrize(("read", "num_read"), [("shape", 0), ("written", 1), ("random", 1)])
def test_what_follows_from_the_shape_of_a_batch_is_read_once(read: str, num_read: int) -> None:
    module = Packed(read)
    split = split_evenly(module, "training_step", (TOKENS, 0), 2)
    plans = StagePlans(module, find_stage_units(module), split)
    plans.stages("training_step", TOKENS, 0)
    (known,) = plans._known.values()
    assert [len(answers) for answers in known.runs] == [num_read]
