"""The keys of a config: one dataclass per section, one typed field per key.

OmegaConf builds the config from these classes, so they are plain data and import nothing heavy.
A field's metadata carries what an error message needs beyond the type: a value that works, the
smallest and the largest value allowed, the form of a string. ``load.py`` reads both.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Optional, Union, get_origin, get_type_hints

from omegaconf import MISSING as REQUIRED

from boltmesh.telemetry.snapshot import AlertThresholds

# OmegaConf 2.4 reads annotations with get_type_hints, and `X | None` exists at run time on Python
# 3.10 only for real classes, not for Literal of a Union: Optional and Union say the same on all.
# _key makes a dataclasses.field, which RUF009 cannot see.
# ruff: noqa: UP007, UP045, RUF009

TIME_FORM = r"\d+:\d\d:\d\d:\d\d"
"""As Lightning wants it. YAML 1.1 reads 12:00:00:00 without quotes as a number to the base 60."""


def _key(default: Any, example: Any = None, **more: Any) -> Any:
    """A field whose errors can show ``example``, or else its default, as a value that works."""
    metadata = {"example": default if example is None else example, **more}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ClassSection:
    """A class by name and the arguments it is built with."""

    class_path: str = _key(REQUIRED, "package.module.Class")
    """``package.module.Class``, or ``path/to/file.py:Class`` with the path relative to this file
    or to the working directory."""
    init_args: dict[str, Any] = _key({}, "{}")
    """Keyword arguments of the class. A mapping with ``class_path`` in it is built first."""


@dataclass
class OptionalClassSection:
    """A class by name and its arguments, or nothing at all."""

    class_path: Optional[str] = _key(None, "package.module.Class")
    """As for ``model.class_path``; null leaves the section out."""
    init_args: dict[str, Any] = _key({}, "{}")
    """Keyword arguments of the class."""


@dataclass
class SchedulerSection(OptionalClassSection):
    """A learning-rate scheduler, given the optimizer as its first argument."""

    interval: Literal["step", "epoch"] = _key("epoch")
    """Whether the scheduler moves after every optimizer step or every epoch."""
    frequency: int = _key(1, minimum=1)
    """Move once per this many intervals."""
    monitor: Optional[str] = _key(None, "val_loss")
    """The logged value that ``ReduceLROnPlateau`` watches."""


@dataclass
class OptimizerSection(OptionalClassSection):
    """An optimizer that takes the place of the module's own ``configure_optimizers``."""

    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    """Left out unless its ``class_path`` is given."""


@dataclass
class TrainerSection:
    """Arguments of ``lightning.pytorch.Trainer``, with its defaults unless said otherwise."""

    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = _key("auto", "cpu")
    """``auto`` takes CUDA devices when there are any; ``gpu`` is another word for ``cuda``."""
    devices: Any = _key("auto", 2, maximum=65_536)
    """Ranks on each node: a number, ``auto``, or a list of CUDA devices such as ``[0, 2]``. One
    rank per CUDA device; on a CPU ``auto`` is one rank, or what the launcher has started."""
    num_nodes: int = _key(1, minimum=1)
    """Machines. More than one needs torchrun or srun to start the ranks."""
    precision: Literal[
        "32-true",
        "16-mixed",
        "bf16-mixed",
        "16-true",
        "bf16-true",
        "64-true",
        "transformer-engine",
        "transformer-engine-float16",
    ] = _key("32-true", "bf16-mixed")
    """Width of the arithmetic. 16-mixed needs a CUDA device."""
    max_epochs: Optional[int] = _key(None, 10, minimum=-1)
    """Stop after this many epochs; -1 is no limit. Without any limit Lightning stops at 1000."""
    min_epochs: Optional[int] = _key(None, 1, minimum=0)
    """Early stopping waits for this many epochs."""
    max_steps: int = _key(-1, 1000, minimum=-1)
    """Stop after this many optimizer steps; -1 is no limit."""
    min_steps: Optional[int] = _key(None, 100, minimum=0)
    """Early stopping waits for this many optimizer steps."""
    max_time: Optional[str] = _key(
        None, "00:12:00:00", form=TIME_FORM, form_in_words="days:hours:minutes:seconds in quotes"
    )
    """Stop after this wall time, as days:hours:minutes:seconds."""
    limit_train_batches: Optional[Union[int, float]] = _key(None, 100, minimum=0)
    """Batches per epoch: a whole number, or a fraction such as 0.1."""
    limit_val_batches: Optional[Union[int, float]] = _key(None, 10, minimum=0)
    """Validation batches per run of validation: a whole number or a fraction; 0 skips it."""
    limit_test_batches: Optional[Union[int, float]] = _key(None, 10, minimum=0)
    """Test batches: a whole number or a fraction."""
    limit_predict_batches: Optional[Union[int, float]] = _key(None, 10, minimum=0)
    """Prediction batches: a whole number or a fraction."""
    fast_dev_run: Union[bool, int] = _key(False, True, minimum=0)
    """Run this many batches of everything and keep nothing: a quick look for mistakes."""
    overfit_batches: Union[int, float] = _key(0.0, 4, minimum=0)
    """Train and validate on this many, or this fraction, of the training batches only."""
    val_check_interval: Optional[Union[int, float, str]] = _key(
        None, 500, form=r"(?!-|0*(\.0*)?$).+", form_in_words="a number above 0, or a time in quotes"
    )
    """Validate after this many batches (whole number), at this fraction of an epoch, or after
    this time (days:hours:minutes:seconds)."""
    check_val_every_n_epoch: Optional[int] = _key(1, 1, minimum=1)
    """Validate every n epochs; null counts the batches of ``val_check_interval`` over epochs."""
    num_sanity_val_steps: Optional[int] = _key(None, 2, minimum=-1)
    """Validation batches before training begins; 0 skips them. Lightning's default is 2."""
    reload_dataloaders_every_n_epochs: int = _key(0, 1, minimum=0)
    """Ask the data for new loaders every n epochs; 0 is never."""
    log_every_n_steps: Optional[int] = _key(None, 10, minimum=0)
    """Write to the loggers every n optimizer steps. Lightning's default is 50."""
    accumulate_grad_batches: int = _key(1, 4, minimum=1)
    """Batches per optimizer step, on each rank."""
    gradient_clip_val: Optional[Union[int, float]] = _key(None, 1.0, minimum=0)
    """Clip gradients to this norm, or value; null does not clip."""
    gradient_clip_algorithm: Optional[Literal["norm", "value"]] = _key(None, "norm")
    """Whether ``gradient_clip_val`` limits the global norm (the default) or each element."""
    deterministic: Optional[Union[bool, Literal["warn"]]] = _key(None, True)
    """Refuse operations that do not repeat to the bit; ``warn`` only warns."""
    benchmark: Optional[bool] = _key(None, True)
    """Let cuDNN try its algorithms; pays off when shapes do not change."""
    inference_mode: bool = _key(True)
    """Evaluate under ``torch.inference_mode`` instead of ``torch.no_grad``."""
    use_distributed_sampler: bool = _key(True)
    """Give each rank of the data axis its own part of the data. False: your loaders do."""
    sync_batchnorm: bool = _key(False, True)
    """Compute batch-norm statistics over all ranks."""
    detect_anomaly: bool = _key(False, True)
    """Find the operation that made a NaN in the backward pass; slow."""
    profiler: Optional[Literal["simple", "advanced", "pytorch"]] = _key(None, "simple")
    """Lightning's profiler of its own hooks."""
    enable_progress_bar: Optional[bool] = _key(None, True)
    """Draw a progress bar; null is Lightning's default, yes."""
    enable_model_summary: Optional[bool] = _key(None, True)
    """Print the layers and their sizes before training; null is Lightning's default, yes."""
    enable_autolog_hparams: bool = _key(True)
    """Write the module's hyperparameters to the loggers."""
    callbacks: list[ClassSection] = _key([], "[]")
    """More callbacks. The checkpoint callback is made from ``run.checkpoint``."""
    logger: Optional[list[ClassSection]] = _key(None, "[]")
    """Loggers; null writes ``metrics.csv`` into the run's folder, [] logs nothing."""


@dataclass
class CheckpointSection:
    """When to keep a checkpoint, and which."""

    enabled: bool = _key(True)
    """False keeps none, not even when the run is stopped."""
    every_n_steps: Optional[int] = _key(None, 100, minimum=1)
    """Save every n optimizer steps. With ``monitor``, the newest is kept beside the best."""
    every_n_epochs: Optional[int] = _key(None, 1, minimum=1)
    """Save every n epochs; when neither is given, every epoch and after each validation."""
    monitor: Optional[str] = _key(None, "val_loss")
    """The logged value that ranks checkpoints; null keeps the newest."""
    mode: Literal["min", "max"] = _key("min")
    """Whether a small or a large ``monitor`` is good."""
    save_top_k: int = _key(1, minimum=-1)
    """How many of the best to keep; -1 keeps all, 0 none."""
    save_last: bool = _key(True)
    """Keep a copy of the newest as last.ckpt."""
    save_weights_only: bool = _key(False, True)
    """Leave out optimizer and loop state: smaller, but nothing can be resumed from it."""
    filename: Optional[str] = _key(
        None,
        "'{epoch}-{step}'",
        form=r"[^/]+",
        form_in_words="a name without '/': resume=auto does not look into folders",
    )
    """Name without .ckpt; ``{step}``, ``{epoch}`` and logged names are filled in."""


@dataclass
class RunSection:
    """Where a run lives, how it starts, and what it keeps."""

    name: Optional[str] = _key(
        None, "my-run", form=r"[\w.-]*\w", form_in_words="a name of letters, digits, '-', '_', '.'"
    )
    """Names the run's folder; null takes the name of the config file."""
    dir: str = _key("runs")
    """Folder of all runs; a run writes to ``dir/name/0``, the next one to ``dir/name/1``."""
    seed: Optional[int] = _key(1, minimum=0, maximum=2**32 - 1)
    """Seeds Python, NumPy, torch and the loaders' workers; null seeds nothing."""
    resume: Optional[str] = _key(None, "auto")
    """Continue a training run: ``auto`` from its newest complete checkpoint (from the start when
    there is none), the path or address of a checkpoint, or the address of a folder of them, whose
    newest complete one it is."""
    restarts: int = _key(0, 3, minimum=0)
    """How often ranks that ``boltmesh fit`` has started are started again after a failure, from
    the run's newest whole checkpoint; 0 never. torchrun and SLURM restart their own ranks."""
    ckpt_path: Optional[str] = _key("auto")
    """Weights for validate, test and predict: ``auto`` is the run's newest complete checkpoint,
    else a path or an address; null takes the model as it is built."""
    matmul_precision: Literal["highest", "high", "medium"] = _key("highest", "high")
    """float32 matrix products on CUDA: exact, TF32, or bf16 inside."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)


_ALERTS = AlertThresholds()
"""Thresholds of a script that gives none; a config begins with the same."""


@dataclass
class AlertsSection:
    """When ``boltmesh top`` raises an alert while it watches the run; null or false never does."""

    loss_not_finite: bool = _key(_ALERTS.loss_not_finite)
    """The loss of a step is NaN or infinite."""
    throughput_drop: Optional[float] = _key(_ALERTS.throughput_drop, 0.5, minimum=0.01, maximum=1)
    """Share of its median so far that the throughput loses; 0.5 is half as fast. Validation and
    checkpoints do not count."""
    memory_share: Optional[float] = _key(_ALERTS.memory_share, 0.97, minimum=0.01, maximum=1)
    """Share of a GPU's memory that is in use, by whatever runs on it."""
    temperature_celsius: Optional[float] = _key(_ALERTS.temperature_celsius, 90, minimum=1)
    """Temperature of a GPU."""
    stall_s: Optional[float] = _key(_ALERTS.stall_s, 120, minimum=1)
    """Seconds without a step of any rank, outside validation and checkpoints. A first step that
    compiles for long needs more."""
    job_failed: bool = _key(_ALERTS.job_failed)
    """The run fails or crashes."""


@dataclass
class Config:
    """A whole run."""

    model: ClassSection = field(default_factory=ClassSection)
    """The LightningModule."""
    data: OptionalClassSection = field(default_factory=OptionalClassSection)
    """The LightningDataModule; left out when the module brings its own loaders."""
    trainer: TrainerSection = field(default_factory=TrainerSection)
    strategy: dict[str, Any] = _key({"name": "bolt_ddp"}, "{name: bolt_ddp}")
    """``name`` as it is registered, beside it the arguments of the strategy of that name. On the
    command line ``strategy=NAME`` does too; another name drops the arguments of the old one."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    """Replaces the module's ``configure_optimizers`` when ``class_path`` is given."""
    run: RunSection = field(default_factory=RunSection)
    alerts: AlertsSection = field(default_factory=AlertsSection)


SECTIONS = tuple(each.name for each in fields(Config))
SHORTHAND_SECTIONS = ("trainer", "run")
"""A key of exactly one of these may be written without its section on the command line."""


def kind_of(section: type[Any], name: str) -> Literal["section", "mapping", "classes", "value"]:
    """Return the kind of a key of a section.

    ``section`` is another of these classes, ``mapping`` has free keys, ``classes`` is a list of
    ClassSection, and ``value`` is a leaf.
    """
    hint = get_type_hints(section)[name]
    if is_dataclass(hint):
        return "section"
    if hint in {list[ClassSection], Optional[list[ClassSection]]}:
        return "classes"
    return "mapping" if get_origin(hint) is dict else "value"
