"""Losses of microbatches, weighed, are the loss of the batch; or they are refused by name."""

import math
import re
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.loss.autograd_nodes import is_none
from boltmesh.strategies.pipeline.loss.log_rules import MicrobatchWeights, note
from boltmesh.strategies.pipeline.loss.loss_check import LossChecks
from boltmesh.strategies.pipeline.loss.weights import StepWeights
from tests.support.loss_table import (
    CLASSES,
    SCALE,
    TOKENS,
    WEIGHT,
    Batch,
    FunctionTrial,
    Loss,
    batch,
)


def each(x: Tensor, b: Batch) -> Tensor:
    """The loss of each token, (B, T)."""
    return F.cross_entropy(x.transpose(1, 2), b.known, reduction="none")


def flat(x: Tensor, b: Batch, **options: object) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), b.labels.flatten(), **options)  # type: ignore[arg-type]


def focal(x: Tensor, b: Batch) -> Tensor:
    losses = each(x, b)
    return ((1 - (-losses).exp()).square() * losses * b.mask).sum() / b.mask.sum()


def dice(x: Tensor, b: Batch) -> Tensor:
    found = x.sigmoid()
    return 1 - 2 * (found * b.targets).sum() / (found.sum() + b.targets.sum())


def contrastive(x: Tensor, _: Batch) -> Tensor:
    rows = F.normalize(x.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T.roll(1, 0), torch.arange(len(x)))


def hard_examples(x: Tensor, b: Batch, most: int = 4) -> Tensor:
    losses = each(x, b).flatten()
    return losses.topk(min(most, losses.numel())).values.mean()


def hard_tokens(x: Tensor, b: Batch) -> Tensor:
    """As BiSeNet's: those above a threshold, or the largest where these are few."""
    losses = each(x, b).flatten()
    hard = losses[losses > 0.35]
    return (hard if hard.numel() >= losses.numel() // 16 else losses.topk(3).values).mean()


def few_rows(x: Tensor, b: Batch) -> Tensor:
    if len(x) > 3:
        raise ValueError("3 rows at most")
    return flat(x, b)


def other_rows(x: Tensor, b: Batch) -> Tensor:
    """Of negatives that the batch names by their rows, as wav2vec 2.0 does."""
    return flat(x, b) - x[torch.tensor([8])].mean()


def ctc(x: Tensor, b: Batch, reduction: str = "mean") -> Tensor:
    lengths = torch.full((len(x),), TOKENS)
    labels = b.known[:, :3].clamp(min=1)
    return F.ctc_loss(
        x.log_softmax(-1).transpose(0, 1), labels, lengths, lengths // 2, reduction=reduction
    )


def binary(x: Tensor, b: Batch) -> Tensor:
    return F.binary_cross_entropy(x.abs() / (1 + x.abs()), b.targets)


def guarded(x: Tensor, b: Batch) -> Tensor:
    """As in many repositories: nothing to learn is a loss without a graph."""
    return flat(x, b) if bool(b.mask.any()) else torch.zeros((), requires_grad=True)


def z_loss(x: Tensor, b: Batch) -> Tensor:
    squares = x.logsumexp(-1).square()
    return flat(x, b) + 1e-2 * (squares * b.mask).sum() / b.mask.sum()


RIGHT: dict[str, Loss] = {
    # cross_entropy in its forms
    "tokens that count": flat,
    "tokens of two dimensions": lambda x, b: F.cross_entropy(x.transpose(1, 2), b.labels),
    "weights of classes": lambda x, b: flat(x, b, weight=torch.arange(1.0, 11.0)),
    "smoothed labels": lambda x, b: flat(x, b, label_smoothing=0.1),
    "smoothed and weighted": lambda x, b: flat(
        x, b, label_smoothing=0.1, weight=torch.arange(1.0, 11.0)
    ),
    "class probabilities": lambda x, b: F.cross_entropy(x[:, 0], b.targets[:, 0].softmax(-1)),
    "class probabilities, 3-d": lambda x, b: F.cross_entropy(
        x.transpose(1, 2), b.targets.softmax(-1).transpose(1, 2)
    ),
    "nll": lambda x, b: F.nll_loss(x.log_softmax(-1).flatten(0, 1), b.labels.flatten()),
    "sum": lambda x, b: flat(x, b, reduction="sum"),
    "flat sum over rows": lambda x, b: flat(x, b, reduction="sum") / len(x),
    "flat sum over tokens": lambda x, b: flat(x, b, reduction="sum") / b.labels.numel(),
    "sum over tokens that count": lambda x, b: flat(x, b, reduction="sum") / b.mask.sum(),
    "sum over a number of tokens": lambda x, b: (
        flat(x, b, reduction="sum") / max(int(b.mask.sum()), 1)
    ),
    # masks
    "a mask": lambda x, b: (each(x, b) * b.mask).sum() / b.mask.sum(),
    "a mask, never zero": lambda x, b: (each(x, b) * b.mask).sum() / b.mask.sum().clamp(min=1),
    "a mask, a little more": lambda x, b: (each(x, b) * b.mask).sum() / (b.mask.sum() + 1e-8),
    "a mask divided first": lambda x, b: (each(x, b) * b.mask / b.mask.sum()).sum(),
    "a mask by where": lambda x, b: (
        torch.where(b.mask > 0, each(x, b), 0).sum() / b.mask.sum().clamp(min=1)
    ),
    "a mask by masked_fill": lambda x, b: (
        each(x, b).masked_fill(b.mask == 0, 0).sum() / b.mask.sum().clamp(min=1)
    ),
    "a mask by index": lambda x, b: each(x, b)[b.mask > 0].sum() / b.mask.sum().clamp(min=1),
    "a mask by index, mean": lambda x, b: each(x, b)[b.mask > 0].mean(),
    "einsum with a mask": lambda x, b: torch.einsum("bt,bt->", each(x, b), b.mask) / b.mask.sum(),
    "dot with a mask": lambda x, b: (
        torch.dot(each(x, b).flatten(), b.mask.flatten()) / b.mask.sum()
    ),
    "means of rows": lambda x, b: ((each(x, b) * b.mask).sum(1) / (b.mask.sum(1) + 1)).mean(),
    "focal": focal,
    "focal, guarded": guarded,
    "guarded by zeros": lambda x, b: flat(x, b) if bool(b.mask.any()) else 0 * x.sum(),
    "z-loss": z_loss,
    # numbers
    "a sum over a constant": lambda x, b: each(x, b).sum() / 8,
    "a sum over rows": lambda x, b: each(x, b).sum() / len(x),
    "a sum times 1/n": lambda x, b: each(x, b).sum() * (1 / len(x)),
    "divided before the sum": lambda x, b: (each(x, b) / len(x)).sum(),
    "a constant before the sum": lambda x, b: (each(x, b) / TOKENS).sum(),
    "summed over rows, then all": lambda x, b: each(x, b).sum(0).sum() / len(x),
    "summed over rows, then a mean": lambda x, b: each(x, b).sum(0).mean(),
    "a sum of dims": lambda x, b: each(x, b).sum(dim=(0, 1)),
    "cat of vectors": lambda x, b: torch.cat([each(x, b)[:, 0], x[:, 0, 0].abs()]).sum(),
    "mean": lambda x, _: x.square().mean(),
    "mean of means": lambda x, _: x.square().mean((1, 2)).mean(),
    "mean over rows, then the rest": lambda x, _: x.square().mean(0).mean(),
    "sum of means over rows": lambda x, _: x.square().mean(0).sum(),
    "mean of sums": lambda x, _: x.square().sum((1, 2)).mean(),
    "a term that is switched off": lambda x, b: flat(x, b) + 0.0 * flat(x * 2, b),
    "an average with a negative sign": lambda x, b: -(-each(x, b)).mean(),
    "the largest of each row": lambda x, b: each(x, b).topk(2, dim=1).values.mean(),
    "hard tokens": hard_tokens,
    "a nan guard": lambda x, b: torch.nan_to_num(each(x, b).mean()),
    # several terms
    "two means over the same": lambda x, b: x.abs().mean() + 0.5 * each(x, b).mean(),
    "a stack": lambda x, b: torch.stack([each(x, b).mean(), x.square().mean()]).sum(),
    "the mean of a stack": lambda x, b: torch.stack([flat(x, b), 2 * flat(x, b)]).mean(),
    "a list summed": lambda x, b: sum([x.abs().mean(), x.square().mean()]),
    "a penalty": lambda x, b: flat(x, b) + 1e-2 * WEIGHT.norm() + 1e-3 * WEIGHT.square().sum(),
    "a mean penalty": lambda x, b: flat(x, b) + WEIGHT.abs().mean(),
    "a learned weight of the loss": lambda x, b: (-SCALE).exp() * flat(x, b) + SCALE,
    "a temperature": lambda x, b: flat(x / SCALE, b) / SCALE,
    # the rest of torch.nn.functional
    "mse": lambda x, b: F.mse_loss(x, b.targets),
    "mse, sum": lambda x, b: F.mse_loss(x, b.targets, reduction="sum"),
    "l1": lambda x, b: F.l1_loss(x, b.targets),
    "smooth l1": lambda x, b: F.smooth_l1_loss(x, b.targets),
    "huber": lambda x, b: F.huber_loss(x, b.targets, reduction="sum"),
    "binary": binary,
    "binary with logits": lambda x, b: F.binary_cross_entropy_with_logits(x, b.targets),
    "binary with logits, sum": lambda x, b: F.binary_cross_entropy_with_logits(
        x, b.targets, reduction="sum"
    ),
    "kl, batchmean": lambda x, b: F.kl_div(
        x.log_softmax(-1), b.targets.softmax(-1), reduction="batchmean"
    ),
    "kl, mean": lambda x, b: F.kl_div(x.log_softmax(-1), b.targets.softmax(-1), reduction="mean"),
    "kl, sum": lambda x, b: F.kl_div(x.log_softmax(-1), b.targets.softmax(-1), reduction="sum"),
    "ctc": ctc,
    "ctc, sum": lambda x, b: ctc(x, b, "sum"),
    "poisson": lambda x, b: F.poisson_nll_loss(x, b.targets),
    "gaussian": lambda x, b: F.gaussian_nll_loss(x, b.targets, x.square() + 0.1),
    "cosine embedding": lambda x, b: F.cosine_embedding_loss(
        x[:, 0], b.targets[:, 0], b.known[:, 0].sign() * 2 - 1
    ),
    "margin ranking": lambda x, b: F.margin_ranking_loss(x[:, 0], x[:, 1], b.targets[:, 0]),
    "triplet": lambda x, _: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2], margin=3.0),
    "multi margin": lambda x, b: F.multi_margin_loss(x[:, 0], b.known[:, 0]),
    "multilabel margin": lambda x, b: F.multilabel_margin_loss(
        x[:, 0], b.known[:, :1].expand(-1, CLASSES).contiguous()
    ),
    "multilabel soft margin": lambda x, b: F.multilabel_soft_margin_loss(
        x[:, 0], (b.targets[:, 0] > 0.5).float()
    ),
    "soft margin": lambda x, b: F.soft_margin_loss(x, b.targets.sign()),
    "hinge embedding": lambda x, b: F.hinge_embedding_loss(x, b.targets.sign()),
}
REFUSED: dict[str, tuple[Loss, str]] = {
    "dice": (dice, "Div divides by a number that is made of the batch"),
    "perplexity": (lambda x, b: flat(x, b).exp(), "Exp is not linear"),
    "root of a mean": (lambda x, b: F.mse_loss(x, b.targets).sqrt(), "Sqrt is not linear"),
    "logarithm of a mean": (lambda x, b: x.square().mean().log(), "Log is not linear"),
    "a product of means": (lambda x, b: x.square().mean() * x.abs().mean(), "Mul multiplies two"),
    "vector norm": (lambda x, b: x.norm(), "LinalgVectorNorm is not linear"),
    "logsumexp": (lambda x, b: x.flatten().logsumexp(0), "Logsumexp is not linear"),
    "median": (lambda x, b: each(x, b).median(), "Median is not linear"),
    "largest": (lambda x, b: each(x, b).max(), "Max is not linear"),
    "contrastive": (contrastive, r"is \S+ for 5 rows and \S+ for the same rows in microbatches"),
    "hard examples": (hard_examples, "Topk chooses among rows"),
    "more of them than of a few rows": (partial(hard_examples, most=40), "Topk chooses among rows"),
    "hard examples, sorted": (
        lambda x, b: each(x, b).flatten().sort(descending=True).values[:40].mean(),
        "Sort chooses among rows",
    ),
    "batch statistics": (
        lambda x, b: F.cross_entropy((x - x.mean(0)).transpose(1, 2), b.known),
        "for the same rows in microbatches of 3 and 2",
    ),
    "a root of the rows": (lambda x, b: each(x, b).sum() / len(x) ** 0.5, "neither a count"),
    "one more than the rows": (lambda x, b: each(x, b).sum() / (len(x) + 1), "neither a count"),
    "a mean and a sum": (lambda x, b: x.square().mean() + x.abs().sum(), "adds a mean and a sum"),
    "means over different things": (
        lambda x, b: flat(x, b) + x.square().mean(),
        "adds means over different things",
    ),
    "a sum and a penalty": (lambda x, b: each(x, b).sum() + WEIGHT.norm(), "count once for every"),
    "a step that cannot be tried": (
        few_rows,
        r"not be tried.*ValueError: 3 rows at most \(.*rows\)",
    ),
}
CUTS: dict[str, Sequence[int]] = {
    "even": (3, 3, 3),
    "uneven": (3, 2, 2, 2),
    "small last": (5, 5, 1),
    "an empty one": (5, 2, 4),
}


def weighed(
    loss: Loss, logits: Tensor, data: Batch, sizes: Sequence[int], proofs: LossChecks
) -> tuple[Tensor, list[Tensor]]:
    """Return a batch's loss and gradients from its microbatches."""
    step = proofs.of_step(lambda: FunctionTrial(loss, data))
    weights = StepWeights(step.read)
    total = torch.zeros((), dtype=logits.dtype)
    leaves = [logits, WEIGHT, SCALE]
    gradients = [torch.zeros_like(leaf) for leaf in leaves]
    start = 0
    kinds: dict[bool, range] = {}
    for size in sizes:
        part = loss(logits[start : start + size], data.part(start, size))
        kinds.setdefault(is_none(part), range(start, start + size))
        scaled, _ = weights.weigh(part, size)
        start += size
        total = total + scaled.detach()
        if scaled.requires_grad:  # a part in which nothing counts need not
            made: Sequence[Tensor | None] = torch.autograd.grad(scaled, leaves, allow_unused=True)
            gradients = [
                one if other is None else one + other
                for one, other in zip(gradients, made, strict=True)
            ]
    if len(kinds) > 1:
        step.prove_empty(kinds[False], kinds[True])
    return total / weights.total, [one / weights.total for one in gradients]


def logits_for(sizes: Sequence[int]) -> tuple[Tensor, Batch]:
    rows = sum(sizes)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(
        rows, TOKENS, CLASSES, generator=generator, dtype=torch.float64
    ).requires_grad_()
    return logits, batch(rows)


@pytest.mark.each_choice
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # of kl_div
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", RIGHT)
def test_weighed_microbatches_give_the_batch(name: str, cut: str) -> None:
    loss, sizes = RIGHT[name], CUTS[cut]
    logits, data = logits_for(sizes)
    try:
        whole = loss(logits, data)
        wanted: Sequence[Tensor | None] = torch.autograd.grad(
            whole, [logits, WEIGHT, SCALE], allow_unused=True
        )
    except RuntimeError:  # not for fp64
        logits = logits.detach().float().requires_grad_()
        whole = loss(logits, data)
        wanted = torch.autograd.grad(whole, [logits, WEIGHT, SCALE], allow_unused=True)
    value, gradients = weighed(loss, logits, data, sizes, LossChecks(torch.device("cpu")))
    torch.testing.assert_close(value, whole.detach(), rtol=1e-6, atol=1e-7, check_dtype=False)
    for made, one in zip(gradients, wanted, strict=True):
        expected = torch.zeros_like(made) if one is None else one
        torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-7, check_dtype=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_weights_put_together_is_refused(name: str) -> None:
    loss, message = REFUSED[name]
    sizes = CUTS["uneven"]
    logits, data = logits_for(sizes)
    proofs = LossChecks(torch.device("cpu"))
    with pytest.raises(ConfigError, match=message) as error:
        weighed(loss, logits.detach().float().requires_grad_(), data, sizes, proofs)
    assert "use schedule='gpipe'" in str(error.value)


def test_a_loss_of_rows_that_the_batch_names_by_number_is_refused_so() -> None:
    _, data = logits_for(CUTS["uneven"])
    checks = LossChecks(torch.device("cpu"))
    problem = checks.find_problem(lambda: FunctionTrial(other_rows, data))
    assert re.search(r"IndexError: index 8 is .*that count over all rows of a", str(problem))


def test_what_no_weights_put_together_may_be_one_microbatch() -> None:
    logits, data = logits_for([4])
    for loss, _ in REFUSED.values():
        weights = StepWeights(lambda _: None, is_single=True)
        scaled, _ = weights.weigh(loss(logits.float()[:3], data.part(0, 3)), 3)
        torch.testing.assert_close(
            scaled / weights.total, loss(logits.float()[:3], data.part(0, 3))
        )


def test_a_batch_in_which_nothing_counts_has_the_loss_of_one_process() -> None:
    logits, data = logits_for([4])
    data.labels[:] = -100
    value, gradients = weighed(flat, logits, data, [2, 2], LossChecks(torch.device("cpu")))
    assert value.isnan()
    assert flat(logits, data).isnan()
    assert gradients[0].isnan().all() or not gradients[0].any()


def test_a_batch_in_which_nothing_counts_has_gradients_of_zero_where_one_process_has() -> None:
    """By which momentum and weight decay go on."""
    logits, data = logits_for([4])
    data.labels[:] = -100
    for name in ("a mask, never zero", "sum over a number of tokens", "a mask by index"):
        step = LossChecks(torch.device("cpu")).of_step(partial(FunctionTrial, RIGHT[name], batch()))
        weights = StepWeights(step.read)
        for start in (0, 2):
            scaled, _ = weights.weigh(
                RIGHT[name](logits[start : start + 2], data.part(start, 2)), 2
            )
            (gradient,) = torch.autograd.grad(scaled, [logits])
            assert not gradient.any()


def test_microbatches_without_a_graph_are_worth_nothing() -> None:
    weights = StepWeights(lambda _: None)
    scaled, weight = weights.weigh(torch.tensor(3.0, requires_grad=True), 2)
    assert (float(scaled.detach()), weight, weights.total) == (0.0, 0.0, 0.0)


def test_a_loss_in_16_bits_is_weighed_in_32() -> None:
    logits, data = logits_for([7])
    step = LossChecks(torch.device("cpu")).of_step(lambda: FunctionTrial(flat, data))
    weights = StepWeights(step.read)
    for start, size in ((0, 4), (4, 3)):
        loss = flat(logits[start : start + size].bfloat16(), data.part(start, size))
        scaled, weight = weights.weigh(loss, size)
        assert scaled.dtype == torch.float32
        assert isinstance(weight, Tensor)
        assert weight.dtype == torch.float32


def test_a_term_that_is_added_to_a_loss_of_one_operator_is_seen() -> None:
    """The old form ends where it begins, and is no form of the new one."""
    logits, data = logits_for([4, 3])
    proofs = LossChecks(torch.device("cpu"))
    for loss in (flat, z_loss, flat):
        value, _ = weighed(loss, logits, data, [4, 3], proofs)
        torch.testing.assert_close(value, loss(logits, data).detach())


def test_another_form_of_the_loss_is_proved_when_it_comes() -> None:
    """Such as a term that is added after a number of steps."""
    logits, data = logits_for([7])
    proofs = LossChecks(torch.device("cpu"))
    for loss in (RIGHT["mean"], RIGHT["two means over the same"], RIGHT["mean"]):
        value, _ = weighed(loss, logits, data, [4, 3], proofs)
        torch.testing.assert_close(value, loss(logits, data).detach())
    with pytest.raises(ConfigError, match="Sqrt is not linear"):
        weighed(REFUSED["root of a mean"][0], logits, data, [4, 3], proofs)


def rare(rows: Sequence[int]) -> Batch:
    """A batch of 16 rows, of whose tokens very few count: some of these rows'."""
    data = batch(16)
    counts = torch.zeros_like(data.labels, dtype=torch.bool)
    for number, row in enumerate(rows):
        counts[row, : 1 + number] = True
    data.labels = data.known.masked_fill(~counts, -100)
    return data


RARE: dict[str, Loss] = {
    "a mask, never zero": RIGHT["a mask, never zero"],
    "a mask, a little more": RIGHT["a mask, a little more"],
    "a mask by index": RIGHT["a mask by index"],
    "sum over a number of tokens": RIGHT["sum over a number of tokens"],
}


def unmasked(x: Tensor, b: Batch) -> Tensor:
    return x.square().sum() / b.mask.sum().clamp(min=1)


def losses_and_wholes(loss: Loss, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
    """Train on batches of 16 rows, one after the other, in four microbatches each."""
    proofs, found = LossChecks(torch.device("cpu")), []
    for seed, data in enumerate(batches):
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn(16, TOKENS, CLASSES, generator=generator, dtype=torch.float64)
        logits = made.requires_grad_()
        value, gradients = weighed(loss, logits, data, [4, 4, 4, 4], proofs)
        whole = loss(logits, data)
        (wanted,) = torch.autograd.grad(whole, [logits])
        torch.testing.assert_close(gradients[0], wanted, rtol=1e-6, atol=1e-7)
        found.append((value.double(), whole.detach().double()))
    return found


@pytest.mark.parametrize("first", [[6, 7, 9], [0, 5, 9], [2, 13], []], ids=str)
@pytest.mark.parametrize("name", RARE)
def test_what_is_divided_by_a_count_of_few_rows_is_weighed_by_it(
    name: str, first: list[int]
) -> None:
    """``max(n, 1)`` is a constant for the first five rows and the last."""
    batches = [rare(first), rare([1, 4, 8]), rare([15]), batch(16)]
    for value, whole in losses_and_wholes(RARE[name], batches):
        torch.testing.assert_close(value, whole, rtol=1e-6, atol=1e-7)


def test_a_batch_that_tells_nothing_makes_no_count_forgotten() -> None:
    """Such as one on which a value is tried that is logged late."""
    loss, proofs = RARE["a mask, never zero"], LossChecks(torch.device("cpu"))
    nothing = rare([])
    of_batches = [(rare([0, 5, 9]), []), (nothing, ["late"]), *[(nothing, [])] * 9]
    for data, logged in [*of_batches, (rare([4, 9]), [])]:
        logits = torch.randn(16, TOKENS, CLASSES, dtype=torch.float64).requires_grad_()
        value, _ = weighed(loss, logits, data, [4, 4, 4, 4], proofs)
        if data is not nothing:
            torch.testing.assert_close(value, loss(logits, data).detach(), check_dtype=False)
        for name in logged:
            trial = partial(FunctionTrial, loss, data, lambda x, _: {"late": x.mean()})
            weights = MicrobatchWeights({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
            noted = [note(number, torch.tensor(1.0), {}) for number in range(2)]
            rule = proofs.of_step(trial).rules(weights)((name, None), noted)
            assert rule.fold == "mean"


def test_a_step_may_refuse_rows_that_are_alike() -> None:
    def particular(x: Tensor, b: Batch) -> Tensor:
        if len(x) == 5 and len(b.targets.unique(dim=0)) < 5:
            raise ValueError("rows are alike")
        return RARE["a mask, never zero"](x, b)

    for value, whole in losses_and_wholes(particular, [rare([6]), batch(16)]):
        torch.testing.assert_close(value, whole, rtol=1e-6, atol=1e-7)


def test_a_sum_of_all_over_a_count_of_few_rows_is_refused_when_one_comes() -> None:
    assert losses_and_wholes(unmasked, [rare([])])
    with pytest.raises(ConfigError, match="divided by what is a count for some rows only"):
        losses_and_wholes(unmasked, [rare([]), rare([7])])


def weighed_by_rare(x: Tensor, b: Batch) -> Tensor:
    positives = b.targets.sum()
    weight = (b.targets.numel() - positives) / positives.clamp(min=1)
    return F.binary_cross_entropy_with_logits(x, b.targets, pos_weight=weight)


@pytest.mark.parametrize("rows", [[[7]], [[], [7]], [[], [], [9, 10]], [[0, 6]]], ids=str)
def test_a_weight_that_is_counted_in_the_batch_is_refused_once_it_counts(
    rows: list[list[int]],
) -> None:
    """Rows without positives have the same loss for any weight of these."""
    batches = [batch(16) for _ in rows]
    for data, positives in zip(batches, rows, strict=True):
        data.targets = torch.zeros_like(data.targets)
        data.targets[positives, :2, 0] = 1.0
    for count in range(len(rows) - 1):
        for value, whole in losses_and_wholes(weighed_by_rare, batches[: count + 1]):
            torch.testing.assert_close(value, whole, rtol=1e-6, atol=1e-7)
    with pytest.raises(ConfigError, match="neither a mean nor a sum over rows"):
        losses_and_wholes(weighed_by_rare, batches)


def test_a_number_that_changes_from_batch_to_batch_is_no_count() -> None:
    """Such as a weight of the loss that grows from 1 on."""
    proofs = LossChecks(torch.device("cpu"))
    for share in (1.0, 1.0, 0.5, 0.25):

        def annealed(x: Tensor, b: Batch, share: float = share) -> Tensor:
            return each(x, b).sum() / torch.tensor(share)

        logits, data = logits_for([4, 4])
        value, _ = weighed(annealed, logits, data, [4, 4], proofs)
        torch.testing.assert_close(value, annealed(logits, data).detach(), check_dtype=False)


def test_a_term_that_was_switched_off_is_proved_once_it_counts() -> None:
    """By a factor that grows from 0 on."""
    logits, data = logits_for([4, 4])
    proofs = LossChecks(torch.device("cpu"))

    def of_row(share: float, x: Tensor, b: Batch) -> Tensor:
        return each(x, b).mean() + share * x.square().mean()

    def of_batch(share: float, x: Tensor, b: Batch) -> Tensor:
        return each(x, b).mean() + share * contrastive(x, b)

    for loss in (partial(of_row, 0.0), partial(of_row, 0.5), partial(of_batch, 0.0)):
        value, _ = weighed(loss, logits, data, [4, 4], proofs)
        torch.testing.assert_close(value, loss(logits, data).detach())
    with pytest.raises(ConfigError, match="neither a mean nor a sum over rows"):
        weighed(partial(of_batch, 0.5), logits, data, [4, 4], proofs)


def test_rows_without_a_loss_that_count_beside_others_are_refused() -> None:
    """As in a sum over those that count, divided by all rows."""
    proofs = LossChecks(torch.device("cpu"))

    def share(x: Tensor, b: Batch) -> Tensor:
        if not bool(b.mask.any()):
            return torch.zeros((), requires_grad=True)
        return (each(x, b) * b.mask).sum() / len(x)

    logits, data = logits_for([4, 4, 4, 4])
    gaps = Batch(data.labels, data.targets)
    data.labels = data.known
    value, _ = weighed(share, logits, data, [4, 4, 4, 4], proofs)
    torch.testing.assert_close(value, share(logits, data).detach())
    gaps.labels = data.labels.clone()
    gaps.labels[4:8] = -100
    with pytest.raises(ConfigError, match="neither a mean nor a sum over rows"):
        weighed(share, logits, gaps, [4, 4, 4, 4], proofs)


def test_a_loss_of_pairs_is_tried_on_rows_that_are_pairs() -> None:
    """Beside another loss, by which the few rows that are tried have one."""

    def pairs(x: Tensor, b: Batch) -> Tensor:
        is_pair = (b.known[:, 0, None] == b.known[None, :, 0]).double().fill_diagonal_(0)
        scores = F.normalize(x[:, 1], dim=1) @ F.normalize(x[:, 1], dim=1).T
        of_rows = (scores.log_softmax(1) * is_pair).sum(1) / is_pair.sum(1).clamp(min=1)
        return each(x, b).mean() - of_rows.mean()

    logits, data = logits_for([8, 8])
    data.labels = data.known
    data.labels[:, 0] = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 9, 8, 5, 6, 7])
    with pytest.raises(ConfigError, match="neither a mean nor a sum over rows"):
        weighed(pairs, logits, data, [8, 8], LossChecks(torch.device("cpu")))


def test_hard_tokens_are_refused_once_a_microbatch_has_few() -> None:
    logits, data = logits_for([4, 4])
    proofs = LossChecks(torch.device("cpu"))
    value, _ = weighed(hard_tokens, logits, data, [4, 4], proofs)
    torch.testing.assert_close(value, hard_tokens(logits, data).detach())
    sure = logits + 20 * F.one_hot(data.known, CLASSES)
    with pytest.raises(ConfigError, match="Topk chooses among rows"):
        weighed(hard_tokens, sure, data, [4, 4], proofs)


@pytest.mark.parametrize(
    "factor", [math.inf, math.nan, torch.tensor(math.inf), torch.tensor(math.nan)]
)
def test_what_overflows_stays_so(factor: float | Tensor) -> None:
    """By which a loss scaler skips the step."""
    logits, data = logits_for([4])

    def step(logits: Tensor, data: Batch) -> Tensor:
        return flat(logits, data) * factor

    proofs = LossChecks(torch.device("cpu")).of_step(partial(FunctionTrial, step, batch()))
    weights = StepWeights(proofs.read)
    for start in (0, 2):
        scaled, weight = weights.weigh(step(logits[start : start + 2], data.part(start, 2)), 2)
        assert not scaled.isfinite()
        assert 0 < float(weight) < math.inf
