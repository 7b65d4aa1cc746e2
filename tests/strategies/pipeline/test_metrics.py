"""Metrics are kept from gathering and from counting parts, and refused where that cannot be."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from boltmesh.errors import ConfigError, DivergenceError
from boltmesh.strategies.dry_run.metrics import (
    SingleRankMetrics,
    answer,
    find_metrics,
    keep_local,
    let_gather,
    metrics_replaced,
)
from boltmesh.strategies.pipeline.metrics import MetricCalls
from boltmesh.strategies.pipeline.stage.trace import MetricTrace
from boltmesh.strategies.pipeline.stage.trace_step import trace_step
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from tests.support.judged import Judged, Layer, points

PREDICTIONS, TARGETS = torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 1, 2])


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.named: Any = nn.ModuleDict({"mean": MeanMetric()})
        self.several = MetricCollection([MulticlassAccuracy(3), SumMetric()])
        self.plain = [SumMetric()]


class Watcher:
    def __init__(self) -> None:
        self.by_name = {"sum": SumMetric()}


def test_metrics_of_modules_lists_and_callbacks_stay_local() -> None:
    owner, watcher = Owner(), Watcher()
    metrics = [
        owner.accuracy, owner.named["mean"], *owner.several.values(), owner.plain[0],
        watcher.by_name["sum"],
    ]  # fmt: skip
    before = [each.distributed_available_fn for each in metrics]
    for _ in range(2):
        keep_local([owner, watcher])
        assert all(isinstance(each.distributed_available_fn, SingleRankMetrics) for each in metrics)
    assert isinstance(copy.deepcopy(owner).accuracy.distributed_available_fn, SingleRankMetrics)
    let_gather([owner, watcher])
    assert [each.distributed_available_fn for each in metrics] == before


def test_a_metric_that_gathers_by_itself_is_refused() -> None:
    owner = Owner()
    owner.accuracy = MulticlassAccuracy(3, dist_sync_fn=lambda *_, **__: [])
    with pytest.raises(ConfigError, match=r"'accuracy' .MulticlassAccuracy.* dist_sync_fn"):
        keep_local([owner])


def test_replaced_metrics_count_nothing_and_come_back() -> None:
    owner = Owner()
    metrics = find_metrics(owner)
    seen: list[tuple[str, str]] = []

    def act(call: Any) -> Any:
        seen.append((call.name, call.method))
        return answer(call.metric, call.method, call.args, call.kwargs)

    own = {name: set(vars(each)) for name, each in metrics.items()}
    with metrics_replaced(metrics, act):
        torch.testing.assert_close(owner.accuracy(PREDICTIONS, TARGETS), torch.tensor(0.5))
        owner.several.update(torch.ones(3))
        owner.named["mean"].update(torch.nan)
        assert owner.accuracy(torch.nan).isnan()  # not even an argument too few
    assert seen == [("accuracy", "forward"), ("several", "update"), ("named.mean", "update"),
                    ("accuracy", "forward")]  # fmt: skip
    assert {name: set(vars(each)) for name, each in metrics.items()} == own
    assert not any(each.update_called for each in owner.modules() if hasattr(each, "update_called"))
    torch.testing.assert_close(owner.accuracy(PREDICTIONS, TARGETS), torch.tensor(0.5))


def record(of_batch: list[MetricTrace], parts: list[Any]) -> MetricCalls:
    owner = Owner()
    calls = MetricCalls(find_metrics(owner), of_batch, len(parts))
    for number, part in enumerate(parts):
        with calls.of_microbatch(number, lambda *_: None):
            owner.accuracy.update(*part)
    return calls


def shapes(*given: Any) -> list[MetricTrace]:
    return [MetricTrace("accuracy", "update", tuple(tuple(each.shape) for each in given))]


def test_arguments_are_joined_along_the_rows() -> None:
    by_time = torch.arange(12.0).view(2, 6)
    parts = [(each, TARGETS[:1]) for each in by_time.split([4, 2], 1)]
    with pytest.raises(ConfigError, match=r"'accuracy'.*cannot be joined"):
        record([MetricTrace("accuracy", "update", ((2, 6), (1,)))], [
            (parts[0][0], torch.zeros(2)), (parts[1][0], torch.ones(2)),
        ])  # fmt: skip
    calls = record(shapes(by_time, TARGETS[:1]), parts)
    got, same = calls.joined[0].leaves
    assert torch.equal(got, by_time)
    assert torch.equal(same, TARGETS[:1])


def test_rows_that_a_layer_picked_are_joined() -> None:
    picked = PREDICTIONS.split([1, 3])
    calls = record(shapes(PREDICTIONS, PREDICTIONS), [(each, each) for each in picked])
    assert torch.equal(calls.joined[0].leaves[0], PREDICTIONS)


@pytest.mark.parametrize("probed", [0, 16], ids=["nothing", "everything"])
@pytest.mark.parametrize("counts", [[2, 2, 2], [0, 3, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("are_alike", [True, False])
def test_what_a_layer_picked_is_joined_where_microbatches_have_as_many(
    probed: int, counts: list[int], are_alike: bool
) -> None:
    """The trace takes it that nothing is picked, or everything."""
    total = sum(counts)
    values = torch.ones(total, 3) if are_alike else torch.arange(3.0 * total).view(total, 3)
    parts = [(each, each[:, 0]) for each in values.split(counts)]
    calls = record([MetricTrace("accuracy", "update", ((probed, 3), (probed,)))], parts)
    for got, wanted in zip(calls.joined[0].leaves, (values, values[:, 0]), strict=True):
        assert torch.equal(got, wanted)


def test_other_calls_than_those_of_the_probe_are_refused() -> None:
    with pytest.raises(DivergenceError, match=r"accuracy.update, and would .* not at all"):
        record([], [(PREDICTIONS, TARGETS)])


class InLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.counted = SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.counted.update(x.sum())
        return super().forward(x)


def test_a_metric_that_a_layer_calls_is_refused() -> None:
    module = Judged()
    module.layers = nn.ModuleList(InLayer() for _ in range(3))
    batch = next(iter(points(4, 4)))
    with pytest.raises(ConfigError, match=r"layer calls the metric 'layers.0.counted'"):
        trace_step(module, find_stage_units(module), "training_step", (batch, 0))
