"""Keeps a run of a step that is not the one that counts from leaving traces."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from boltmesh.strategies.steps.metrics import MetricCall, MetricKind, metrics_replaced
from boltmesh.strategies.steps.stand_ins import answer


class log_replaced:  # noqa: N801 - read as a verb, where it is used
    """Within, ``self.log`` is ``log``, also where ``self.log_dict`` calls it."""

    def __init__(self, module: LightningModule, log: Any) -> None:
        self._attributes = vars(module)
        self._log = log

    def __enter__(self) -> None:
        self._aside = self._attributes.get("log")
        self._attributes["log"] = self._log

    def __exit__(self, *_: object) -> None:
        if self._aside is None:
            del self._attributes["log"]
        else:
            self._attributes["log"] = self._aside


def quiet(
    module: LightningModule, metrics: Mapping[str, MetricKind]
) -> AbstractContextManager[None]:
    """Within, nothing is logged, and metrics stay as they are."""
    logs = log_replaced(module, _ignore)
    # Entered for each microbatch, of models that mostly have no metrics.
    return _with_metrics_kept(logs, metrics) if metrics else logs


@contextmanager
def _with_metrics_kept(
    logs: AbstractContextManager[None], metrics: Mapping[str, MetricKind]
) -> Iterator[None]:
    def act(call: MetricCall) -> Any:
        return answer(call.metric, call.method, call.args, call.kwargs)

    with logs, metrics_replaced(metrics, act):
        yield


def _ignore(*_: Any, **__: Any) -> None:
    """What is logged where nothing is to be."""
