"""Functions on divided logits give what they give on whole ones, and gather only where told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from boltmesh.strategies.tensor.runtime.vocab_tensor import VocabularyTensor, gathered
from tests.support.ranks import run_ranks
from tests.support.vocabularies import counted_messages, divided_leaf, vocabulary_of

pytestmark = pytest.mark.ranks

B, T = 3, 5
Use = Callable[[Tensor], Any]


def _labels(tokens: int) -> Tensor:
    labels = torch.arange(B * T).view(B, T) * 7 % tokens
    labels[0, :2] = -100
    return labels


def _causal_lm(logits: Tensor, reduction: str) -> Tensor:
    """As transformers.loss.loss_utils writes it."""
    labels = F.pad(_labels(logits.shape[-1]), (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.float().view(-1, logits.shape[-1])
    loss = F.cross_entropy(logits, labels.view(-1), ignore_index=-100, reduction=reduction)
    return loss / torch.tensor(9) if reduction == "sum" else loss


def _older_causal_lm(logits: Tensor) -> Tensor:
    shift = logits[..., :-1, :].contiguous()
    labels = _labels(logits.shape[-1])[..., 1:].contiguous()
    criterion = torch.nn.CrossEntropyLoss()
    return criterion(shift.view(-1, shift.size(-1)), labels.view(-1))


def _chosen_log_probabilities(logits: Tensor) -> Tensor:
    labels = _labels(logits.shape[-1]).clamp(min=0)
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _add_in_place(logits: Tensor) -> Tensor:
    logits = logits * 1
    logits += 1
    logits.div_(3.0)
    logits[:, 0] = 0.0
    return logits.pow(2)


def _write_some_tokens(logits: Tensor) -> Tensor:
    logits = logits * 1
    logits[:, :, [0, 3]] = -1e4
    logits.index_fill_(2, torch.tensor([4]), 2.0)
    return logits.softmax(-1)


def _learned_cap(logits: Tensor) -> Tensor:
    return logits * 2 - logits.mean(-1, keepdim=True).expand(-1, -1, logits.shape[-1])


def _mixed_uses(logits: Tensor) -> Tensor:
    """Gradients come back in parts and whole, and are added up."""
    return logits.tanh().sum() + torch.var(logits) + logits.sort(-1).values[..., -2:].sum()


class _Scaled(torch.autograd.Function):
    """Custom functions call no rule on their way in, and give whole gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return torch.cumsum(values, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        assert values.shape == gradient.shape
        return gradient.flip(-1).cumsum(-1).flip(-1)


def _hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 3)
    return logits.exp()


DIVIDED: dict[str, Use] = {
    "causal_lm": lambda x: _causal_lm(x, "mean"),
    "causal_lm_num_items": lambda x: _causal_lm(x, "sum"),
    "older_causal_lm": _older_causal_lm,
    "class_dim_second": lambda x: F.cross_entropy(x.transpose(1, 2), _labels(x.shape[-1])),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), _labels(x.shape[-1])),
    "unbatched": lambda x: F.cross_entropy(x[0, 0], torch.tensor(3)),
    "nll": lambda x: F.nll_loss(
        F.log_softmax(x.flatten(0, 1), dim=-1), _labels(x.shape[-1]).flatten(), reduction="sum"
    ),
    "nll_weighted": lambda x: F.nll_loss(
        F.log_softmax(x, -1).mT, _labels(x.shape[-1]), weight=torch.arange(float(x.shape[-1]))
    ),
    "keywords": lambda x: F.cross_entropy(
        input=x.reshape(-1, x.shape[-1]), target=_labels(x.shape[-1]).reshape(-1)
    ),
    "only_labelled": lambda x: F.cross_entropy(
        x[_labels(x.shape[-1]) != -100], _labels(x.shape[-1])[_labels(x.shape[-1]) != -100]
    ),
    "last_position": lambda x: x[:, -1].softmax(-1),
    "slices": lambda x: x[1:, ::2, :][None].pow(2),
    "positions": lambda x: x[torch.arange(B), torch.tensor([0, 4, 2])].pow(2),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2])).abs(),
    "softcap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "masked_fill": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 3 == 0, -9.0).softmax(-1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())).pow(2),
    "bias": lambda x: (x + torch.arange(float(x.shape[-1]))).pow(2),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "z_loss": lambda x: x.logsumexp(-1).pow(2).mean(),
    "sum_of_all": lambda x: x.pow(2).mean() + x.sum((0, 2)).pow(2).sum(),
    "sum_of_positions": lambda x: x.mean(1, keepdim=True).pow(2) + x.sum(0).exp(),
    "chosen": _chosen_log_probabilities,
    "pieces": lambda x: torch.stack([c.exp().sum() for c in x.split(2, dim=1)]),
    "rows": lambda x: sum(row.pow(2).sum() for row in x),
    "join": lambda x: torch.cat([x, x * 2], dim=1).pow(2) + torch.stack([x, x], 2).sum(2).sum(),
    "best": lambda x: x.max(-1).values,
    "best_value": lambda x: x[..., None, :].max(dim=-1, keepdim=True)[0].squeeze(),
    "in_place": _add_in_place,
    "centred": _learned_cap,
    "softmax_of_positions": lambda x: F.softmax(x, dim=1),
    "hooks": _hooked,
    "checkpoint": lambda x: checkpoint(lambda y: y.exp() * 2, x, use_reentrant=False),
    "reentrant_checkpoint": lambda x: checkpoint(lambda y: y.exp() * 2, x, use_reentrant=True),
    "new": lambda x: x.new_ones(2).sum() * x.exp() + torch.zeros_like(x),
    "typed": lambda x: x.to(torch.float64).type_as(x).double().exp(),
}

GATHERED: dict[str, Use] = {
    "kl": lambda x: F.kl_div(x.log_softmax(-1), torch.ones_like(x) / x.shape[-1], reduction="sum"),
    "some_tokens": lambda x: x[..., :4].pow(2),
    "one_token": lambda x: x[:, :, 2].pow(2),
    "flat": lambda x: x.view(-1)[3:].pow(2),
    "topk": lambda x: x.topk(3, -1).values,
    "split_tokens": lambda x: x.split(4, dim=-1)[1].exp(),
    "mse": lambda x: F.mse_loss(x, torch.ones(x.shape)),
    "written": _write_some_tokens,
    "mixed": _mixed_uses,
    "custom": lambda x: _Scaled.apply(x),
    "flipped": lambda x: x.flip(-1) * torch.arange(float(x.shape[-1])),
    "einsum": lambda x: torch.einsum("btv,btv->b", x, x),
    "mixed_cat": lambda x: torch.cat([x, torch.ones(x.shape)], dim=1).pow(2),
}


def _weighted(result: Tensor) -> Tensor:
    """A sum in which no two elements count alike."""
    weights = torch.linspace(1.0, 2.0, result.numel(), dtype=result.dtype)
    return (gathered(result) * weights.view(result.shape)).sum()


def _every_use(rank: int, size: int, tokens: int, names: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    whole_values = torch.randn(B, T, tokens)
    noted = {}
    for name in names:
        use = {**DIVIDED, **GATHERED}[name]
        vocabulary = vocabulary_of(tokens)
        whole = whole_values.clone().requires_grad_()
        part, divided = divided_leaf(whole_values, vocabulary, 2)
        expected = use(whole * 1)
        with counted_messages() as messages:
            found = use(divided)
        assert isinstance(found, Tensor)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        noted[name] = bool(vocabulary.gathered_for)
        if not noted[name]:
            # 4 bytes of logits per token and position; two numbers per position may be joined.
            limit = 8 * B * T * size
            assert all(number <= limit for _, number in messages.sent), (name, messages.sent)
        torch.testing.assert_close(gathered(found), expected, rtol=1e-5, atol=1e-6, msg=name)
        _weighted(expected).backward()
        _weighted(found).backward()
        assert part.grad is not None, name
        assert whole.grad is not None, name
        own = vocabulary.own(whole.grad, 2)
        torch.testing.assert_close(part.grad, own, rtol=1e-5, atol=1e-6, msg=name)
    return noted


@pytest.mark.sample("2-11")
@pytest.mark.parametrize(("size", "tokens"), [(2, 16), (2, 11), (4, 19)])
def test_what_has_a_rule_stays_divided_and_what_has_none_gathers(size: int, tokens: int) -> None:
    expected = dict.fromkeys(DIVIDED, False) | dict.fromkeys(GATHERED, True)
    assert run_ranks(_every_use, size, tokens, list(expected)) == [expected] * size


def _questions(rank: int, size: int) -> None:
    vocabulary = vocabulary_of(11)
    _, logits = divided_leaf(torch.randn(B, T, 11), vocabulary, 2)
    with counted_messages() as messages:
        assert logits.shape == (B, T, 11)
        assert (logits.size(-1), logits.dim(), len(logits), logits.numel()) == (11, 3, B, 165)
        assert logits.dtype == torch.float32
        assert logits.requires_grad
        assert not logits.is_leaf
        assert logits.is_floating_point()
        assert not logits.detach().requires_grad
        assert isinstance(logits, VocabularyTensor)
        assert "divided" in repr(logits)
        assert "divided" in f"{logits}"
        assert logits.cpu().device.type == "cpu"
    assert messages.sent == []
    tokens = logits.argmax(-1)
    assert type(tokens) is Tensor
    assert torch.equal(tokens, gathered(logits).argmax(-1))
    assert [tuple(each.shape) for each in gathered({"logits": [logits]})["logits"]] == [(B, T, 11)]


@pytest.mark.full
def test_questions_about_logits_move_nothing() -> None:
    run_ranks(_questions, 2)


def _ties(rank: int, size: int) -> None:
    values = torch.zeros(2, 12)
    values[1, [3, 9]] = 5.0
    _, logits = divided_leaf(values, vocabulary_of(12), 1)
    assert logits.argmax(-1).tolist() == [0, 3]
    assert logits.max(1).indices.tolist() == [0, 3]


@pytest.mark.full
def test_the_first_of_several_best_tokens_wins_whichever_rank_has_it() -> None:
    run_ranks(_ties, 4)


def _gradient_of_logits(rank: int, size: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 10)
    vocabulary = vocabulary_of(10)
    _, logits = divided_leaf(values, vocabulary, 1)
    whole = values.requires_grad_()
    labels = torch.tensor([1, 9, 5, 0])
    (expected,) = torch.autograd.grad(F.cross_entropy(whole, labels), whole)
    (found,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits, retain_graph=True)
    torch.testing.assert_close(gathered(found), expected)
    logits.retain_grad()
    F.cross_entropy(logits, labels).backward()
    torch.testing.assert_close(gathered(logits.grad), expected)


@pytest.mark.full
def test_gradients_of_logits_themselves_can_be_asked_for() -> None:
    run_ranks(_gradient_of_logits, 2)


def _learned(rank: int, size: int) -> None:
    """What is alike on all ranks and meets divided logits has a partial gradient: summed."""
    torch.manual_seed(0)
    values = torch.randn(B, T, 11)
    for shape in ((), (1,), (T, 1), (11,), (B, 1, 11)):
        learned, copy = torch.ones(shape), torch.ones(shape)
        learned.requires_grad_()
        copy.requires_grad_()
        _, logits = divided_leaf(values, vocabulary_of(11), 2)
        (F.log_softmax(logits * learned + learned, -1) * 0.5).logsumexp(-1).sum().backward()
        (F.log_softmax(values * copy + copy, -1) * 0.5).logsumexp(-1).sum().backward()
        assert learned.grad is not None
        assert copy.grad is not None
        torch.testing.assert_close(learned.grad, copy.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_a_learned_temperature_or_bias_gets_the_gradient_of_all_tokens() -> None:
    run_ranks(_learned, 2)


def _views(rank: int, size: int) -> None:
    _, logits = divided_leaf(torch.randn(B, T, 12), vocabulary_of(12), 2)
    logits = logits * 1
    logits[:, 0].mul_(2)
    with pytest.raises(RuntimeError, match="A view of logits"):
        logits.exp()
    with pytest.raises(NotImplementedError, match="cannot be set"):
        logits.data = torch.zeros(B, T, 12)


@pytest.mark.full
def test_writing_to_a_view_is_refused_when_its_history_would_be_lost() -> None:
    run_ranks(_views, 2)


def _gathers(rank: int, size: int) -> dict[str, int]:
    vocabulary = vocabulary_of(10)
    _, logits = divided_leaf(torch.randn(2, 10), vocabulary, 1)
    logits.std()
    logits.std()
    logits.sort()
    return vocabulary.gathered_for


@pytest.mark.full
def test_gathers_are_counted_by_function() -> None:
    for counted in run_ranks(_gathers, 2):
        assert counted == {"std": 2, "sort": 1}
