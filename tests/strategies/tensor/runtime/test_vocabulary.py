"""Embeddings and heads of divided vocabularies give the numbers of whole ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltmesh.strategies.patch import Changes
from boltmesh.strategies.tensor.plan import (
    LossParallel,
    PlannedDim,
    Section,
    ShardedParameter,
    TensorPlan,
)
from boltmesh.strategies.tensor.runtime.param_swap import shard_of, shard_parameters
from boltmesh.strategies.tensor.runtime.vocab_modules import divide_vocabularies, left_whole
from boltmesh.strategies.tensor.runtime.vocab_tensor import Vocabulary
from tests.support.hugging_face import make
from tests.support.ranks import run_ranks
from tests.support.vocabularies import counted_messages, relative, tensor_group

WIDTH = 8


def plan_of(model: nn.Module, names: list[str], size: int) -> TensorPlan:
    """Divides whole parameters by tokens; tied names are found by identity."""
    all_names = dict(model.named_parameters(remove_duplicate=False))
    axes: dict[int, int] = {}
    sharded = {}
    for name in names:
        parameter = all_names[name]
        tied = tuple(n for n, p in all_names.items() if p is parameter)
        axis = axes.setdefault(parameter.shape[0], len(axes))
        sections = (Section(1, parameter.shape[0], 1),)
        sharded[name] = ShardedParameter(
            name, tied, tuple(parameter.shape), 0, sections, "vocabulary", axis
        )
    planned = tuple(PlannedDim(tokens, tuple(names), ()) for tokens in axes)
    return TensorPlan(size, planned, sharded)


def divide(
    model: nn.Module, names: list[str], loss_parallel: LossParallel = "auto"
) -> tuple[TensorPlan, list[Vocabulary]]:
    group = tensor_group()
    plan = plan_of(model, names, group.size)
    shard_parameters(model, plan.sharded.values(), size=group.size, rank=group.rank)
    changes = Changes()
    return plan, divide_vocabularies(model, plan, group, changes, loss_parallel=loss_parallel)


def worst_gradient(divided: nn.Module, whole: nn.Module, plan: TensorPlan) -> float:
    """The largest relative difference of a gradient, over all parameters.

    Some are zero but for noise, as that of a key's bias: none counts as smaller than a thousandth
    of the largest.
    """
    group = tensor_group()
    worst = 0.0
    expected = dict(whole.named_parameters())
    least = 1e-3 * max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for name, parameter in divided.named_parameters():
        gradient = expected[name].grad
        if gradient is None:
            assert parameter.grad is None
            continue
        if name in plan.sharded:
            gradient = shard_of(gradient, plan.sharded[name], size=group.size, rank=group.rank)
        assert parameter.grad is not None, name
        worst = max(worst, relative(parameter.grad, gradient, least))
    return worst


class Scaled(nn.Embedding):
    """As Gemma's: what is looked up is scaled by the class's own code."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * WIDTH**0.5


class Small(nn.Module):
    def __init__(
        self,
        tokens: int,
        *,
        is_tied: bool = False,
        bias: bool = True,
        table: type[nn.Embedding] = nn.Embedding,
        padding_idx: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.table = table(tokens, WIDTH, padding_idx=padding_idx, **settings)
        self.positions = nn.Parameter(torch.randn(5, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, tokens, bias=bias)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner((self.table(tokens) + self.positions).tanh()))


def small(tokens: int, **settings: Any) -> Small:
    torch.manual_seed(0)
    return Small(tokens, **settings)


def _tokens(count: int) -> Tensor:
    return torch.randint(0, count, (4, 5), generator=torch.Generator().manual_seed(3))


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "untied": ({}, ["table.weight", "head.weight", "head.bias"]),
    "tied": ({"is_tied": True, "bias": False}, ["table.weight"]),
    "bias_left_whole": ({}, ["table.weight", "head.weight"]),
    "only_table": ({}, ["table.weight"]),
    "only_head": ({}, ["head.weight", "head.bias"]),
    "scaled_tied": ({"table": Scaled, "is_tied": True}, ["table.weight", "head.bias"]),
    "padding_first": ({"padding_idx": 0}, ["table.weight", "head.weight", "head.bias"]),
    "padding_last": ({"padding_idx": -1}, ["table.weight", "head.weight", "head.bias"]),
    "padding_tied": ({"padding_idx": 9, "is_tied": True}, ["table.weight", "head.bias"]),
}


def _small_models(
    rank: int, size: int, tokens: int, loss_parallel: LossParallel, kind: torch.dtype
) -> dict[str, tuple[float, float]]:
    errors = {}
    for name, (settings, names) in CASES.items():
        whole, model = small(tokens, **settings).to(kind), small(tokens, **settings).to(kind)
        plan, vocabularies = divide(model, names, loss_parallel)
        if settings.get("is_tied"):
            assert model.head.weight is model.table.weight
        ids = _tokens(tokens)
        ids[0, :2] = settings.get("padding_idx", 0) % tokens
        losses = []
        for each in (whole, model):
            for _ in range(2):  # gradients accumulate
                loss = F.cross_entropy(each(ids).view(-1, tokens), ids.roll(1).view(-1))
                loss.backward()
            losses.append(loss.detach())
        errors[name] = relative(losses[1], losses[0]), worst_gradient(model, whole, plan)
        assert all(each.gathered_for == {} for each in vocabularies)
        padding = settings.get("padding_idx")
        if padding is not None and not settings.get("is_tied"):
            row = padding % tokens - vocabularies[0].start
            if 0 <= row < vocabularies[0].length:
                gradient = model.table.weight.grad
                assert gradient is not None
                assert not gradient[row].any()
    return errors


@pytest.mark.sample("2-16-auto")
@pytest.mark.ranks
@pytest.mark.parametrize("loss_parallel", ["auto", False])
@pytest.mark.parametrize(("size", "tokens"), [(2, 16), (2, 15), (4, 18)])
def test_tables_and_heads_give_the_numbers_of_whole_ones(
    size: int, tokens: int, loss_parallel: LossParallel
) -> None:
    for errors in run_ranks(_small_models, size, tokens, loss_parallel, torch.float32):
        for loss_error, gradient_error in errors.values():
            assert loss_error < 1e-6
            assert gradient_error < 1e-5


@pytest.mark.full
@pytest.mark.ranks
def test_in_bf16_numbers_differ_by_roundings_of_it() -> None:
    # Sums over the ranks round gradients of inputs once more than one process does, to 8 bits;
    # through two layers that is a few units of the last digit, 2^-8 each.
    for errors in run_ranks(_small_models, 2, 16, "auto", torch.bfloat16):
        for loss_error, gradient_error in errors.values():
            assert loss_error < 2**-7
            assert gradient_error < 6 * 2**-8


def _unknown_tokens(rank: int, size: int) -> None:
    model = small(16)
    divide(model, CASES["untied"][1])
    for wrong in (16, -1, 40):
        with pytest.raises(IndexError):
            model(torch.tensor([0, wrong, 1, 2, 3]))


@pytest.mark.full
@pytest.mark.ranks
def test_a_token_that_no_rank_has_is_refused_by_all() -> None:
    run_ranks(_unknown_tokens, 2)


def _messages_of_a_step(rank: int, size: int) -> list[tuple[str, int]]:
    model = small(1000, is_tied=True)
    divide(model, ["table.weight", "head.bias"])
    ids = _tokens(1000)
    with counted_messages() as messages:
        F.cross_entropy(model(ids).view(-1, 1000), ids.view(-1)).backward()
    return messages.sent


@pytest.mark.full
@pytest.mark.ranks
def test_a_step_sums_activations_twice_and_three_numbers_per_position() -> None:
    positions = 4 * 5
    activations = 4 * positions * WIDTH
    assert (
        run_ranks(_messages_of_a_step, 2)
        == [
            [
                ("allreduce_", activations),  # what was looked up
                ("allreduce_", 4 * positions),
                ("allreduce_", 8 * positions),
                ("allreduce_", activations),  # the gradient of the head's input
            ]
        ]
        * 2
    )


REFUSED: dict[str, dict[str, Any]] = {
    "max_norm": {"max_norm": 1.0},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_table_that_counts_or_writes_its_rows_stays_whole_with_its_axis(reason: str) -> None:
    model = small(16, **REFUSED[reason])
    plan = plan_of(model, CASES["untied"][1], 2)
    kept = left_whole(plan, model)
    assert kept.sharded == {}
    assert {each.name for each in kept.whole} == set(CASES["untied"][1])
    assert all(reason.split("_")[0] in each.why for each in kept.whole)
    assert left_whole(plan, small(16)) is plan


def test_fewer_tokens_than_ranks_stay_whole() -> None:
    model = small(3)
    kept = left_whole(plan_of(model, ["head.weight"], 4), model)
    assert "3 tokens are fewer than 4 ranks" in kept.whole[0].why


HUGGING_FACE = {
    "gpt2": ["transformer.wte.weight", "lm_head.weight"],
    "gpt2_tied": ["transformer.wte.weight"],
    "llama": ["model.embed_tokens.weight", "lm_head.weight"],
    "bert": ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"],
    "t5": ["shared.weight"],
}


def _hugging_face(rank: int, size: int, kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    whole = make(kind).to(dtype)
    torch.manual_seed(0)
    model = make(kind).to(dtype)
    whole.train(), model.train()
    plan, vocabularies = divide(model, HUGGING_FACE[kind])
    ids = torch.randint(1, 31, (2, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    expected = whole(input_ids=ids, labels=labels).loss
    expected.backward()
    own_error = 0.0
    if dtype != torch.float32:  # what is to be compared with is the truth, and how far one is
        torch.manual_seed(0)
        rough, whole = whole, make(kind).train()
        expected = whole(input_ids=ids, labels=labels).loss
        expected.backward()
        own_error = worst_gradient(rough, whole, TensorPlan(1))
    with counted_messages() as messages:
        found = model(input_ids=ids, labels=labels)
        found.loss.backward()
    loss_error = relative(found.loss.detach(), expected.detach())
    assert type(found.logits).__name__ == "VocabularyTensor"
    assert all(each.gathered_for == {} for each in vocabularies)
    assert set(messages.by_name()) == {"allreduce_"}
    if kind in {"llama", "gpt2"}:
        counted = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss
        assert float(counted) == pytest.approx(float(found.loss) * (2 * 5 - 2) / 7, rel=1e-2)
    return loss_error, worst_gradient(model, whole, plan), own_error


@pytest.mark.sample("llama")
@pytest.mark.ranks
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_with_their_loss_inside_never_gather_their_31_tokens(kind: str) -> None:
    pytest.importorskip("transformers")
    for loss_error, gradient_error, _ in run_ranks(_hugging_face, 2, kind, torch.float32):
        assert loss_error < 1e-6
        assert gradient_error < 1e-5


@pytest.mark.full
@pytest.mark.ranks
def test_models_in_bf16_with_their_loss_inside_are_as_near_to_fp32_as_one_process() -> None:
    pytest.importorskip("transformers")
    # Logits are the same numbers in one process, and losses are in fp32 in both. The gradient of
    # the last hidden states is a sum over ranks of values with 8 bits, and it passes six layers.
    for loss_error, gradient_error, own_error in run_ranks(
        _hugging_face, 2, "llama", torch.bfloat16
    ):
        assert loss_error < 2**-7
        assert 2**-8 < gradient_error < 2 * own_error
