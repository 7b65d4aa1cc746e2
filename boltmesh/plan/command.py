"""``boltmesh plan``: what every ZeRO stage and offload would need, before a rank is started.

Torch-free for the GPT that comes with boltmesh. Any other model is built without memory, which
needs torch, and its activations are counted on one batch of the config's data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from boltmesh.axes import divisors
from boltmesh.configs.advice import located, name_choices, nearest, one_line
from boltmesh.configs.load import RECIPE_FOLDER, find, load, source_named
from boltmesh.errors import ConfigError
from boltmesh.plan.mesh_plan import SEVERAL_AXES, plan_mesh, write_memory, write_mesh
from boltmesh.plan.stage_plan import PIPELINE, plan_stages, write_stages
from boltmesh.plan.strategy_options import (
    AUTO_NOTE,
    PREFIX,
    as_mapping,
    check_given,
    class_of,
    copies_note,
    float8_note,
    given_to,
    offload_error,
    optimizer_copies,
    own_options,
    sharing_of,
    trainer_reads_gradients,
)
from boltmesh.plan.text import StrategyRow, write_row, write_table
from boltmesh.strategies.cost_model.memory import estimate_memory
from boltmesh.strategies.cost_model.model import (
    GPTSize,
    JobShape,
    ModelShape,
    ShardingLayout,
    Widths,
    describe_gpt,
    size_named,
    widths_of,
)
from boltmesh.strategies.cost_model.offload import keeps_fp32
from boltmesh.strategies.cost_model.step_time import Machine, estimate_step_time
from boltmesh.strategies.cost_model.traffic import estimate_traffic
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.registry import STRATEGIES
from boltmesh.strategy_arguments import check_strategy_name, make_strategy

if TYPE_CHECKING:
    from omegaconf import DictConfig

KNOWN_MODEL = (RECIPE_FOLDER.parent / "examples" / "gpt.py").resolve()
KNOWN_DATA = (RECIPE_FOLDER.parent / "examples" / "text.py").resolve()
TENSOR = "bolt_tensor"
CONTEXT = "bolt_context"
EXPERT = "bolt_expert"
FIND_UNUSED = "bolt_ddp_find_unused_parameters_true"
"""Needs the same as ``bolt_ddp``, so a table has only one of the two."""
DIVIDING = (PIPELINE, TENSOR, CONTEXT, SEVERAL_AXES, EXPERT)
"""Strategies with plans of their own: ``stage_plan.py``, ``tensor_plan.py``, ``context_plan.py``,
``mesh_plan.py`` and ``expert_plan.py``."""

NOT_COUNTED = ("activation_checkpointing", "tile_logits")
"""Arguments by which whole models keep less than their plan says; plans of meshes count them."""

AUTO = "bolt_auto"
"""One of the others, chosen at set-up."""

REPLICATED = "bolt_replicated"
"""One process over several devices, whose contents differ."""


@dataclass(frozen=True)
class Plan:
    """The inputs of one command."""

    model: ModelShape
    job: JobShape
    own: str
    """The strategy of the config."""
    sharings: dict[str, ShardingLayout]
    machine: Machine
    notes: tuple[str, ...]

    def row(self, name: str) -> StrategyRow:
        """Return memory, traffic and time of one strategy."""
        sharing = self.sharings[name]
        memory = estimate_memory(self.model, sharing, self.job)
        return StrategyRow(
            name=name,
            is_own=name == self.own,
            memory=memory,
            traffic=estimate_traffic(self.model, sharing, self.job),
            time=estimate_step_time(self.model, sharing, self.job, self.machine),
            too_large=self.machine.places_too_small_for(memory.peak),
        )


def plan(
    config: str,
    overrides: Sequence[str],
    *,
    strategy: str | None,
    devices: int | None,
    size: str | None,
    cluster: Path | None,
    as_json: bool,
) -> int:
    """Print the table, or one strategy in detail.

    Raises:
        ConfigError: When the config cannot be planned.
    """
    changes = [*([] if size is None else _size_overrides(size)), *overrides]
    machine = _read_machine(cluster)
    wanted = None if strategy is None else strategy.removeprefix(PREFIX)
    loaded = load(config, changes)
    if wanted == REPLICATED.removeprefix(PREFIX):
        raise ConfigError(
            f"{find(config)}: boltmesh plan counts what one rank has, and {REPLICATED} is one "
            f"process over several devices. Plan --strategy ddp, whose ranks have as much."
        )
    named = loaded.strategy.get("name") if wanted is None else f"{PREFIX}{wanted}"
    is_mesh = named == SEVERAL_AXES
    if wanted is None and not is_mesh and loaded.strategy.get("expert") is not None:
        named = EXPERT  # also of ZeRO by another name
    if named in DIVIDING:
        source = source_named(config, changes)
        check_strategy_name(loaded.strategy.get("name"), source=source)
        if cluster is not None and not is_mesh:
            raise ConfigError(
                f"--cluster {cluster}: a plan of {named} states no times, and no memory that a "
                f"rank has. Leave --cluster out, or plan --strategy 3d with its sizes."
            )
        own = loaded.strategy.name if wanted is None else named
        given = given_to(own, loaded, overrides)
        section = OmegaConf.create({"name": own, **given})
        make_strategy(section, source=source)  # refuses what a run would refuse
        per_node = ranks_per_node(loaded, devices, source)
        print(plan_divided(named, loaded, per_node, given, machine, source, as_json=as_json))
        return 0
    made = make_plan(config, overrides, devices=devices, size=size, cluster=cluster)
    chosen = list(made.sharings) if strategy is None else [_find_strategy(strategy, made)]
    rows = [made.row(each) for each in chosen]
    if as_json:
        print(json.dumps(_as_data(made, rows)))
    elif strategy is None:
        print(write_table(made.model, made.job, rows, made.notes))
    else:
        print(write_row(made.model, made.job, rows[0], made.notes))
    return 0


def make_plan(
    config: str,
    overrides: Sequence[str],
    *,
    devices: int | None = None,
    size: str | None = None,
    cluster: Path | None = None,
) -> Plan:
    """Describe the model, the job and the strategies of a config."""
    # The command line wins over the size.
    changes = [*([] if size is None else _size_overrides(size)), *overrides]
    loaded, source = load(config, changes), source_named(config, changes)
    if size is not None and not _is_shipped(loaded.model.class_path, KNOWN_MODEL, "GPT"):
        raise ConfigError(
            f"{source}: --size={size} is a size of the GPT that comes with boltmesh, and the model "
            f"is {loaded.model.class_path}. Leave --size out, and set model.init_args instead."
        )
    check_strategy_name(loaded.strategy.get("name"), source=source)
    widths = widths_of(loaded.trainer.precision)
    per_node = ranks_per_node(loaded, devices, source)
    own = loaded.strategy.name
    given = as_mapping(loaded.strategy)
    sharings = {
        name: sharing_of(name, STRATEGIES[name], {})
        for name in STRATEGIES
        if name not in (*DIVIDING, REPLICATED, AUTO) and (name != FIND_UNUSED or name == own)
    }
    options = None
    if own in sharings:
        options = own_options(STRATEGIES[own], given, source)
        sharings[own] = sharing_of(own, STRATEGIES[own], given)
    else:
        check_given(STRATEGIES[own], given, source)
    model, copies, notes = _describe(loaded, widths, options, source)
    shard_size = None if options is None else options.shard_size
    job = _job_of(loaded, per_node, shard_size, copies, source)
    if loaded.trainer.accelerator == "auto":
        notes += (AUTO_NOTE,)
    notes += float8_note(given)
    left_out = [each for each in NOT_COUNTED if given.get(each) is not None]
    if left_out:
        notes += (f"activations and work are those without {' and '.join(left_out)}",)
    if not keeps_fp32(model, widths):
        precision = loaded.trainer.precision
        if own in sharings and sharings[own].has_engine:
            raise offload_error(precision, source)
        sharings = {name: each for name, each in sharings.items() if not each.has_engine}
        notes += (f"offload keeps state in fp32, so it cannot be had with precision={precision}",)
    made = Plan(model, job, own, sharings, _read_machine(cluster), notes)
    if own not in sharings:
        return made
    is_replica = sharings[own].stage == 0
    note = copies_note(loaded, given, made.row(own).memory.kept, is_replica=is_replica)
    return replace(made, notes=(*notes, *note))


def _job_of(
    config: "DictConfig",
    per_node: int,
    shard_size: int | str | None,
    state_copies: int,
    source: str,
) -> JobShape:
    """Return the facts of a config that hold for every strategy."""
    trainer = config.trainer
    job = JobShape(
        num_ranks=per_node * trainer.num_nodes,
        widths=widths_of(trainer.precision),
        shard_size=per_node if shard_size == "node" else shard_size,  # type: ignore[arg-type]
        num_microbatches=trainer.accumulate_grad_batches,
        state_copies=state_copies,
        reads_gradients=trainer_reads_gradients(config),
        is_on_host=trainer.accelerator == "cpu",
    )
    if job.num_ranks % job.num_shards:
        nearest_fit = min(divisors(job.num_ranks), key=lambda each: abs(each - job.num_shards))
        raise ConfigError(
            f"{located(source, 'strategy.shard_size')}={job.num_shards} does not divide "
            f"{job.num_ranks} ranks. Set strategy.shard_size={nearest_fit}."
        )
    return job


def plan_divided(
    name: str,
    config: "DictConfig",
    per_node: int,
    given: Mapping[str, Any],
    machine: Machine,
    source: str,
    *,
    as_json: bool,
) -> str:
    """Return the plan of a strategy of ``DIVIDING`` as it is printed."""
    if name == PIPELINE:
        stages = plan_stages(config, per_node * config.trainer.num_nodes, given, source=source)
        return json.dumps(stages.as_data()) if as_json else write_stages(stages)
    if name == TENSOR:
        from boltmesh.plan.tensor_plan import plan_tensor, write_tensor

        division = plan_tensor(config, per_node, given, source=source)
        return json.dumps(division.as_data()) if as_json else write_tensor(division)
    if name == CONTEXT:
        from boltmesh.plan.context_plan import plan_context, write_context

        count = per_node * config.trainer.num_nodes
        sequence = plan_context(config, count, given, source=source)
        shared = {"attention", "balance", "max_gather_bytes", "dims", "tile_tokens", "zero_stage"}
        same = {key: each for key, each in given.items() if key in shared}
        same |= {"pipeline": 1, "tensor": 1, "context": sequence.size}
        same["data"] = count // sequence.size
        mesh = plan_mesh(config, per_node, {"zero_stage": 0, **same}, machine, source=source)
        if as_json:
            return json.dumps({**mesh.as_data(), **sequence.as_data()})
        return f"{write_context(sequence)}\n\n{write_memory(mesh)}"
    if name == EXPERT:
        from boltmesh.plan.expert_plan import plan_expert, write_expert

        experts = plan_expert(config, per_node, given, source=source)
        return json.dumps(experts.as_data()) if as_json else write_expert(experts)
    mesh = plan_mesh(config, per_node, given, machine, source=source)
    return json.dumps(mesh.as_data()) if as_json else write_mesh(mesh)


def _describe(
    config: "DictConfig", widths: Widths, options: ZeroOptions | None, source: str
) -> tuple[ModelShape, int, tuple[str, ...]]:
    """The model, how many copies its optimizer keeps, and what was assumed."""
    known = _known_batch(config)
    if known is None or (options is not None and options.blocks is not None):
        from boltmesh.plan.dry_model import describe_model

        model, made, notes = describe_model(config, options, source=source)
        optimizer = class_of(made)
    else:
        size = GPTSize.of(as_mapping(config.model.init_args))
        model, notes = describe_gpt(size, batch=known, widths=widths), ()
        optimizer = "AdamW", {}
    copies, note = optimizer_copies(config, *optimizer)
    return model, copies, (*notes, *note)


def _known_batch(config: "DictConfig") -> tuple[int, int] | None:
    """Windows and tokens of a micro-batch, where model and data are the ones that come along."""
    if not _is_shipped(config.model.class_path, KNOWN_MODEL, "GPT"):
        return None
    if not _is_shipped(config.data.class_path, KNOWN_DATA, "TextData"):
        return None
    arguments = config.data.init_args
    return int(arguments.get("batch_size", 32)), int(arguments.get("block_size", 128))


def _is_shipped(class_path: str | None, file: Path, name: str) -> bool:
    path, _, given = (class_path or "").rpartition(":")
    return given == name and Path(path).resolve() == file


def _size_overrides(name: str) -> list[str]:
    size = size_named(name)
    return [f"model.init_args.{key}={value}" for key, value in asdict(size).items()]


def _find_strategy(name: str, made: Plan) -> str:
    full = name if name.startswith(PREFIX) else f"{PREFIX}{name}"
    if full in made.sharings:
        return full
    known = [each.removeprefix(PREFIX) for each in made.sharings]
    guess = nearest(name, known)
    hint = f"Did you mean '{guess}'?" if guess else f"Use {name_choices(known, at_most=20)}."
    raise ConfigError(f"There is no strategy '{name}'. {hint}")


def ranks_per_node(config: "DictConfig", devices: int | None, source: str) -> int:
    """Return the ranks of a node that a plan is for: ``--devices``, or those of the config."""
    if devices is not None:
        return devices
    asked = config.trainer.devices
    if OmegaConf.is_list(asked):
        return len(asked)
    text = str(asked)
    if "," in text:
        return sum(bool(name) for name in text.split(","))
    if text.isdecimal():
        return int(text)
    raise ConfigError(
        f"{located(source, 'trainer.devices')}={asked} depends on the machine that the plan is "
        f"for. Add --devices 8, or as many as one node of it has."
    )


def _read_machine(path: Path | None) -> Machine:
    """Return the machine that a file describes; all values are unknown if there is no file."""
    if path is None:
        return Machine()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}.") from error
    if not isinstance(content, dict):
        known = ", ".join(each.name for each in fields(Machine))
        raise ConfigError(f"{path} is no mapping of measured numbers. Its keys are {known}.")
    return Machine.of(content, source=str(path))


def _as_data(made: Plan, rows: Sequence[StrategyRow]) -> dict[str, Any]:
    """The plan as JSON has it: bytes and seconds, None if unknown."""
    return {
        "schema": 1,
        "model": {
            "name": made.model.name,
            "parameters": made.model.numel,
            "trained_parameters": made.model.trained_numel,
            "activations": None
            if made.model.activations is None
            else asdict(made.model.activations),
        },
        "ranks": made.job.num_ranks,
        "shards": made.job.num_shards,
        "notes": list(made.notes),
        "strategies": [row.as_data() for row in rows],
    }
