"""Sets what ``training_step`` sets in optimizers and on the Trainer once for a batch, on all ranks.

Each stage runs the step for each microbatch, as far as it goes. What it sets in the groups of
optimizers is undone after each of these runs, so that ``group["lr"] *= 0.9`` counts once. What the
end of the step has set equally for all microbatches, all ranks set when the batch is over: numbers
are sent beside those that are logged. Options that microbatches set differently are refused, and
one microbatch that ends the run ends it.
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
"""Name of numbers that are set in the groups of optimizers, beside those that are logged."""

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
"""The optimizer, its group, and the option."""

Setting = tuple[bool, tuple[tuple[str, float], ...]]
"""Whether a value is a tuple, and the kinds and values of its numbers."""


class StepEffects:
    """Options of optimizers and ``should_stop``, which a step may set, on this rank.

    Args:
        module: Whose step it is; nothing is kept while it has no Trainer.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._settings: list[dict[Place, Setting]] = []
        """By microbatch."""
        self._stops: set[bool] = set()

    def begin(self) -> None:
        """Forget the batch before."""
        self._settings, self._stops = [], set()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within, a stage runs that does not reach the end of the step."""
        before = _Options(self._module)
        try:
            yield
        finally:
            before.put_back()
        before.refuse_steps()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, the step runs to its end, for one microbatch or for the whole batch."""
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
            before.put_back()
            trainer.should_stop = stopped
        before.refuse_steps()

    def stops(self, loss: Tensor | None = None) -> bool:
        """Return whether this rank ends the run: any microbatch may, and any handler of a signal.

        Args:
            loss: The batch's. One that is no number may be so by some microbatches alone; another
                one is warned of.
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
        """Return what the end of the step has set, for ``apply`` on all ranks.

        Raises:
            UnsupportedError: When microbatches set different values.
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
        """Set on this rank what the end of the step has set; return what else is logged."""
        rest: list[Logged] = []
        found: dict[Place, Any] = {}
        for each in logged:
            if each.name != OPTION:
                rest.append(each)
                continue
            assert isinstance(each.value, Tensor)
            value = _KINDS[each.options["kind"]](each.value.item())
            place = each.options["place"]
            found[place] = (*found.get(place, ()), value) if each.options["is_tuple"] else value
        trainer = trainer_of(self._module)
        if trainer is not None:
            for (optimizer, group, option), value in found.items():
                options = trainer.strategy.optimizers[optimizer].param_groups[group]
                if isinstance(value, Tensor) and isinstance(options.get(option), Tensor):
                    options[option].fill_(value)
                else:
                    options[option] = value
            trainer.should_stop |= stops
        return rest


class _Options:
    """The options of all optimizers as they are, and the steps that schedulers have taken."""

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
        """Return the options that have other values now.

        Raises:
            UnsupportedError: When one has a value that is no number and no tuple of numbers.
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

    def put_back(self) -> None:
        """Let the options be what they were."""
        for *_, group, before in self._groups:
            if any(self._has_changed(option, group, before) for option in {**before, **group}):
                group.clear()
                group.update(before)
        for tensor, written, value in self._tensors.values():
            if times_written(tensor) != written:
                tensor.copy_(value)

    def refuse_steps(self) -> None:
        """Raise where a scheduler has stepped.

        Raises:
            UnsupportedError: Always then.
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
