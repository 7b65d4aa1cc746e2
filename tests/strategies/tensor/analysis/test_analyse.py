"""What the analysis says of models that are not like the usual ones."""

import os
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from boltmesh.errors import ConfigError
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.plan import to_json
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import analysed, divisions
from tests.support.tensor_models import MLP, example, hugging_face


def plan_of(module, *inputs, **kwargs):
    """The plan of a module whose output is squared, each of the inputs in a step of its own."""
    steps = [lambda model, x=x: model(x).square().mean() for x in inputs]
    analysis = analyse(module, *steps, blocks=find_blocks(module))
    return make_plan(analysis, 2, **kwargs)


def whys(plan):
    return {each.name: each.why for each in plan.whole}


class Normed(nn.Module):
    """A norm on both sides, so that the width has to be whole."""

    def __init__(self, inner):
        super().__init__()
        self.before, self.inner, self.after = nn.LayerNorm(8), inner, nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.inner(self.before(x)))


X = torch.zeros(2, 6, 8)

_PLANNED = (("gpt_fused", "gpt_one_key_head", "llama", "mixtral", "chain"), ("gemma",))


def planned():
    """Plans with this process's order of sets."""
    plain, divided = _PLANNED
    plans = [make_plan(analysed(name), 2) for name in plain]
    plans += [make_plan(analysed(name), 2, sequence_parallel=True) for name in divided]
    return [to_json(each) for each in plans]


_SCRIPT = """
import warnings; warnings.filterwarnings("ignore")
from tests.strategies.tensor.analysis.test_analyse import planned
print(*planned(), sep="\\n")
"""


@pytest.mark.full
@pytest.mark.slow
def test_plans_are_the_same_to_the_byte_whatever_the_order_of_sets():
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": "424242"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines() == planned()  # here: a seed of the process's own


@pytest.mark.parametrize("name", ["gpt_fused", "llama", "t5"])
def test_a_model_on_the_meta_device_has_the_same_plan(name):
    with torch.device("meta"):
        module = example(name).module

    analysis = analyse(module, example(name).loss, blocks=find_blocks(module))

    assert to_json(make_plan(analysis, 2)) == to_json(make_plan(analysed(name), 2))
    assert all(each.is_meta for each in module.parameters())


def test_the_model_and_the_random_numbers_are_as_before():
    made = example("gpt_dropout")
    kept = {name: each.clone() for name, each in made.module.state_dict().items()}
    parameters = list(made.module.parameters())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)

    analyse(made.module, made.loss, blocks={})

    assert torch.equal(torch.rand(4), expected)
    assert all(a is b for a, b in zip(parameters, made.module.parameters(), strict=True))
    assert all(torch.equal(kept[name], each) for name, each in made.module.state_dict().items())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in made.module.modules())
    assert all(each.grad is None for each in parameters)


def test_hooks_are_taken_off_when_a_step_fails():
    module = nn.Linear(3, 3)

    with pytest.raises(ZeroDivisionError):
        analyse(module, lambda model: 1 / 0, blocks={})

    assert not module._forward_hooks
    assert type(module.weight) is nn.Parameter


@pytest.mark.full
@pytest.mark.slow
def test_a_llama_of_70_billion_parameters_is_analysed_in_seconds():
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        module = hf.LlamaForCausalLM(config)
    tokens = torch.ones(1, 64, dtype=torch.long)
    start = time.monotonic()

    analysis = analyse(
        module,
        lambda model: model(input_ids=tokens, labels=tokens).loss,
        blocks=find_blocks(module),
    )
    plan = make_plan(analysis, 8, sequence_parallel=True)

    assert time.monotonic() - start < 60  # about 10 on an idle core; others share it
    total = sum(each.elements for each in analysis.parameters.values())
    assert total > 68e9
    assert sum(each.elements for each in plan.sharded.values()) > 0.999 * total
    assert len(plan.axes) == 2 * 80 + 2
    assert plan.sequence.stacks == (("model.layers.0", "model.layers.79"),)


@torch.library.custom_op("boltmesh_tests::strange", mutates_args=())
def strange(x: Tensor) -> Tensor:
    """Nobody knows what it does."""
    return x.clone()


@strange.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


strange.register_autograd(lambda context, gradient: gradient)


class Strange(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(strange(self.up(x)))


def test_what_an_unknown_operator_touches_is_whole_and_the_operator_is_told():
    plan = plan_of(nn.Sequential(Normed(Strange(8)), Normed(MLP(8))), X)

    assert set(plan.sharded) == {"1.inner.up.weight", "1.inner.up.bias", "1.inner.down.weight"}
    assert plan.unknown == {"boltmesh_tests.strange.default": 1}
    assert "strange in 0.inner needs it whole" in whys(plan)["0.inner.up.weight"]
    assert any("boltmesh_tests.strange.default has no rule" in each for each in plan.notes)


def test_whoever_knows_an_unknown_operator_may_divide_around_it():
    plan = plan_of(
        nn.Sequential(Normed(Strange(8)), Normed(MLP(8))),
        X,
        wanted={"0.inner.up": "column", "0.inner.down": "row"},
    )

    assert plan.sharded["0.inner.up.weight"].style == "column"
    assert plan.sharded["0.inner.down.weight"].style == "row"
    assert plan.boundaries == ()


def test_what_another_operator_needs_whole_is_divided_by_nobodys_wish():
    with pytest.raises(ConfigError, match="layer_norm"):
        plan_of(Normed(MLP(8)), X, wanted={"inner.down": "column"})


class ByLength(MLP):
    """Long texts get a softmax over channels."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        return self.down(inner.softmax(-1) if x.shape[1] > 6 else inner.relu())


def test_of_batches_of_two_shapes_each_may_need_something_whole():
    module, longer = Normed(ByLength(8)), torch.zeros(2, 7, 8)

    assert plan_of(module, X).sharded
    assert not plan_of(module, longer).sharded
    assert not plan_of(module, X, longer).sharded
    assert "softmax in inner" in whys(plan_of(module, X, longer))["inner.up.weight"]


class Mixed(MLP):
    """What is summed over goes through a function that a sum cannot go through later."""

    def __init__(self, width):
        super().__init__(width)
        self.first = nn.Parameter(torch.zeros(32, width))
        self.second = nn.Parameter(torch.zeros(width, 32))
        del self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first).relu(), self.second).tanh()


class Straight(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(F.linear(x, self.first).relu(), self.second)


class Biased(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first).relu(), self.second) + 1


class Residual(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, self.first).relu(), self.second)


def test_matrices_of_a_module_are_divided_where_it_ends_with_the_sum():
    assert set(plan_of(Normed(Straight(8)), X).sharded) == {"inner.first", "inner.second"}


@pytest.mark.parametrize(("kind", "why"), [(Mixed, "tanh"), (Biased, "add"), (Residual, "add")])
def test_and_not_where_it_goes_on(kind, why):
    plan = plan_of(Normed(kind(8)), X)

    assert not plan.sharded
    assert f"inner goes on with what it sums over: {why}" in whys(plan)["inner.first"]


class Borrowed(nn.Module):
    """Logits by the weight of the table, without calling a module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(96, 8), Normed(MLP(8))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(self.table(tokens)) @ self.table.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_a_parameter_that_another_module_uses_is_whole():
    module = Borrowed()
    tokens = torch.ones(2, 6, dtype=torch.long)

    plan = make_plan(analyse(module, lambda model: model(tokens), blocks={}), 2)

    assert "table.weight is used outside of its module" in whys(plan)["table.weight"]
    assert "inner.inner.up.weight" in plan.sharded


class Unused(MLP):
    def __init__(self, width):
        super().__init__(width)
        self.other = nn.Linear(width, width)


def test_what_the_step_does_not_use_is_whole():
    plan = plan_of(Normed(Unused(8)), X)

    assert "the step does not use" in whys(plan)["inner.other.weight"]


class TwoUses(nn.Module):
    """A whole projection that goes to divided heads, and into the residual sum."""

    def __init__(self, *, is_used_whole: bool) -> None:
        super().__init__()
        self.is_used_whole = is_used_whole
        self.gate, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.shared = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared(x)
        y = self.down(self.gate(x) * shared)
        return y + shared if self.is_used_whole else y


def test_what_meets_something_divided_sums_its_gradient_where_it_is_given_out():
    plan = plan_of(Normed(TwoUses(is_used_whole=False)), X)

    assert plan.boundaries == ("inner.shared",)
    assert "inner.gate.weight" in plan.sharded


def test_what_is_used_whole_as_well_leaves_all_of_it_whole():
    plan = plan_of(Normed(TwoUses(is_used_whole=True)), X)

    assert not plan.sharded
    assert "inner.shared is also used whole" in whys(plan)["inner.gate.weight"]


class Counting(MLP):
    """Keeps a running mean of its channels."""

    def __init__(self, width):
        super().__init__(width)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        self.mean.mul_(0.9).add_(inner[0, 0])
        return self.down(inner)


def test_what_is_written_to_a_buffer_is_whole_and_the_buffer_is_as_before():
    module = Normed(Counting(8))

    plan = plan_of(module, X)

    assert not plan.sharded
    assert torch.equal(module.inner.mean, torch.zeros(32))


class Looking(MLP):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if inner.abs().max() > 1000:
            inner = inner / 2
        return self.down(inner[:, inner[0, :, 0].nonzero()[:, 0]])


def test_a_step_that_looks_at_data_goes_on_and_says_so():
    plan = plan_of(Normed(nn.Sequential(nn.Identity(), Looking(8))), X[:1])

    assert any("nonzero" in each and "looks at data" in each for each in plan.notes)


def test_a_step_may_look_at_the_batch():
    class Masked(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.any() else x + 1)

    plan = plan_of(Masked(8), X)

    assert not plan.notes


def test_what_a_step_returns_is_whole():
    module = MLP(8)

    analysis = analyse(module, lambda _: module.up(X), blocks={})

    assert not make_plan(analysis, 2).sharded


def test_a_backward_pass_within_a_step_says_nothing():
    module = Normed(MLP(8))

    def step(model):
        loss = model(X).square().mean()
        loss.backward()
        return loss

    analysis = analyse(module, step, blocks={})

    assert set(make_plan(analysis, 2).sharded) == {
        "inner.up.weight", "inner.up.bias", "inner.down.weight",
    }  # fmt: skip
    assert not analysis.trace.unknown


@pytest.mark.parametrize("kind", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_split_inside_of_each_however_they_are_run(kind):
    made = example("mixtral")
    made.module.config._experts_implementation = kind

    plan = make_plan(analyse(made.module, made.loss, blocks=find_blocks(made.module)), 2)

    assert divisions(plan)["model.layers.*.mlp.experts.gate_up_proj"] == "expert 1: 128x1 + 128x1"
    assert divisions(plan)["model.layers.*.mlp.experts.down_proj"] == "expert 2: 128x1"
    assert "experts of model.layers.0.mlp: split inside of each" in plan.notes


def test_experts_that_do_not_divide_are_left_whole_and_it_is_said():
    made = example("mixtral")
    analysis = analyse(made.module, made.loss, blocks=find_blocks(made.module))

    plan = make_plan(analysis, 3)

    assert "experts of model.layers.0.mlp: left whole" in plan.notes


def test_loss_parallel_that_is_not_possible_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"97 tokens are fewer than 98.*loss_parallel='auto'"):
        make_plan(analysed("gpt_odd_vocabulary"), 98, loss_parallel=True)
    with pytest.raises(ConfigError, match="no loss over tokens"):
        make_plan(analysed("vit_by_hand"), 2, loss_parallel=True)


class Ranked(nn.Module):
    """Its loss needs logits of all tokens in order; its table can be divided by tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(64, 8), nn.LayerNorm(8), nn.Linear(8, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.table(tokens)))
        largest = logits.sort().values[..., -3:].mean()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + largest


def test_loss_parallel_needs_a_head_that_is_divided():
    tokens = torch.zeros(2, 4, dtype=torch.long)
    plan = plan_of(Ranked(), tokens)
    assert plan.sharded["table.weight"].style == "vocabulary"
    assert "head.weight" not in plan.sharded
    with pytest.raises(ConfigError, match="loss_parallel=True, but no logits can be divided"):
        plan_of(Ranked(), tokens, loss_parallel=True)


def test_without_loss_parallel_heads_are_whole():
    plan = make_plan(analysed("gpt_separate"), 2, loss_parallel=False)

    assert "head.weight" not in plan.sharded
    assert "logits are to be whole" in whys(plan)["head.weight"]


def test_half_precision_counts_in_the_bytes():
    module = hugging_face("llama").bfloat16()
    batch = example("llama").batch

    plan = make_plan(analyse(module, lambda m: m(**batch).loss, blocks=find_blocks(module)), 2)

    assert {each.element_bytes for each in plan.sharded.values()} == {2}


def test_a_solver_that_repeats_until_an_error_is_small_ends_the_analysis(monkeypatch):
    class Solver(nn.Linear):
        """As the adaptive solver of zuko's CNF."""

        def forward(self, x: Tensor) -> Tensor:
            while (super().forward(x) - x).abs().amax() > 0.5:
                x = x + 0.1 * (super().forward(x) - x)
            return x

    monkeypatch.setattr("boltmesh.strategies.tensor.analysis.analyse._MOST_NUMBERS", 20)
    with pytest.raises(RuntimeError, match="read 20 numbers of tensors and did not end"):
        plan_of(Solver(8, 8), X)
