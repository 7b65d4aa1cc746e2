"""Keeps a run of a step that is not the one that counts from leaving traces."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from boltmesh.strategies.steps.metrics import MetricCall, MetricKind, metrics_replaced
from boltmesh.strategies.steps.stand_ins import answer


@contextmanager
def log_replaced(module: LightningModule, log: Any) -> Iterator[None]:
    """Within, ``self.log`` is ``log``, also where ``self.log_dict`` calls it."""
    aside = vars(module).get("log")
    vars(module)["log"] = log
    try:
        yield
    finally:
        if aside is None:
            del vars(module)["log"]
        else:
            vars(module)["log"] = aside


@contextmanager
def quiet(module: LightningModule, metrics: Mapping[str, MetricKind]) -> Iterator[None]:
    """Within, nothing is logged, and metrics stay as they are."""

    def act(call: MetricCall) -> Any:
        return answer(call.metric, call.method, call.args, call.kwargs)

    with log_replaced(module, lambda *_, **__: None), metrics_replaced(metrics, act):
        yield
