"""Applies changes of ``training_step`` to optimizers and the Trainer once per batch, on all ranks.

Each stage runs its part of the step for each microbatch. Changes of the groups of optimizers are
undone after each of these runs, so that ``group["lr"] *= 0.9`` counts once. If the end of the step
has set an option equally for all microbatches, all ranks set it after the batch: numbers are sent
beside logged ones. Options that microbatches set differently are refused, and one microbatch that
ends the run ends it.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.lightning_compat.trainer import trainer_of
from boltmesh.strategies.pipeline.options import WHOLE_BATCH
from boltmesh.strategies.pipeline.step_report import Logged
from boltmesh.strategies.torch_compat.tensors import times_written

OPTION = "an option of an optimizer"
"""Name, among logged values, of numbers that are set in the groups of optimizers."""

_INSTEAD = (
    f"Set it in on_train_batch_end, or use schedule={WHOLE_BATCH!r}, which runs the end of the "
    f"step on the whole batch."
)

_KINDS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "Tensor": torch.tensor,
}

Place = tuple[int, int, str]
"""Number of the optimizer, of its group, and the option."""

Setting = tuple[bool, tuple[tuple[str, float], ...]]
"""Whether a value is a tuple, and the kinds and values of its numbers."""


class StepEffects:
    """Options of optimizers and ``should_stop`` that a step sets, on this rank.

    Args:
        module: The module; nothing is kept while it has no Trainer.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._settings: list[dict[Place, Setting]] = []
        """Changed options by microbatch."""
        self._stops: set[bool] = set()

    def begin(self) -> None:
        """Drop the changes of the batch before."""
        self._settings, self._stops = [], set()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Return a context for a stage that does not reach the end of the step."""
        before = _Options(self._module)
        try:
            yield
        finally:
            before.restore()
        before.refuse_steps()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context for a run to the end of the step, of a microbatch or the batch."""
        trainer = trainer_of(self._module)
        if trainer is None:
            yield
            return
        before, stopped = _Options(self._module), trainer.should_stop
        try:
            yield
            self._settings.append(before.changed())
            self._stops.add(trainer.should_stop)
        finally:
            before.restore()
            trainer.should_stop = stopped
        before.refuse_steps()

    def stops(self, loss: Tensor | None = None) -> bool:
        """Return whether this rank ends the run, by any microbatch or a handler of a signal.

        Args:
            loss: The batch's loss, shape ``()``. Microbatches that disagree about the end cause a
                warning if it is finite.
        """
        if len(self._stops) > 1 and loss is not None and bool(loss.isfinite()):
            warnings.warn(
                f"The run ends, as trainer.should_stop was set in training_step for some "
                f"microbatches of a batch and not for others; one process decides by the whole "
                f"batch. {_INSTEAD}",
                stacklevel=2,
            )
        trainer = trainer_of(self._module)
        return True in self._stops or (trainer is not None and trainer.should_stop)

    def logged(self) -> list[Logged]:
        """Return the options that the end of the step has set, for ``apply`` on all ranks.

        Raises:
            UnsupportedError: Microbatches set different values.
        """
        first, *others = self._settings or [{}]
        for each in others:
            if each != first:
                place = next(p for p in {**first, **each} if first.get(p) != each.get(p))
                raise UnsupportedError(
                    f"training_step sets {place[2]!r} of an optimizer differently for the "
                    f"microbatches of a batch; one process sets it by the whole batch. {_INSTEAD}"
                )
        return [
            Logged(
                OPTION,
                None,
                torch.tensor(number, dtype=torch.float64),
                {"place": place, "is_tuple": is_tuple, "kind": kind},
            )
            for place, (is_tuple, numbers) in first.items()
            for kind, number in numbers
        ]

    def apply(self, logged: Iterable[Logged], *, stops: bool) -> list[Logged]:
        """Set the options of ``logged`` on this rank; return the other logged values."""
        rest: list[Logged] = []
        values: dict[Place, Any] = {}
        for each in logged:
            if each.name != OPTION:
                rest.append(each)
                continue
            assert isinstance(each.value, Tensor)
            value = _KINDS[each.options["kind"]](each.value.item())
            place = each.options["place"]
            values[place] = (*values.get(place, ()), value) if each.options["is_tuple"] else value
        trainer = trainer_of(self._module)
        if trainer is not None:
            for (optimizer, group, option), value in values.items():
                options = trainer.strategy.optimizers[optimizer].param_groups[group]
                if isinstance(value, Tensor) and isinstance(options.get(option), Tensor):
                    options[option].fill_(value)
                else:
                    options[option] = value
            trainer.should_stop |= stops
        return rest


class _Options:
    """A copy of the options of all optimizers, and the step counts of schedulers."""

    def __init__(self, module: LightningModule) -> None:
        trainer = trainer_of(module)
        optimizers = [] if trainer is None else trainer.strategy.optimizers
        self._groups = [
            (number, place, group, dict(group))
            for number, each in enumerate(optimizers)
            for place, group in enumerate(each.param_groups)
        ]
        self._tensors = {
            id(value): (value, times_written(value), value.detach().clone())
            for *_, before in self._groups
            for value in before.values()
            if isinstance(value, Tensor)
        }
        configs = [] if trainer is None else trainer.strategy.lr_scheduler_configs
        self._steps = [(each.scheduler, each.scheduler.last_epoch) for each in configs]

    def changed(self) -> dict[Place, Setting]:
        """Return the options that have changed.

        Raises:
            UnsupportedError: A value is neither a number nor a tuple of numbers.
        """
        return {
            (number, place, option): _setting(option, group.get(option))
            for number, place, group, before in self._groups
            for option in {**before, **group}
            if self._has_changed(option, group, before)
        }

    def _has_changed(self, option: str, group: dict[str, Any], before: dict[str, Any]) -> bool:
        if option not in group or option not in before:
            return True
        now, value = group[option], before[option]
        if now is value:
            known = self._tensors.get(id(now))
            return known is not None and times_written(now) != known[1]
        return type(now) is not type(value) or bool(now != value)

    def restore(self) -> None:
        """Restore the options."""
        for *_, group, before in self._groups:
            if any(self._has_changed(option, group, before) for option in {**before, **group}):
                group.clear()
                group.update(before)
        for tensor, written, value in self._tensors.values():
            if times_written(tensor) != written:
                tensor.copy_(value)

    def refuse_steps(self) -> None:
        """Refuse steps of schedulers.

        Raises:
            UnsupportedError: A scheduler has stepped.
        """
        if any(each.last_epoch != step for each, step in self._steps):
            raise UnsupportedError(
                "training_step steps a learning rate scheduler, and each stage runs it once for "
                "each microbatch. Step it in on_train_batch_end, or return it with "
                "'interval': 'step' from configure_optimizers."
            )


def _setting(option: str, value: Any) -> Setting:
    numbers = value if isinstance(value, tuple) else (value,)
    kinds = ["Tensor" if isinstance(each, Tensor) else type(each).__name__ for each in numbers]
    is_one = all(not isinstance(each, Tensor) or each.numel() == 1 for each in numbers)
    if not (numbers and is_one and _KINDS.keys() >= set(kinds)):
        raise UnsupportedError(
            f"training_step sets {option!r} of an optimizer to {value!r}, and only numbers are "
            f"sent to other stages. Set it in on_train_batch_end."
        )
    return isinstance(value, tuple), tuple(zip(kinds, map(float, numbers), strict=True))
