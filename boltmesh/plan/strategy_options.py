"""The strategy of a config with its options as plans read them, and what holds for any strategy.

``optimizer_copies`` says how much state an optimizer keeps, by its name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from boltmesh.configs.advice import located
from boltmesh.errors import ConfigError
from boltmesh.plan.text import size_text
from boltmesh.strategies.cost_model.memory import copied_bytes
from boltmesh.strategies.cost_model.model import Bytes, ShardingLayout
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.registry import Entry
from boltmesh.strategy_arguments import KEPT_KEYS, SHARED, check_strategy_arguments, named_error

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch.optim import Optimizer

PREFIX = "bolt_"

AUTO_NOTE = "accelerator=auto is planned as for GPUs; accelerator=cpu plans for the CPU"

DDP_KEYS = (
    "bucket_cap_mb",
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "gradient_compression",
    "powersgd_rank",
    "powersgd_start_step",
)
"""Arguments of ``DDPStrategy`` itself, listed here so that a plan of it need not load torch."""


def float8_note(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the changes of bytes and times by ``float8``, as a note below a plan."""
    if given.get("float8") is None:
        return ()
    note = (
        "float8 changes no bytes: weights are gathered, and activations kept, in the type of "
        "precision; in a cluster's file, device_tflops is then the speed of float8 products"
    )
    return (note,)


def copies_note(
    config: "DictConfig",
    given: Mapping[str, Any],
    kept: Mapping[str, Bytes],
    *,
    is_replica: bool = False,
) -> list[str]:
    """Return the memory of ``checkpoint_in_memory_every``, as a note below a plan."""
    every = given.get("checkpoint_in_memory_every")
    if every is None:
        return []
    hosts = config.trainer.num_nodes
    size = size_text(copied_bytes(kept, num_hosts=hosts, is_replica=is_replica)).strip()
    whose = "for each rank"
    if is_replica:
        whose = "in all" if hosts == 1 else "on each of the first two hosts"
    return [f"checkpoint_in_memory_every={every} takes {size} of host memory {whose}"]


def as_mapping(section: Any) -> dict[str, Any]:
    """Return a section of a config as a plain mapping."""
    made = OmegaConf.to_container(section, resolve=True)
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}


def given_to(name: str, config: "DictConfig", overrides: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a strategy that is planned with a config.

    Args:
        name: Registered name of the strategy.
        config: The whole.
        overrides: ``key=value`` of the command line, which is all that counts of the section where
            the config's own strategy is another one.
    """
    section = as_mapping(config.strategy)
    section.pop("name", None)
    if config.strategy.get("name") == name:
        return section
    keys = [each.partition("=")[0] for each in overrides]
    own = {each.removeprefix("strategy.").split(".")[0] for each in keys if "strategy." in each}
    kept = {key for key in KEPT_KEYS if section.get(key) is not None}
    return {key: value for key, value in section.items() if key in own | kept}


def options_of(entry: Entry, given: Mapping[str, Any]) -> ZeroOptions | None:
    """The options of a ZeRO strategy; None for plain data parallelism."""
    if entry.class_name != "ZeROStrategy":
        return None
    known = {each.name for each in fields(ZeroOptions)}
    chosen = {key: value for key, value in {**entry.arguments, **given}.items() if key in known}
    if chosen.get("blocks") is not None:
        chosen["blocks"] = tuple(chosen["blocks"])
    return ZeroOptions(**chosen)


def check_given(entry: Entry, given: Mapping[str, Any], source: str) -> None:
    """Refuse arguments that a strategy does not take, as a run does.

    Raises:
        ConfigError: One line, with what it takes.
    """
    arguments = {key: value for key, value in given.items() if key != "name"}
    check_strategy_arguments(entry.load(), arguments, source=source)


def own_options(entry: Entry, given: Mapping[str, Any], source: str) -> ZeroOptions | None:
    """The config's own, whose mistakes are named as in the config."""
    known = {"name", *SHARED}
    if entry.class_name == "ZeROStrategy":
        known.update(each.name for each in fields(ZeroOptions))
    elif entry.class_name == "DDPStrategy":
        known.update(DDP_KEYS)
    if not known.issuperset(given):  # only then torch is loaded, to ask the strategy itself
        check_given(entry, given, source)
    try:
        return options_of(entry, given)
    except ConfigError as error:
        raise named_error(error, source) from error


def sharing_of(name: str, entry: Entry, given: Mapping[str, Any]) -> ShardingLayout:
    """Return how a strategy shards, by its name and options."""
    short = name.removeprefix(PREFIX)
    options = options_of(entry, given)
    if options is None:
        return ShardingLayout(short, 0, keeps_in_buckets=given.get("gradient_as_bucket_view"))
    return options.sharing(short)


def offload_error(precision: str, source: str) -> ConfigError:
    """Return why nothing is offloaded of weights in another type than fp32."""
    return ConfigError(
        f"{located(source, 'trainer.precision')}={precision} keeps weights in another type than "
        f"fp32, and offloaded state is fp32. Set trainer.precision=bf16-mixed."
    )


def trainer_reads_gradients(config: "DictConfig") -> bool:
    """Whether the Trainer itself looks at gradients, as a scaler and clipping by value do."""
    trainer = config.trainer
    return bool(trainer.precision == "16-mixed" or trainer.gradient_clip_algorithm == "value")


def class_of(optimizer: "Optimizer | None") -> tuple[str | None, Mapping[str, Any]]:
    """Return name and arguments of an optimizer's class; None and an empty one without it."""
    return (None, {}) if optimizer is None else (type(optimizer).__name__, optimizer.defaults)


STATE_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "SGD": 0}
"""Tensors of a parameter's size that torch's optimizers keep as they come."""


def optimizer_copies(
    config: "DictConfig", name: str | None, arguments: Mapping[str, Any]
) -> tuple[int, tuple[str, ...]]:
    """Tensors of a parameter's size that an optimizer keeps, and what is assumed where unknown.

    Args:
        config: Whose own optimizer comes before the model's.
        name: Name of the class that the model makes; None if it makes it beside a Trainer only.
        arguments: Arguments of the class.
    """
    if config.optimizer.class_path is not None:
        name = re.split(r"[.:]", config.optimizer.class_path)[-1]
        arguments = config.optimizer.init_args
    if name not in STATE_COPIES:
        who = (
            "the optimizer is made beside a Trainer only" if name is None else f"{name} is unknown"
        )
        return 2, (f"{who}: two tensors of state for each parameter are assumed, as Adam has",)
    copies = STATE_COPIES[name]
    copies += bool(arguments.get("amsgrad")) + (name == "SGD" and bool(arguments.get("momentum")))
    return copies, ()
