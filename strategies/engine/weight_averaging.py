"""Averages of weights when ranks hold parts: callbacks, and ``AveragedModel`` in a module.

Lightning's ``WeightAveraging`` and ``StochasticWeightAveraging`` and their subclasses average the
shards of each rank.

An elementwise average is the same on shards. torch's ``AveragedModel`` averages plain tensors with
this rank's part of the model; the callback's other methods read and write the same parts.
Lightning's own methods would copy the whole model on each rank.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from boltmesh.errors import CheckpointError, UnsupportedError
from boltmesh.strategies.checkpoint.chunks import (
    OffloadedChunk,
    Snapshot,
    TensorPart,
    own_chunks,
    own_part,
)
from boltmesh.strategies.checkpoint.directory import AVERAGED, CURRENT, MODEL
from boltmesh.strategies.checkpoint.shard_writer import is_written_here
from boltmesh.strategies.lightning_compat.trainer import callbacks_of
from boltmesh.strategies.parameter_access import gathered_parameters

AVERAGING = "averaging_state"
"""Lightning's key for the number of averaged models."""


def average_shards(trainer: Trainer) -> None:
    """Make the callbacks of a Trainer average shards. Called before they are set up.

    Changes their classes and keeps the objects.

    Raises:
        UnsupportedError: There are several such callbacks.
    """
    averaging = [each for each in callbacks_of(trainer) if isinstance(each, tuple(_CALLBACKS))]
    if len(averaging) > 1:
        raise UnsupportedError(
            f"{' and '.join(type(each).__name__ for each in averaging)} would average shards and "
            f"store averages in one checkpoint. Use one of them, or bolt_ddp."
        )
    for callback in averaging:
        for base, ours in _CALLBACKS.items():
            if isinstance(callback, base) and not isinstance(callback, ours):
                kind = type(callback)
                # Methods of a subclass come first, and their ``super()`` is the one here.
                bases = (ours,) if kind is base else (kind, ours)
                names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
                callback.__class__ = type(kind.__name__, bases, {"plain": kind, **names})


def gather_for_averages(module: LightningModule) -> None:
    """Make each ``AveragedModel`` in a module average gathered parameters and keep its parts."""
    for each in module.modules():
        if isinstance(each, AveragedModel):
            vars(each)["update_parameters"] = partial(_update_whole, module, each)


def _update_whole(module: LightningModule, average: AveragedModel, model: Module) -> None:
    concerned = {id(each) for each in (*average.parameters(), *model.parameters())}
    names = [name for name, each in module.named_parameters() if id(each) in concerned]
    with gathered_parameters(module, names, writes=True):
        AveragedModel.update_parameters(average, model)


class _Shards(Module):
    """Parameters, then buffers, as plain tensors in the order in which they are averaged."""

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__()
        for at, each in enumerate(parameters):
            self.register_parameter(f"p{at}", Parameter(_value(each), requires_grad=False))
        for at, each in enumerate(buffers):
            self.register_buffer(f"b{at}", _value(each))

    def tensors(self) -> list[Tensor]:
        """Return parameters, then buffers, each of the shape of this rank's part."""
        return [*self.parameters(), *self.buffers()]


class _ShardAveraging(WeightAveraging):
    """``WeightAveraging`` of a strategy whose ranks hold parts of the model."""

    plain: type[WeightAveraging]
    """The user's class of the callback."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if not getattr(strategy, "stores_shards", False):
            self.__class__ = self.plain  # type: ignore[assignment]
            self._average_model = None
            self.setup(trainer, pl_module, stage)
            return
        for key in ("avg_fn", "multi_avg_fn"):
            if function := self._kwargs.get(key):
                _refuse_mixing(function, key, self.plain.__name__)
        if stage == "fit":
            self._average_model = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_late_steps(trainer, self.plain.__name__)
        device = self._device or pl_module.device
        self._average_model = AveragedModel(
            _Shards(*_parts(trainer)),
            device=device,
            use_buffers=self._use_buffers,
            **self._kwargs,
        )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(trainer)
            self._latest_update_step = step

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(trainer)
            self._latest_update_epoch = epoch

    def _update(self, trainer: Trainer) -> None:
        assert self._average_model is not None
        self._average_model.update_parameters(_Shards(*_parts(trainer)))

    @override
    def _swap_models(self, pl_module: LightningModule) -> None:
        self._write(pl_module, keeps_current=True)

    @override
    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        self._write(pl_module, keeps_current=False)

    @torch.no_grad()
    def _write(self, pl_module: LightningModule, *, keeps_current: bool) -> None:
        strategy: Any = pl_module.trainer.strategy
        parameters, buffers = _parts(pl_module.trainer)
        for average, part in zip(self._averages(), [*parameters, *buffers], strict=True):
            current = _value(part).clone() if keeps_current else None
            _set_value(part, average)
            if current is not None:
                average.copy_(current)
        strategy.data_axis.parameters_loaded()

    def _averages(self) -> list[Tensor]:
        assert self._average_model is not None
        shards = self._average_model.module
        assert isinstance(shards, _Shards)
        return [each.detach() for each in shards.tensors()]

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            return
        checkpoint[CURRENT] = checkpoint[MODEL]
        checkpoint[MODEL] = _averaged_state(trainer, checkpoint[MODEL], self._averages())
        checkpoint[AVERAGING] = {"n_averaged": self._average_model.n_averaged.detach().clone()}

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        # The module has the averaged weights now, those of "state_dict".
        parameters, buffers = _parts(trainer)
        with torch.no_grad():
            for average, part in zip(self._averages(), [*parameters, *buffers], strict=True):
                average.copy_(_value(part))
        if CURRENT not in checkpoint or AVERAGING not in checkpoint:
            rank_zero_warn(
                "The checkpoint was written without WeightAveraging: the average begins with its "
                "weights."
            )
            return
        self._average_model.n_averaged.copy_(checkpoint[AVERAGING]["n_averaged"])
        strategy: Any = trainer.strategy
        strategy.load_model_state_dict(
            {**checkpoint, MODEL: checkpoint[CURRENT]}, strict=pl_module.strict_loading
        )


class _ShardEpochAveraging(StochasticWeightAveraging):
    """``StochasticWeightAveraging`` of a strategy whose ranks hold parts of the model."""

    plain: type[StochasticWeightAveraging]
    """The class of the callback as its author built it."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if not getattr(strategy, "stores_shards", False):
            self.__class__ = self.plain  # type: ignore[assignment]
            self.setup(trainer, pl_module, stage)
            return
        _refuse_mixing(self._avg_fn, "avg_fn", self.plain.__name__)
        if stage == "fit":
            self._average_model = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_late_steps(trainer, self.plain.__name__)
        strategy: Any = trainer.strategy
        if strategy.divides_modules and self.pl_module_contains_batch_norm(pl_module):
            raise UnsupportedError(
                f"{self.plain.__name__} computes the statistics of batch norms in an epoch "
                f"without a backward pass, which {strategy.public_name} does not have. Use "
                f"WeightAveraging(use_buffers=True), or bolt_zero3."
            )
        super().on_fit_start(trainer, pl_module)
        parameters, _ = _parts(trainer)
        device = self._device or pl_module.device
        copies = [_value(each).detach().to(device, copy=True) for each in parameters]
        shards: Any = _Shards(copies, [])
        self._average_model = shards

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning does not call on_train_epoch_start when it resumes within an epoch, and the
        # callback's scheduler has to step at its end.
        if trainer.fit_loop.restarted_mid_epoch and self._scheduler_state is not None:
            self.on_train_epoch_start(trainer, pl_module)

    @staticmethod
    @override
    def update_parameters(
        average_model: LightningModule, model: LightningModule, n_averaged: Tensor, avg_fn: Any
    ) -> None:
        parameters, _ = _parts(model.trainer)
        current: Any = _Shards(parameters, [])
        StochasticWeightAveraging.update_parameters(average_model, current, n_averaged, avg_fn)

    @staticmethod
    @override
    @torch.no_grad()
    def transfer_weights(src_pl_module: LightningModule, dst_pl_module: LightningModule) -> None:
        strategy: Any = dst_pl_module.trainer.strategy
        parameters, _ = _parts(dst_pl_module.trainer)
        for average, part in zip(src_pl_module.parameters(), parameters, strict=True):
            _set_value(part, average)
        strategy.data_axis.parameters_loaded()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average_model_state": None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "average_model_state": {}})

    @override
    def _load_average_model_state(self, model_state: Any) -> None:
        """Do nothing: ``on_load_checkpoint`` reads the averages, a shard on each rank."""

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is not None and self.n_averaged:
            averages = [each.detach() for each in self._average_model.parameters()]
            checkpoint[AVERAGED] = _averaged_state(trainer, checkpoint[MODEL], averages)

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if self._average_model is None or state is None:
            return
        if state["scheduler_state"] is not None:
            # As on_fit_start does where callbacks are restored before it.
            self._clear_schedulers(trainer)
        averaged = checkpoint.get(AVERAGED, state["average_model_state"])
        state["average_model_state"] = None  # Lightning copies the rest of it
        if not state["n_averaged"]:
            return
        if averaged is None:
            raise CheckpointError(
                f"The checkpoint has no average of {self.plain.__name__}, which has averaged "
                f"{state['n_averaged']} times. Resume from one that was saved in a fit."
            )
        strategy: Any = trainer.strategy
        strict = pl_module.strict_loading
        strategy.load_model_state_dict({**checkpoint, MODEL: averaged}, strict=strict)
        parameters, _ = _parts(trainer)
        with torch.no_grad():
            for average, part in zip(self._average_model.parameters(), parameters, strict=True):
                average.copy_(_value(part))
        strategy.load_model_state_dict(checkpoint, strict=strict)


_CALLBACKS: dict[type[Callback], type[Callback]] = {
    WeightAveraging: _ShardAveraging,
    StochasticWeightAveraging: _ShardEpochAveraging,
}


def _averaged_state(
    trainer: Trainer, state: Mapping[str, Any], averages: Sequence[Tensor]
) -> dict[str, Any]:
    """Return a state of the module with this rank's averages in place of its parts.

    ``averages`` are those of the parameters that this rank holds, then of buffers, if any.
    """
    strategy: Any = trainer.strategy
    module = trainer.lightning_module
    writes_plain = strategy.is_global_zero or strategy.divides_modules
    held = zip([*module.parameters(), *module.buffers()], _held_names(trainer), strict=True)
    chosen = (id(each) for each, is_held in held if is_held)
    by_owner = dict(zip(chosen, averages, strict=False))
    made: dict[int, Snapshot] = {}

    def averaged(value: Any) -> Any:
        owner = value.known()[0] if isinstance(value, TensorPart) else value
        if id(owner) not in by_owner:
            return value
        if id(owner) not in made:
            is_mine = is_written_here(value, writes_plain=writes_plain)
            average = by_owner[id(owner)] if is_mine else None
            made[id(owner)] = Snapshot.of(value, own_chunks(value) if is_mine else [], average)
        return made[id(owner)]

    return {name: averaged(value) for name, value in state.items()}


def _parts(trainer: Trainer) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's parts of parameters and of buffers. Collective over all ranks."""
    strategy: Any = trainer.strategy
    strategy.checkpoints.model_state()  # no step is pending, and parameters are shards
    module = strategy.lightning_module
    names = _held_names(trainer)
    count = len(list(module.parameters()))
    held = list(zip([*module.parameters(), *module.buffers()], names, strict=True))
    parameters = [own_part(each) for each, is_held in held[:count] if is_held]
    return parameters, [own_part(each) for each, is_held in held[count:] if is_held]


def _held_names(trainer: Trainer) -> list[bool]:
    """Whether this rank has values of each parameter, then of each buffer of the module."""
    strategy: Any = trainer.strategy
    module = strategy.lightning_module
    return [
        *(strategy.holds(name) for name, _ in module.named_parameters()),
        *(strategy.holds_buffer(name) for name, _ in module.named_buffers()),
    ]


def _value(part: Tensor) -> Tensor:
    return part.read() if isinstance(part, OffloadedChunk) else part


def _set_value(part: Tensor, value: Tensor) -> None:
    if isinstance(part, OffloadedChunk):
        part.write(value.to("cpu", copy=True))
    else:
        part.copy_(value)


def _refuse_late_steps(trainer: Trainer, callback: str) -> None:
    strategy: Any = trainer.strategy
    if any(axis.take_pending() is not None for axis in strategy.axes):
        raise UnsupportedError(
            f"{callback} averages the weights of a step, and schedule='pipedream_2bw' applies a "
            f"step's gradients one step late. Use another schedule."
        )


def _refuse_mixing(function: Callable[..., Any], key: str, callback: str) -> None:
    """Refuse an averaging function whose results on two halves differ from that on the whole."""
    draw = torch.Generator().manual_seed(0)
    old, new = torch.rand(2, 4, 3, generator=draw)

    def averaged(start: int, end: int) -> Tensor:
        mine: Tensor = old[start:end].clone()
        other: Tensor = new[start:end].clone()
        if key == "avg_fn":
            average: Tensor = function(mine, other, torch.tensor(3))
            return average
        function([mine], [other], torch.tensor(3))
        return mine

    halves = torch.cat([averaged(0, 2), averaged(2, 4)])
    if not torch.allclose(averaged(0, 4), halves, rtol=1e-5, atol=1e-7):
        raise UnsupportedError(
            f"{key} of {callback} gives another average on parts of a tensor than on the whole, "
            f"and each rank averages its part. Use an average by element, or bolt_ddp."
        )
