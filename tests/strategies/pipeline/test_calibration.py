"""The end of a step is tried on a few rows, and nothing but what was proved is left of it."""

import random
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.loss.calibration import prove
from boltmesh.strategies.pipeline.loss.log_rules import LogRule, MicrobatchWeights, combine
from boltmesh.strategies.pipeline.loss.loss_check import MOST_TRIES, LossChecks
from boltmesh.strategies.pipeline.loss.trial import SharedDraws, TailTrial
from boltmesh.strategies.pipeline.loss.weights import StepWeights
from boltmesh.strategies.pipeline.microbatch import Rows
from boltmesh.strategies.pipeline.microbatch_runs import MicrobatchRun, SentScalars
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from boltmesh.strategies.pipeline.step_report import StepLogs
from tests.support.loss_table import CLASSES, TOKENS, Batch, FunctionTrial, batch

CPU = torch.device("cpu")


def token_loss(x: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), b.labels.flatten())


def logs(x: Tensor, b: Batch) -> dict[str, Any]:
    """What people log."""
    hits = (x.argmax(-1) == b.labels).float() * b.mask
    each = F.cross_entropy(x.transpose(1, 2), b.known, reduction="none")
    return {
        "loss": token_loss(x, b),
        "accuracy": hits.sum() / b.mask.sum(),
        "share": hits.mean(),
        "hits": int(hits.sum()),
        "hits of floats": hits.sum(),
        "perplexity": token_loss(x, b).exp(),
        "root": each.square().mean().sqrt(),
        "worst": each.max(),
        "best": each.min(),
        "length": x.shape[1],
        "rate": 0.1,
        "median": each.median(),
    }


RULES = {
    "loss": LogRule("mean", "own"),
    "accuracy": LogRule("mean", "loss"),
    "share": LogRule("mean", "rows"),
    "hits": LogRule("sum"),
    "hits of floats": LogRule("sum"),
    "perplexity": LogRule("mean", "loss", "logarithms"),
    "root": LogRule("mean", "rows", "squares"),
    "worst": LogRule("max"),
    "best": LogRule("min"),
    "length": LogRule("mean", "loss"),
    "rate": LogRule("mean", "loss"),
}
WEIGHTS = MicrobatchWeights({0: 5.0, 1: 1.0}, {0: 2.0, 1: 2.0})


def rule(proofs: LossChecks, name: str, trial: FunctionTrial) -> LogRule:
    noted = [
        trial.run(trial.rows(range(2)), values(trial, 2), nullcontext()).logged[name, None]
    ] * 2
    return proofs.of_step(lambda: trial).rules(WEIGHTS)((name, None), noted)


def values(trial: FunctionTrial, rows: int) -> list[Tensor]:
    specs = trial.values_in(trial.rows(range(rows)))
    return [torch.randn(spec.shape).requires_grad_() for spec, _ in specs]


def test_logged_values_get_the_rule_that_gives_the_whole() -> None:
    trial, proofs = FunctionTrial(token_loss, batch(), logs), LossChecks(CPU)
    with pytest.warns(UserWarning, match="logs 'median', which for a batch is neither"):
        found = {name: rule(proofs, name, trial) for name in RULES}
    assert found == RULES
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert rule(proofs, "median", trial) == LogRule("mean", "loss")


def test_a_rule_that_one_batch_leaves_open_is_decided_by_another() -> None:
    even = batch()
    even.labels[:] = even.known
    proofs = LossChecks(CPU)
    trial = FunctionTrial(token_loss, even, logs)
    with pytest.warns(UserWarning, match="median"):
        assert rule(proofs, "share", trial) == LogRule("mean", "loss")
    assert rule(proofs, "share", FunctionTrial(token_loss, batch(), logs)).weights == "rows"


def shown(
    proofs: LossChecks, log: Callable[[Tensor, Batch], Mapping[str, Any]], data: Batch
) -> dict[str, tuple[float, float]]:
    """Return what is shown for a batch of 16 rows in four microbatches, and what it is."""
    trial = FunctionTrial(all_tokens, data, log)
    logits = torch.randn(16, TOKENS, CLASSES, generator=torch.Generator().manual_seed(7))
    outcomes = [
        trial.run(data.part(start, 4), [logits[start : start + 4]], nullcontext())
        for start in range(0, 16, 4)
    ]
    whole = trial.run(data, [logits], nullcontext())
    weights = MicrobatchWeights(dict.fromkeys(range(4), 4.0), dict.fromkeys(range(4), 4.0))
    found = {}
    for key, each in whole.logged.items():
        noted = [replace(one.logged[key], microbatch=at) for at, one in enumerate(outcomes)]
        rule = proofs.of_step(lambda: trial).rules(weights)(key, noted)
        found[key[0]] = float(combine(rule, noted, weights)), float(each.value)
    return found


def all_tokens(x: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(x.transpose(1, 2), b.known)


def flagged(rows: Sequence[int]) -> Batch:
    """16 rows, of which these have a label that the others have not."""
    data = batch(16)
    data.labels = data.known.clamp(max=CLASSES - 2)
    data.labels[:, -1] = CLASSES - 2
    data.labels[list(rows), :2] = CLASSES - 1
    return data


def rare_logs(x: Tensor, b: Batch) -> dict[str, Any]:
    positives = b.labels == CLASSES - 1
    return {
        "count": positives.float().sum(),
        "whole count": positives.sum(),
        "number": int(positives.sum()),
        "share": positives.float().mean(),
        "any": positives.any().float(),
        "largest label": b.labels.max().float(),
        "smallest distance": (CLASSES - b.labels).min().float(),
        "found": (positives & (x.argmax(-1) >= 0)).float().sum(),
    }


@pytest.mark.parametrize(
    "batches", [[[], [], [7, 9]], [[6, 8], [7]], [[], [9], [0, 1, 2]]], ids=str
)
def test_what_few_rows_have_is_counted_as_in_one_process(batches: list[list[int]]) -> None:
    """No count tells a sum from a mean where nothing was counted, and no maximum of equals does."""
    proofs = LossChecks(CPU)
    for rows in [*batches, [11], [0, 5, 15]]:
        for name, (value, whole) in shown(proofs, rare_logs, flagged(rows)).items():
            assert value == pytest.approx(whole, rel=1e-6), (name, rows)


def test_what_many_batches_have_not_is_counted_when_it_comes() -> None:
    proofs = LossChecks(CPU)
    for rows in [*[[]] * (3 * MOST_TRIES), [6, 7]]:
        found = shown(proofs, rare_logs, flagged(rows))
    assert found["count"] == (4.0, 4.0)
    assert found["largest label"] == (CLASSES - 1, CLASSES - 1)


@pytest.mark.parametrize("numbers", [[0, 0, 1, 5], [0.0, 0.0, 0.5], [3, 0, 1], [-1, 0, 2]], ids=str)
def test_a_number_that_no_row_changes_is_shown_as_it_is(numbers: list[float]) -> None:
    """Such as ``global_step``, which is 0 at first."""
    proofs = LossChecks(CPU)
    for number in numbers:
        given = {"number": number, "tensor": torch.tensor(number)}
        found = shown(proofs, lambda *_, given=given: given, flagged([7]))
        assert found == {"number": (number, number), "tensor": (number, number)}


def test_what_no_batch_tells_is_shown_with_a_warning() -> None:
    """Rows by themselves, and the first and the last ones, log nothing but zeros."""

    def log(_: Tensor, b: Batch) -> dict[str, Any]:
        return {"pairs": torch.tensor(float(len(b.labels) in {4, 16}))}

    proofs = LossChecks(CPU)
    for _ in range(MOST_TRIES - 2):  # the first one finds what rules there are
        shown(proofs, log, flagged([7]))
    with pytest.warns(UserWarning, match="logs 'pairs', and 8 batches did not show.*their mean"):
        shown(proofs, log, flagged([7]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown(proofs, log, flagged([7]))


def test_noise_and_permutations_of_rows_are_no_batch_statistics() -> None:
    def mixup(x: Tensor, b: Batch) -> Tensor:
        order, share = torch.randperm(len(x)), torch.rand(())
        noisy = x + torch.randn_like(x)
        return share * F.cross_entropy(noisy.transpose(1, 2), b.known) + (
            1 - share
        ) * F.cross_entropy(F.dropout(noisy, 0.5).transpose(1, 2), b.known[order])

    proof = prove(FunctionTrial(mixup, batch()))
    assert proof is not None
    assert set(proof.form.kinds.values()) == {"mean"}


def test_a_whole_draws_what_its_parts_drew() -> None:
    draws, drawn = SharedDraws(), []
    for rows in (3, 2):
        with draws.of_part():
            drawn.append((torch.randn(rows, 2), torch.randperm(rows), torch.rand(4)))
    with draws.of_whole():
        noise, order, shared = torch.randn(5, 2), torch.randperm(5), torch.rand(4)
    assert torch.equal(noise, torch.cat([drawn[0][0], drawn[1][0]]))
    assert torch.equal(order, torch.cat([drawn[0][1], drawn[1][1] + 3]))
    assert torch.equal(shared, drawn[0][2])
    assert torch.equal(shared, drawn[1][2])


def test_probabilities_are_tried_where_random_numbers_are_refused() -> None:
    def binary(x: Tensor, b: Batch) -> Tensor:
        return F.binary_cross_entropy(x, b.targets.to(x.dtype))

    proof = prove(FunctionTrial(binary, batch()))
    assert proof is not None
    assert proof.form.kinds == {(): "mean"}


def test_a_step_without_a_loss_proves_nothing() -> None:
    assert prove(FunctionTrial(lambda *_: None, batch())) is None


def with_scalar(given: Any, b: Batch) -> Tensor:
    logits, scalar = given
    return F.cross_entropy(logits.transpose(1, 2), b.known) + 0.01 * scalar


def test_a_scalar_of_a_layer_is_worth_its_rows() -> None:
    data = batch()
    step = LossChecks(CPU).of_step(lambda: FunctionTrial(with_scalar, data, scalars=1))
    weights = StepWeights(step.read)
    received = [torch.tensor(each, requires_grad=True) for each in (3.0, 5.0)]
    logits = torch.randn(3, 6, 10, requires_grad=True)
    total = torch.zeros(())
    for scalar, start, rows in zip(received, (0, 2), (2, 1), strict=True):
        loss = with_scalar((logits[start : start + rows], scalar), data.part(start, rows))
        total = total + weights.weigh(loss, rows)[0]
    (total / weights.total).backward()
    grads = [float(each.grad) for each in received if each.grad is not None]
    assert grads == pytest.approx([0.01 * 2 / 3, 0.01 / 3])


def test_a_scalar_beside_tokens_that_count_is_refused_where_they_differ() -> None:
    def loss(given: Any, b: Batch) -> Tensor:
        return token_loss(given[0], b) + given[1]

    with pytest.raises(ConfigError, match=r"over different things \(NllLoss over .*a layer over"):
        prove(FunctionTrial(loss, batch(), scalars=1))


SPEC = ValueSpec((), torch.float32, True, "the output of blocks.1")


def test_scalars_are_checked_where_they_are_made() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    SentScalars().check([x.square().mean()], [SPEC], 6)
    refused = {
        "a sum": lambda x: x.square().sum(),
        "a number": lambda x: x.sum() / 7,
        "a product of means": lambda x: x.mean() * x.square().mean(),
        "an unknown function": lambda x: x.norm(),
    }
    for function in refused.values():
        scalar = function(x)
        with pytest.raises(ConfigError, match=r"output of blocks.1 is a scalar.*microbatches=1"):
            SentScalars().check([scalar], [SPEC], 6)
    sent = SentScalars()
    sent.check([x[:3, 0].mean()], [SPEC], 3)
    of_one = x[3:, 0][torch.tensor([True, False, False])].mean()
    with pytest.raises(ConfigError, match="not a mean over the rows"):
        sent.check([of_one], [SPEC], 3)


class Traced(LightningModule):
    """Leaves traces wherever a step can."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.zeros(()))
        self.losses: list[Tensor] = []
        self.recent: deque[Tensor] = deque(maxlen=3)
        self.count = 0
        self.accuracy = MulticlassAccuracy(5)

    def training_step(self, given: Any, number: int) -> dict[str, Any]:
        x, y = given
        for block in self.blocks:
            x = block(x).relu()
        logits = self.head(x) * self.scale
        loss = F.cross_entropy(logits, y) + 0.1 * self.scale.square()
        self.count += 1
        self.steps += 1
        self.losses.append(loss.detach())
        self.recent.append(loss.detach())
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        self.log("noise", float(np.random.rand()) + random.random())
        return {"loss": loss, "right": (logits.argmax(-1) == y).sum()}


class Sized(Traced):
    """Says of what it logs how many samples it counts for."""

    def training_step(self, given: Any, number: int) -> dict[str, Any]:
        result = super().training_step(given, number)
        self.log_sizes(len(given[0]))
        return result

    def log_sizes(self, rows: int) -> None:
        self.log("by one", 1.0, batch_size=1)
        self.log("by eight", 1.0, batch_size=8)
        self.log("by rows", 1.0, batch_size=rows)
        self.log("by tokens", 1.0, batch_size=3 * rows)
        self.log("metric by one", self.accuracy, batch_size=1)
        self.log("metric by rows", self.accuracy, batch_size=rows)


def traced(kind: type[Traced] = Traced) -> tuple[Traced, TailTrial]:
    torch.manual_seed(0)
    module = kind()
    units = find_stage_units(module)
    plans = StagePlans(module, units, {name: index > 1 for index, name in enumerate(units)})
    data = torch.randn(8, 4), torch.arange(8) % 5
    run = MicrobatchRun("training_step", data, [data], (0,), {}, [5])
    return module, TailTrial(plans, run, Rows(8), nullcontext, CPU)


def test_a_module_is_as_it_was_after_a_trial() -> None:
    module, trial = traced()
    module.recent.append(torch.ones(()))
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    proof = prove(trial)
    assert proof is not None
    assert sorted(proof.form.kinds.values()) == ["mean", "penalty"]
    assert (module.count, float(module.steps), module.losses) == (0, 0.0, [])
    assert list(module.recent) == [torch.ones(())]
    assert not module.accuracy.update_called
    assert not any(torch.as_tensor(each).any() for each in module.accuracy.metric_state.values())
    assert all(each.grad is None for each in module.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert states[2] == random.getstate()
    assert "log" not in vars(module)


@pytest.mark.parametrize("sizes", [[1, 1], [3, 3, 2], [4, 4]], ids=str)
def test_a_batch_size_counts_once_for_all_microbatches_or_is_that_of_each(sizes: list[int]) -> None:
    module, trial = traced(Sized)
    assert isinstance(module, Sized)
    proofs, logs = LossChecks(CPU), StepLogs(module)
    assert proofs.find_problem(lambda: trial) is None
    for number, rows in enumerate(sizes):
        with logs.of_microbatch(number):
            module.log_sizes(rows)
    rows_of = {number: float(rows) for number, rows in enumerate(sizes)}
    weights = MicrobatchWeights(rows_of, rows_of)
    collected = logs.collected(weights, is_of_batch=proofs.is_size_of_batch)
    assert {each.name: each.options["batch_size"] for each in collected} == {
        "by one": 1,
        "by eight": 8,
        "by rows": sum(sizes),
        "by tokens": 3 * sum(sizes),
        "metric by one": 1,
        "metric by rows": sum(sizes),
    }


def test_numbers_beside_the_loss_are_proved_as_logs_are() -> None:
    _, trial = traced()
    proof = prove(trial)
    assert proof is not None
    logged = proof.cuts[0].whole.outcome.logged
    assert ("training_step's result", "right") in logged
    assert ("accuracy", None) not in logged


def near_pairs(x: Tensor, b: Batch) -> Tensor:
    """As pytorch-metric-learning gives it: zero for rows among which no pair is near."""
    rows = x.flatten(1)
    far = (rows.shape[1] / 2) ** 0.5
    nearer = [far - each for each in torch.pdist(rows) if each < far]
    return torch.stack(nearer).mean() if nearer else 0 * x.sum()


def test_rows_without_a_loss_prove_nothing() -> None:
    """Normal numbers are apart, and those between 0 and 1 are near, which are tried later."""
    with pytest.raises(ConfigError, match=r"form for|neither a mean nor a sum"):
        prove(FunctionTrial(near_pairs, batch()))
