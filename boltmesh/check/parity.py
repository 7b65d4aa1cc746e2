"""Compares a layout with one process: the comparison behind ``boltmesh check``.

The same module is trained twice for a few optimizer steps, from the same seed: in one process with
plain Lightning, and in the layout. The process sees the batches of all data ranks, in turn and
with accumulation, so that both average the same gradients and differ by the order of sums alone,
whatever the loss and the batch sizes. (Under manual optimisation, where Lightning cannot
accumulate, it sees their concatenation: right for losses that are means, with equal batch sizes.)
Both compute products and convolutions of fp32 in fp32: TF32 rounds parts of a sum apart.

Losses, gradient norms, logged metrics, every parameter, every optimizer state, validation metrics
and predictions are compared, in this order, and the first that differs is named. Buffers are not:
the running statistics of a batch norm depend on how a batch is cut.

``RankBatches`` has what the data ranks of a layout would train on, for the one process they are
compared with. ``merge_over_ranks`` and ``merge_over_stages`` make one trace of what the ranks of a
layout saw, and find where they disagree.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from boltmesh.check.differences import Trace
from boltmesh.errors import ConfigError
from boltmesh.strategies.deferred_initialization.recording import tensors_of
from boltmesh.strategies.dry_run.step import full_float32
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.lightning_compat.loops import rank_loader
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.parameter_access import whole_value


def ranks_of_data(strategy: MeshStrategy) -> list[int] | None:
    """Return the ranks that saw different data; None for all."""
    layout = strategy.layout
    if layout.data == layout.world_size:
        return None
    return [layout.rank_at(data=each) for each in range(layout.data)]


def merge_over_ranks(trace: Trace, chosen: Sequence[int] | None) -> Trace:
    """Average values that differ by rank, compare the others. Collective: all ranks call it.

    Args:
        trace: The trace of this rank.
        chosen: One of each group of ranks that saw the same; None where there are no such groups.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return trace
    mine = (trace.losses, trace.gradient_norms, trace.metrics, trace.validation, trace.predictions)
    all_ranks = gather_objects(mine)
    disagreement = _find_disagreement(trace.parameters)
    if chosen is not None:
        disagreement = disagreement or _find_stray(all_ranks, chosen)
        all_ranks = [all_ranks[rank] for rank in chosen]
    losses, norms, metrics, validation, predictions = zip(*all_ranks, strict=True)
    return Trace(
        losses=[mean(step) for step in zip(*losses, strict=True)],
        gradient_norms=[[each[0] for each in call] for call in zip(*norms, strict=True)],
        metrics=[mean_of_mappings(step) for step in zip(*metrics, strict=True)],
        parameters=trace.parameters,
        optimizer_state=_join_states(trace.optimizer_state),
        validation=mean_of_mappings(validation),
        predictions=interleave(predictions),
        disagreement=disagreement,
    )


def _join_states(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add optimizer state that other ranks keep whole. Collective over all ranks."""
    names = gather_objects(sorted(own))
    common = set(names[0]).intersection(*names)
    if all(len(each) == len(common) for each in names):
        return own
    apart = gather_objects({name: own[name] for name in own if name not in common})
    return own | {name: state for each in apart for name, state in each.items()}


def _find_stray(all_ranks: Sequence[Any], chosen: Sequence[int]) -> str | None:
    """Name the first rank that saw something else than the one of its group that is chosen."""
    for rank, (*numbers, predictions) in enumerate(all_ranks):
        first = max(each for each in chosen if each <= rank)
        *others, expected = all_ranks[first]
        if repr(numbers) != repr(others):  # as text, where NaN is itself
            return f"rank {rank} disagrees with rank {first} on losses, norms or metrics"
        pairs = itertools.zip_longest(predictions, expected)
        if not all(torch.equal(one, other) for one, other in pairs):
            return f"rank {rank} disagrees with rank {first} on predictions"
    return None


def merge_over_stages(trace: Trace, strategy: MeshStrategy) -> Trace:
    """Join the values of the stages, and those of pipelines with different batches.

    Collective over all ranks.
    """
    mine: dict[str, Any] = {
        "losses": trace.losses,
        "metrics": trace.metrics,
        "parameters": {
            name: each for name, each in trace.parameters.items() if strategy.holds(name)
        },
        "optimizer_state": trace.optimizer_state,
        "validation": trace.validation,
        "predictions": trace.predictions,
    }
    ranks = gather_objects(mine)
    merged: dict[str, dict[str, Tensor]] = {"parameters": {}, "optimizer_state": {}}
    disagreement = None
    for kind, values in merged.items():
        for rank, each in enumerate(ranks):
            for name, value in each[kind].items():
                if not torch.equal(values.setdefault(name, value), value):
                    disagreement = disagreement or f"rank {rank} disagrees on {kind} {name!r}"
    layout = strategy.layout
    firsts = [layout.rank_at(data=each) for each in range(layout.data)]
    for rank, each in enumerate(ranks):
        first = firsts[layout.coordinates(rank)["data"]]  # of those that saw the same
        for kind in ("losses", "metrics", "validation"):
            if each[kind] != ranks[first][kind]:
                disagreement = disagreement or f"rank {rank} disagrees with rank {first} on {kind}"
        pairs = zip(each["predictions"], ranks[first]["predictions"], strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            disagreement = disagreement or f"rank {rank} disagrees with rank {first} on predictions"
    seen = [ranks[each] for each in firsts]
    return Trace(
        losses=[mean(step) for step in zip(*(each["losses"] for each in seen), strict=True)],
        gradient_norms=trace.gradient_norms,
        metrics=[
            mean_of_mappings(step) for step in zip(*(each["metrics"] for each in seen), strict=True)
        ],
        parameters={name: merged["parameters"][name] for name in trace.parameters},
        optimizer_state=merged["optimizer_state"],
        validation=mean_of_mappings(each["validation"] for each in seen),
        predictions=interleave([each["predictions"] for each in seen]),
        disagreement=disagreement,
    )


def _find_disagreement(parameters: dict[str, Tensor]) -> str | None:
    """Name the first parameter that is not the same to the bit on every rank."""
    found = None
    for name, parameter in parameters.items():
        low, high = parameter.double().clone(), parameter.double().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if found is None and not torch.equal(low, high):
            found = f"ranks disagree on parameter {name!r} by {(high - low).max().item():.2g}"
    return found


def interleave(ranks: Sequence[list[Tensor]]) -> list[Tensor]:
    """The first batch of each rank, then the second of each, as far as there are any."""
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ranks))
    return [each for each in turns if each is not None]


def mean(values: Iterable[float]) -> float:
    """Return the mean to the last bit whatever the order; NaN of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def mean_of_mappings(mappings: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the mappings that have it."""
    mappings = list(mappings)
    names = dict.fromkeys(name for each in mappings for name in each)
    return {name: mean(each[name] for each in mappings if name in each) for name in names}


class RankBatches:
    """The batches of all data ranks for one process: in turn, or as one.

    Each rank's share comes from Lightning's own distributed sampler with the numbers that it
    should have, so that a strategy which takes others is found out.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        data_size: int,
        stage: RunningStage,
        *,
        is_merged: bool = False,
    ) -> None:
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"A comparison needs a DataLoader over a dataset with indices, and this is "
                f"{type(loader).__name__} over {type(dataset).__name__}: nothing says which rank "
                f"should see what of it."
            )
        self.loaders = [rank_loader(loader, rank, data_size, stage) for rank in range(data_size)]
        self.is_merged = is_merged
        # Where Lightning looks for ``set_epoch``.
        self.sampler, self.batch_sampler = self, None

    def split(self) -> "list[RankBatches]":
        """One rank each."""
        parts = [copy.copy(self) for _ in self.loaders]
        for part, loader in zip(parts, self.loaders, strict=True):
            part.loaders = [loader]
        return parts

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning when an epoch begins."""
        for loader in self.loaders:
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.loaders]
        return max(lengths) if self.is_merged else sum(lengths)

    def __iter__(self) -> Iterator[Any]:
        nothing = object()
        for batches in itertools.zip_longest(*self.loaders, fillvalue=nothing):
            present = [batch for batch in batches if batch is not nothing]
            if self.is_merged:
                yield _concatenate(present)
            else:
                yield from present


def _concatenate(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {key: _concatenate([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_concatenate(parts) for parts in zip(*batches, strict=True))
    raise ConfigError(f"A batch that holds a {type(first).__name__} cannot be concatenated.")


OWN = "boltmesh/"
"""Prefix of the names that strategies log."""

DROPOUTS = (
    nn.AlphaDropout,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)


@dataclass
class Problem:
    """Model and data to train. The callables are called once on every rank, after seeding."""

    module: Callable[[], LightningModule]
    train: Callable[[], DataLoader[Any]]
    validation: Callable[[], DataLoader[Any]] | None = None
    prediction: Callable[[], DataLoader[Any]] | None = None
    steps: int = 4
    accumulate: int | dict[int, int] = 1
    """Batches per optimizer step of one rank; a mapping changes it from an epoch on."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer: precision, clipping, callbacks, ..."""
    evaluation_batches: int = 4
    """Batches that each rank validates and predicts."""
    seed: int = 1


def trace_one_process(problem: Problem, *, data_size: int, is_dealt: bool = True) -> Trace:
    """The reference: plain Lightning in this process alone, on the batches of all data ranks.

    Args:
        problem: The model, data and options of the run.
        data_size: Ranks of the data axis.
        is_dealt: Whether the Trainer deals the data out to them, which it does in its own order. If
            not, they are in that of the loader.
    """
    return _trace(
        problem,
        strategy="auto",
        devices=1,
        data_size=data_size,
        is_reference=True,
        is_dealt=is_dealt,
    )


def trace_layout(problem: Problem, strategy: Any, *, devices: int | list[int]) -> Trace:
    """The layout. Collective: every rank calls it, and gets the trace of all."""
    return _trace(problem, strategy=strategy, devices=devices, data_size=1, is_reference=False)


def _trace(
    problem: Problem,
    *,
    strategy: Any,
    devices: int | list[int],
    data_size: int,
    is_reference: bool,
    is_dealt: bool = True,
) -> Trace:
    seed_everything(problem.seed, workers=True, verbose=False)
    module = problem.module()
    for each in module.modules():
        if isinstance(each, DROPOUTS):
            each.p = 0.0  # its masks depend on the layout
    is_merged = not module.automatic_optimization
    recorder = _TraceRecorder()
    callbacks: list[Callback] = [*problem.trainer.get("callbacks", ()), recorder]
    arguments = {key: value for key, value in problem.trainer.items() if key != "callbacks"}
    factor = data_size if is_reference and not is_merged else 1
    if isinstance(problem.accumulate, dict):
        scheduling = {epoch: size * factor for epoch, size in problem.accumulate.items()}
        callbacks.insert(0, GradientAccumulationScheduler(scheduling))
    elif not is_merged:
        arguments["accumulate_grad_batches"] = problem.accumulate * factor
    limit = problem.evaluation_batches * (data_size if is_reference else 1)
    with warnings.catch_warnings(), full_float32():
        # Advice on workers, loggers and samplers does not matter in a comparison.
        warnings.filterwarnings("ignore", module="lightning")
        trainer = Trainer(
            strategy=strategy,
            devices=devices,
            max_steps=problem.steps * module_steps(module),
            max_epochs=-1,
            limit_val_batches=limit,
            limit_predict_batches=problem.evaluation_batches,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            **arguments,
        )

        def source(loader: DataLoader[Any], stage: RunningStage, *, is_merged: bool = False) -> Any:
            if not is_reference or not is_dealt:
                return loader
            return RankBatches(loader, data_size, stage, is_merged=is_merged)

        trainer.fit(module, source(problem.train(), RunningStage.TRAINING, is_merged=is_merged))
        trace = recorder.trace
        trace.parameters = {name: _copy(each, each) for name, each in module.named_parameters()}
        trace.optimizer_state = recorder.optimizer_state
        if problem.validation is not None:
            loader = source(problem.validation(), RunningStage.VALIDATING)
            trainer.validate(module, loader, verbose=False)
            trace.validation = _numbers(trainer.callback_metrics)
        if problem.prediction is not None:
            # Rank by rank also in one process: a prediction may depend on the batch's index.
            loaders: list[Any] = [problem.prediction()]
            if is_reference and is_dealt:
                whole = RankBatches(loaders[0], data_size, RunningStage.PREDICTING)
                loaders = whole.split()
            predicted = [_flatten(trainer.predict(module, loader)) for loader in loaders]
            trace.predictions = interleave(predicted)
    if is_reference:
        return trace
    used = trainer.strategy
    if isinstance(used, MeshStrategy) and used.divides_modules:
        return merge_over_stages(trace, used)
    ranks = ranks_of_data(used) if isinstance(used, MeshStrategy) else None
    return merge_over_ranks(trace, ranks)


def module_steps(module: LightningModule) -> int:
    """How many of Lightning's steps one batch makes: with manual optimisation, each optimizer's."""
    if module.automatic_optimization:
        return 1
    configured = module.configure_optimizers()
    optimizers = configured[0] if isinstance(configured, tuple) else configured
    return len(optimizers) if isinstance(optimizers, list) else 1


class _TraceRecorder(Callback):
    """Collects the results of this rank."""

    reads_gradients = False  # the strategy computes the norm, also where ``.grad`` is empty

    def __init__(self) -> None:
        self.trace = Trace()
        self.optimizer_state: dict[str, Tensor] = {}
        self._losses: list[float] = []
        self._metrics: list[dict[str, float]] = []
        self._last_step = 0

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self.trace.gradient_norms.append([_gradient_norm(trainer, optimizer)])

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            # Lightning hands callbacks the loss divided by the accumulation.
            self._losses.append(loss.item() * trainer.accumulate_grad_batches)
        self._metrics.append(_numbers(trainer.callback_metrics))
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self.trace.losses.append(mean(self._losses))
            self.trace.metrics.append(mean_of_mappings(self._metrics))
            self._losses, self._metrics = [], []

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        used = trainer.strategy
        for number, optimizer in enumerate(trainer.optimizers):
            for parameter, state in optimizer.state.items():
                is_whole = isinstance(used, MeshStrategy) and (
                    used.checkpoints.keeps_whole_state(parameter)
                )
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        name = f"{names[id(parameter)]}.{key}"
                        name = f"{number}.{name}" if number else name
                        self.optimizer_state[name] = (
                            value.detach().cpu().clone() if is_whole else _copy(value, parameter)
                        )


def _gradient_norm(trainer: Trainer, optimizer: Optimizer) -> float:
    if isinstance(trainer.strategy, MeshStrategy):
        return trainer.strategy.gradient_norm(optimizer) or 0.0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    squares = [p.grad.double().square().sum().item() for p in parameters if p.grad is not None]
    return math.sqrt(math.fsum(squares))


def _flatten(predictions: Any) -> list[Tensor]:
    """One tensor per batch: predictions of a module may be nested."""
    batches = []
    for batch in predictions:
        leaves = [leaf for leaf in tensors_of(batch) if leaf.is_floating_point()]
        if leaves:
            batches.append(torch.cat([leaf.flatten().float().cpu() for leaf in leaves]))
    return batches


def _copy(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the full parameter on the host. Collective if the parameter is divided."""
    return whole_value(tensor.detach(), parameter).cpu().clone()


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the module's own logged values; one process has none of the strategy's."""
    return {name: float(each) for name, each in metrics.items() if not name.startswith(OWN)}
