"""Layouts of a config: strategies, commands that start them, and the layouts that were found."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from boltmesh.axes import ALL_AXES
from boltmesh.configs.advice import show
from boltmesh.configs.load import load, without_section
from boltmesh.errors import BoltMeshError
from boltmesh.plan.strategy_options import as_mapping
from boltmesh.planner.command import strategy_text
from boltmesh.planner.layout import Layout
from boltmesh.strategies.cost_model.memory import MemoryEstimate
from boltmesh.strategies.cost_model.model import ModelShape
from boltmesh.strategies.pipeline.schedules.registry import schedule_kind
from boltmesh.strategies.registry import STRATEGIES
from boltmesh.strategy_arguments import accepted_arguments, make_strategy

if TYPE_CHECKING:
    from boltmesh.advisor.machine import Hardware
    from boltmesh.advisor.prediction import RankStep

BATCH_KEY = "data.init_args.batch_size"
"""The key that a layout changes if it has another number of replicas, where the config has it."""
KEPT = ("timeout_s", "telemetry", "seed", "process_group_backend")
"""Arguments of the config's strategy that say nothing of its layout."""
DIVIDED = "bolt_3d"


@dataclass(frozen=True)
class ConfigLayout:
    """A layout of a config, and the batches that make the config's step.

    Attributes:
        axes: What is divided, and what each rank keeps. Its sequences are those of no batch.
        batch: Rows of a batch of a replica; None: as the config has it.
        accumulate: Batches of an optimizer step.
        microbatches: Parts of a batch in a pipeline; None: as the strategy takes them.
    """

    axes: Layout
    batch: int | None = None
    accumulate: int = 1
    microbatches: int | None = None

    @property
    def name(self) -> str:
        """Registered name of the strategy."""
        return self.axes.strategy[0]

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the strategy, beside those that its name fixes."""
        more = {} if self.microbatches is None else {"microbatches": self.microbatches}
        return {**self.axes.strategy[1], **more}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Ranks of the axes."""
        return {axis: getattr(self.axes, axis, 1) for axis in ALL_AXES}

    @property
    def division(self) -> Hashable:
        """Key of layouts that one plan serves: the data axis is computed from that plan."""
        axes = self.axes
        how = axes.schedule, axes.has_sequence_parallel, axes.recompute
        return axes.axis_sizes, how, self.batch, self.accumulate, self.microbatches

    @property
    def num_counted_stages(self) -> int:
        """Stages whose blocks are run to plan it, and one for all other layers."""
        per_rank = schedule_kind(self.axes.schedule or "1f1b").default_stages_per_rank
        return 1 + self.axes.pipeline * per_rank

    def overrides(
        self, name: str, given: Sequence[str], devices: int, nodes: int, *, is_cpu: bool
    ) -> list[str]:
        """Return all ``key=value`` that make this layout of a config, for ``boltmesh fit``.

        Those of the user for another strategy are left out: their arguments are not planned.

        Args:
            name: The config, by name or path.
            given: ``key=value`` of the user.
            devices: Ranks of a node.
            nodes: Nodes of the job.
            is_cpu: The ranks are on the CPU.
        """
        config, named = load(name, given), f"strategy.name={self.name}"
        if config.strategy.name != self.name:
            given = without_section(given, "strategy")
        section, before = as_mapping(config.strategy), load(name, [*given, named]).strategy
        entry = STRATEGIES[self.name]
        usual = {**accepted_arguments(entry.load()), **entry.arguments}
        kept = {key: section[key] for key in KEPT if section.get(key, usual[key]) != usual[key]}
        wanted = {**kept, **self.arguments}
        # Other arguments go back to what the name means.
        for key, value in as_mapping(before).items():
            if wanted.setdefault(key, usual.get(key, value)) == value:
                del wanted[key]
        found = [*given, named]
        found += [f"strategy.{key}={show(value)}" for key, value in wanted.items()]
        asked = config.trainer.devices
        own = asked if isinstance(asked, int | str) else len(asked)
        if str(own) not in {str(devices), "auto", "-1"}:
            found.append(f"trainer.devices={devices}")
        if config.trainer.accelerator == "cpu" and not is_cpu:
            found.append("trainer.accelerator=auto")
        if nodes != config.trainer.num_nodes:
            found.append(f"trainer.num_nodes={nodes}")
        if self.accumulate != config.trainer.accumulate_grad_batches:
            found.append(f"trainer.accumulate_grad_batches={self.accumulate}")
        if self.batch is not None:
            found.append(f"{BATCH_KEY}={self.batch}")
        return found

    def trainer_text(self, devices: int, nodes: int, *, is_cpu: bool) -> str:
        """Return the ``Trainer`` that makes this layout in Python."""
        parts = [strategy_text(self.name, self.arguments), f"devices={devices}"]
        if is_cpu:
            parts.insert(1, "accelerator='cpu'")
        if nodes > 1:
            parts.append(f"num_nodes={nodes}")
        if self.accumulate > 1:
            parts.append(f"accumulate_grad_batches={self.accumulate}")
        text = f"Trainer({', '.join(parts)})"
        return text if self.batch is None else f"{text}, batches of {self.batch} rows"

    def described(self) -> str:
        """Return the layout in a few words."""
        words = [self.name]
        words.append(sizes_text(self.sizes) or "one rank")
        words += [
            f"{key}={show(value)}" for key, value in self.arguments.items() if key not in ALL_AXES
        ]
        if self.accumulate > 1:
            words.append(f"{self.accumulate} batches a step")
        if self.batch is not None:
            words.append(f"batches of {self.batch}")
        return ", ".join(words)


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return the axes that have several ranks, in words."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its predicted memory and time."""

    layout: ConfigLayout
    time: Mapping[str, float]
    """Seconds of each part of a step."""
    memory: MemoryEstimate
    """The fullest rank's."""
    too_small: tuple[str, ...]
    """Places that have less memory than this needs."""
    is_tight: bool
    """Its memory is within the error of the prediction of the rank's memory."""
    step: "RankStep"
    """Work and traffic of its busiest rank."""
    is_measured: bool = False
    """The parts of ``time`` are predicted, their sum was measured by ``boltmesh tune``."""

    def measured(self, seconds: float) -> "PlannedLayout":
        """Return the same with a step that was measured."""
        factor = seconds / self.seconds
        time = {name: factor * each for name, each in self.time.items()}
        return replace(self, time=time, is_measured=True)

    @property
    def seconds(self) -> float:
        """Predicted time of one step."""
        return sum(self.time.values())

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank: that of its device, of a rank on a CPU that of the host."""
        return self.memory.peak.device or self.memory.peak.host

    @property
    def fits(self) -> bool:
        """Whether every place is large enough."""
        return not self.too_small

    @property
    def has_room(self) -> bool:
        """Whether it fits beyond the error of the prediction."""
        return self.fits and not self.is_tight


@dataclass(frozen=True)
class ConfigSearch:
    """The layouts of one config on some devices."""

    name: str
    """The config, by name or path."""
    overrides: tuple[str, ...]
    """``key=value`` of the user."""
    config: Any
    """The whole, as it was loaded."""
    model: ModelShape
    hardware: "Hardware"
    candidates: tuple[PlannedLayout, ...]
    """All, those that fit first, the fastest first."""
    refused: tuple[tuple[str, str], ...]
    """Layouts that cannot run, with the reason."""
    left_out: int
    """Divisions that were not planned."""
    rows: int | None
    """Rows of an optimizer step, over all replicas; None where they are not known."""
    batches: int
    """Batches of an optimizer step, over all replicas, as the config has them."""
    notes: tuple[str, ...]
    enough_ranks: int | None = None
    """Ranks on which ZeRO-3 fits, where no layout fits on these."""
    changes: Mapping[str, PlannedLayout] = field(default_factory=dict)
    """The best layout by what else there would be, in words."""

    @property
    def fitting(self) -> list[PlannedLayout]:
        """The layouts that fit."""
        return [each for each in self.candidates if each.fits]

    @property
    def own(self) -> PlannedLayout | None:
        """The layout of the config itself; None if it was not predicted."""
        given = as_mapping(self.config.strategy)
        name = given["name"]
        sizes = {axis: given.get(axis) or 1 for axis in ALL_AXES if axis != "data"}
        if sizes["expert"] == "node":
            sizes["expert"] = self.hardware.ranks_per_node
        kind, stage = given.get("activation_checkpointing"), given.get("stage", 1)
        stage = given.get("zero_stage", stage)
        same = [
            each
            for each in self.candidates
            if each.layout.name == name
            and each.layout.batch is None
            and all(each.layout.sizes[axis] == size for axis, size in sizes.items())
            and each.layout.axes.recomputation == kind
            and each.layout.axes.has_sequence_parallel == bool(given.get("sequence_parallel"))
        ]
        if name in {DIVIDED, "bolt_expert"}:  # without replicas all stages are one
            same.sort(key=lambda each: each.layout.axes.zero != stage)
        return next(iter(same), None)

    def smallest(self, count: int) -> list[PlannedLayout]:
        """Return the layouts that need least memory, of different kinds."""
        chosen: dict[object, PlannedLayout] = {}
        for each in sorted(self.candidates, key=lambda each: each.peak_bytes):
            chosen.setdefault(each.layout.axes.division, each)
        return list(chosen.values())[:count]

    def best(self, count: int = 3) -> list[PlannedLayout]:
        """Return the fastest that fit and differ in kind."""
        chosen: dict[object, PlannedLayout] = {}
        for each in self.fitting:
            chosen.setdefault(each.layout.axes.division, each)
        return list(chosen.values())[:count]


def rows_of_batch(config: Any) -> int | None:
    """Return the rows of a batch; None where the config has no key for them."""
    rows = OmegaConf.select(config, BATCH_KEY)
    return rows if isinstance(rows, int) and not isinstance(rows, bool) else None


def batches_of_step(config: Any, ranks: int, *, source: str) -> int:
    """Return the batches of a step over all replicas, by the config's own layout."""
    made = make_strategy(config.strategy, source=source)
    try:
        replicas = made.choose_layout(ranks).data
    except BoltMeshError:
        replicas = ranks  # its sizes are of other ranks: as many batches as there are ranks
    return int(replicas * config.trainer.accumulate_grad_batches)


def splits(batches: int, rows: int | None, replicas: int) -> tuple[int | None, int] | None:
    """Return rows of a batch and batches of a step for a number of replicas.

    Args:
        batches: Batches of a step over all replicas, as the config has them.
        rows: Rows of each; None where it is not known how to change them.
        replicas: Among which the step is dealt.

    Returns:
        Rows (None: as they are) and batches of each replica; None where the step cannot be dealt.
    """
    if batches % replicas == 0:
        return None, batches // replicas
    if rows is None or (rows * batches) % replicas:
        return None
    own = rows * batches // replicas
    count = -(-batches // replicas)
    while own % count:
        count += 1
    return own // count, count


def smaller_batches(layout: ConfigLayout, rows: int | None) -> Sequence[ConfigLayout]:
    """Return the layout with batches of a half and of a quarter, more of them in a step."""
    own = layout.batch or rows
    if own is None:
        return []
    return [
        replace(layout, batch=own // part, accumulate=layout.accumulate * part)
        for part in (2, 4)
        if own % part == 0
    ]
