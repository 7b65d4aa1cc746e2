"""From a config to model, data, strategy and Trainer, and through one command to its end.

The only module that knows both configs and strategies. It runs inside a rank;
``launch/supervisor.py`` starts ranks.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.configs.advice import located, one_line
from boltmesh.configs.classes import build, find_class
from boltmesh.configs.schema import TrainerSection
from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.launch.graceful_stop import GracefulStop
from boltmesh.launch.log_filters import quiet_lightning
from boltmesh.launch.placement import Placement
from boltmesh.launch.rank import Rank
from boltmesh.launch.stopping import StoppedBySignal
from boltmesh.prune import DEFAULT_PATTERN
from boltmesh.run_callbacks import (
    ErrorReport,
    LogBeforeSave,
    PredictionFiles,
    RunFolder,
    RunLogger,
    Summary,
    print_line,
)
from boltmesh.run_folder import (
    CHECKPOINTS,
    checkpoint_to_evaluate,
    checkpoint_to_resume,
    folder_of_name,
    make_run_folder,
    next_log_number,
    next_run_folder,
    store_config,
)
from boltmesh.run_lock import RunLock
from boltmesh.strategies.dry_run.unsupported import refuse_untrained
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategy_arguments import make_strategy
from boltmesh.telemetry.snapshot import AlertThresholds

Verb = Literal["fit", "validate", "test", "predict"]

_MADE_HERE = {"accelerator", "devices", "callbacks", "logger"}
"""Keys of the trainer section that are not passed on unchanged."""


@dataclass
class Built:
    """The objects of one command, made from a config and not yet used."""

    model: LightningModule
    data: LightningDataModule | None
    strategy: MeshStrategy
    trainer: Trainer
    callbacks: list[Callback]
    """Callbacks of the config and of the command; not those of Lightning and the model."""
    checkpoint: Path | str | None
    """The checkpoint that the command loads first: a path, or an address."""
    folder: Path | None
    """Folder that it writes to; None if it writes nothing."""


OF_A_RUN = ("run.name", "alerts.")
"""Prefixes of keys that do not affect training."""


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of a config by their full keys, except those that are not set."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{key}.")
        elif value is not None and value != [] and not key.startswith(OF_A_RUN):
            yield key, value


class RunBuilder:
    """Makes the objects of one run from its config, with errors that name the key.

    Args:
        config: As ``load`` gives it.
        verb: The command.
        placement: As ``place_ranks`` gives it.
        rank: This process.
        source: The config's file, for errors.
    """

    def __init__(
        self, config: DictConfig, verb: Verb, placement: Placement, rank: Rank, *, source: str
    ) -> None:
        self.config = config
        self.verb = verb
        self.placement = placement
        self.rank = rank
        self.source = source

    def build(self, *, for_show: bool = False) -> Built:
        """Make everything; ``for_show`` leaves the disk as it is.

        Raises:
            ConfigError: When a class, an argument or a combination of them cannot work.
        """
        run = self.config.run
        quiet_lightning()
        torch.set_float32_matmul_precision(run.matmul_precision)
        if run.seed is not None:
            seed_everything(run.seed, workers=True, verbose=False)
        # The checkpoint of other ranks is a stand-in: they load the one that rank 0 has found.
        verifies = self.rank.rank == 0 and not for_show
        if self.verb == "fit":
            checkpoint = checkpoint_to_resume(
                self.config, continued=self.rank.continued, verifies=verifies
            )
        elif for_show and run.ckpt_path == "auto":
            checkpoint = None
        else:
            checkpoint = checkpoint_to_evaluate(self.config, verifies=verifies)
        model: LightningModule = self._build("model", LightningModule)
        data: LightningDataModule | None = None
        if self.config.data.class_path is not None:
            data = self._build("data", LightningDataModule)
        if self.config.optimizer.class_path is not None and self.verb == "fit":
            self._override_optimizers(model)
        strategy = self.build_strategy()
        callbacks = [
            self._build(f"trainer.callbacks.{at}", Callback)
            for at in range(len(self.config.trainer.callbacks))
        ]
        with self._folder(checkpoint, for_show=for_show) as folder:
            callbacks += self._progress_bar(callbacks)
            callbacks += self._own_callbacks(folder, checkpoint)
            loggers = self._loggers(folder)
            callbacks += [LogBeforeSave(each) for each in loggers if isinstance(each, RunLogger)]
            trainer = self._build_trainer(strategy, callbacks=callbacks, loggers=loggers)
        return Built(model, data, strategy, trainer, callbacks, checkpoint, folder)

    def _build(self, key: str, wanted: type[Any]) -> Any:
        made = build(OmegaConf.select(self.config, _select_key(key)), key, source=self.source)
        _check_kind(type(made), wanted, f"{key}.class_path", self.source)
        return made

    def build_strategy(self) -> MeshStrategy:
        """Make the strategy alone."""
        launcher = self.placement.launcher
        # Where a scheduler's variables are set but its launcher was not used, Lightning would
        # join ranks that were never started.
        more: dict[str, Any] = {}
        if launcher is None or self.rank.is_supervised:
            more["cluster_environment"] = LightningEnvironment()
        made = make_strategy(self.config.strategy, source=self.source, **more)
        assert isinstance(made, MeshStrategy)
        made.recipe = str(self.source)
        values = cast("dict[str, Any]", OmegaConf.to_container(self.config, resolve=True))
        made.settings = dict(_dotted(values))
        made.alerts = AlertThresholds(**self.config.alerts)
        return made

    def _override_optimizers(self, model: LightningModule) -> None:
        section = self.config.optimizer
        path, source = "optimizer.class_path", self.source
        _check_kind(find_class(section.class_path, path, source=source), Optimizer, path, source)

        def configure_optimizers(module: LightningModule) -> Any:
            refuse_untrained(module)
            return make([each for each in module.parameters() if each.requires_grad])

        def make(trained: list[Parameter]) -> Any:
            optimizer = _build_around(section, "optimizer", source, trained)
            if section.scheduler.class_path is None:
                return optimizer
            key = "optimizer.scheduler"
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": _build_around(section.scheduler, key, source, optimizer),
                    "interval": section.scheduler.interval,
                    "frequency": section.scheduler.frequency,
                    "monitor": section.scheduler.monitor,
                },
            }

        model.configure_optimizers = MethodType(  # type: ignore[method-assign]
            configure_optimizers, model
        )
        # Refuse arguments that do not fit now, before the ranks rendezvous and before
        # configure_model makes its layers.
        trained = [each for each in model.parameters() if each.requires_grad]
        make(trained or [Parameter(torch.empty(0))])

    def _progress_bar(self, given: list[Callback]) -> list[Callback]:
        """The bar in one line; Lightning's other one counts epochs up to -2 under ``max_steps``."""
        if self.config.trainer.enable_progress_bar is False:  # null leaves it on
            return []
        return [] if any(isinstance(each, ProgressBar) for each in given) else [TQDMProgressBar()]

    def _own_callbacks(self, folder: Path | None, checkpoint: Path | str | None) -> list[Callback]:
        # On other ranks than 0 the folder is a stand-in until RunFolder has received it.
        inside = folder or folder_of_name(self.config) / "0"
        made: list[Callback] = []
        followers: list[GracefulStop | PredictionFiles] = []
        if self.verb == "predict":
            followers.append(PredictionFiles(inside / "predictions"))
        if self.verb == "fit":
            keep = self.config.run.checkpoint
            made.append(Summary())
            if keep.enabled:
                made += self._model_checkpoints(inside / CHECKPOINTS)
            kept = inside / CHECKPOINTS if keep.enabled else None
            followers.append(GracefulStop(self.rank.stop, kept))
        title = f"{self.verb} {self.config.run.name}"
        run_folder = RunFolder(
            self.rank,
            title=title,
            folder=folder,
            checkpoint=checkpoint,
            followers=followers,
            pattern=self.config.run.checkpoint.filename or DEFAULT_PATTERN,
        )
        return [run_folder, ErrorReport(self.rank), *made, *followers]

    def _model_checkpoints(self, folder: Path) -> list[ModelCheckpoint]:
        keep = self.config.run.checkpoint
        best: dict[str, Any] = {
            "monitor": keep.monitor,
            "mode": keep.mode,
            "save_top_k": keep.save_top_k,
            "every_n_epochs": keep.every_n_epochs,
        }
        newest = {"every_n_train_steps": keep.every_n_steps, "save_last": keep.save_last}
        # One that monitors a value saves nothing before it is logged, and ranks by an old one.
        is_split = keep.monitor is not None and keep.every_n_steps is not None
        try:
            return [
                ModelCheckpoint(
                    dirpath=folder,
                    filename=keep.filename,
                    save_weights_only=keep.save_weights_only,
                    **arguments,
                )
                for arguments in ([best, newest] if is_split else [best | newest])
            ]
        except MisconfigurationException as error:
            raise ConfigError(
                f"{located(self.source, 'run.checkpoint')}: {one_line(error)}"
            ) from error

    def _loggers(self, folder: Path | None) -> list[Logger]:
        given = self.config.trainer.logger
        if given is not None:
            return [self._build(f"trainer.logger.{at}", Logger) for at in range(len(given))]
        if self.verb != "fit":
            return []
        inside = folder or folder_of_name(self.config) / "0"
        return [RunLogger(inside, name="logs", version=str(next_log_number(inside)))]

    def _build_trainer(
        self, strategy: MeshStrategy, *, callbacks: list[Callback], loggers: list[Logger]
    ) -> Trainer:
        section = self.config.trainer
        handed_on = {each.name for each in fields(TrainerSection)} - _MADE_HERE
        try:
            return Trainer(
                **{name: section[name] for name in sorted(handed_on)},
                accelerator=self.placement.accelerator,
                devices=self.placement.devices,
                strategy=strategy,
                callbacks=callbacks,
                logger=loggers or False,
                enable_checkpointing=self.verb == "fit",
                default_root_dir=folder_of_name(self.config),
            )
        except (MisconfigurationException, ArithmeticError, ValueError, TypeError) as error:
            if isinstance(error, BoltMeshError):
                raise
            raise ConfigError(f"{located(self.source, 'trainer')}: {one_line(error)}") from error

    @contextmanager
    def _folder(self, checkpoint: Path | str | None, *, for_show: bool) -> Iterator[Path | None]:
        """The run's folder, on rank 0; removed again if the Trainer cannot be made."""
        is_fit = self.verb == "fit"
        if self.verb not in {"fit", "predict"} or self.rank.rank != 0:
            yield None
        elif for_show:
            yield next_run_folder(self.config, checkpoint, is_fit=is_fit)
        else:
            folder = self.rank.continued or make_run_folder(self.config, checkpoint, is_fit=is_fit)
            lock = None
            try:
                self.rank.run_lock = lock = RunLock.take(folder)
                yield folder
                store_config(self.config, folder)
            except BaseException:
                if lock is not None:
                    lock.release()
                with contextlib.suppress(OSError):  # it is not empty: an older run goes on in it
                    folder.rmdir()
                raise
            self.rank.run_folder = folder
            self.rank.report("running")  # a killed rank cannot tell its folder any more


def run(config: DictConfig, verb: Verb, placement: Placement, rank: Rank, *, source: str) -> None:
    """Carry out one command in this rank."""
    rank.serve_rendezvous()
    try:
        _run(RunBuilder(config, verb, placement, rank, source=source).build(), verb)
    finally:
        if rank.run_lock is not None:
            rank.run_lock.release()


def _run(built: Built, verb: Verb) -> None:
    has_group = dist.is_initialized()
    act: Callable[..., object] = getattr(built.trainer, verb)
    if verb == "predict":
        act = partial(act, return_predictions=False)
    path = None if built.checkpoint is None else str(built.checkpoint)
    copies = built.strategy.memory_checkpoints
    try:
        act(built.model, datamodule=built.data, ckpt_path=path)
    except StoppedBySignal as stopped:
        # Without a checkpoint this rank alone was stopped, by a launcher that restarts all.
        if copies is not None and stopped.checkpoint is not None:
            copies.forget()
        raise
    if copies is not None:
        copies.forget()
    summaries = [each for each in built.callbacks if isinstance(each, Summary)]
    for each in summaries:
        for line in each.lines:
            print_line(line)
    if dist.is_initialized() and not has_group:
        # Lightning leaves the group to the end of the process, where its threads may abort.
        dist.destroy_process_group()
    for each in summaries:
        each.refuse_loss_that_is_not_finite()


def describe(built: Built, config: DictConfig, verb: Verb, placement: Placement) -> str:
    """Return the table of a dry run."""
    trained = sum(each.numel() for each in built.model.parameters() if each.requires_grad)
    trainer = built.trainer
    where = "CPU" if placement.accelerator == "cpu" else "CUDA"
    ranks = f"{placement.world_size} on {where}"
    if placement.num_nodes > 1:
        ranks += f", {placement.num_local_ranks} on each of {placement.num_nodes} nodes"
    arguments = ", ".join(
        f"{key}={config.strategy[key]}" for key in config.strategy if key != "name"
    )
    limits = {
        "max_steps": None if trainer.max_steps == -1 else trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "max_time": config.trainer.max_time,
    }
    rows = {
        "model": f"{type(built.model).__name__}, {trained:,} trained parameters",
        "data": type(built.data).__name__ if built.data is not None else "the model's own loaders",
        "strategy": f"{type(built.strategy).__name__}({arguments})",
        "mesh": str(built.strategy.layout),
        "ranks": ranks,
        "precision": str(trainer.precision),
    }
    if verb == "fit":
        own = config.optimizer.class_path
        rows["optimizer"] = own or f"{type(built.model).__name__}.configure_optimizers"
        rows["until"] = ", ".join(f"{name}={each}" for name, each in limits.items() if each) or "-"
    if built.checkpoint is not None:
        rows["from"] = str(built.checkpoint)
    if built.folder is not None:
        rows["into"] = str(built.folder)
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join((f"boltmesh: {verb} {config.run.name} can start", *lines))


def _check_kind(made: type[Any], wanted: type[Any], key: str, source: str) -> None:
    if issubclass(made, wanted):
        return
    home = wanted.__module__.partition(".")[0]
    package = "torch.optim" if home == "torch" else "lightning.pytorch"
    name = f"{package}.{wanted.__name__}"
    raise ConfigError(
        f"{located(source, key)}: {made.__name__} is no {wanted.__name__}. "
        f"Name a subclass of {name}."
    )


def _build_around(section: DictConfig, key: str, source: str, first: Any) -> Any:
    """Build a class whose first argument is not from the config."""
    cls = find_class(section.class_path, f"{key}.class_path", source=source)
    name = next(iter(inspect.signature(cls).parameters))
    return build(section, key, source=source, **{name: first})


def _select_key(key: str) -> str:
    """``trainer.callbacks.0`` as OmegaConf selects it."""
    parent, _, last = key.rpartition(".")
    return f"{parent}[{last}]" if last.isdigit() else key
