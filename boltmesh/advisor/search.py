"""Finds the layouts of a config's own model that fit, the fastest first.

Replicas and ZeRO are computed from one dry run of the module; each division over the pipeline and
the tensor axis is planned by the code that a run divides the model with, so what it would refuse is
refused here.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from boltmesh.advisor.evaluate import (
    judged,
    order,
    plan_divided,
    plan_replicas,
    repeated,
    scaled,
)
from boltmesh.advisor.layouts import (
    BATCH_KEY,
    ConfigLayout,
    ConfigSearch,
    PlannedLayout,
    batches_of_step,
    rows_of_batch,
    sizes_text,
    smaller_batches,
    splits,
)
from boltmesh.advisor.machine import Hardware, key_of, of_cluster
from boltmesh.advisor.prediction import EXCHANGES, NO_WORK, Collective
from boltmesh.axes import divisors
from boltmesh.configs.advice import COMMAND_LINE
from boltmesh.configs.load import load
from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.plan.strategy_options import class_of, optimizer_copies, trainer_reads_gradients
from boltmesh.planner.layout import Layout, Recompute, Tier
from boltmesh.planner.search import Allowed, by_kind, by_prediction, divisions, search, with_room
from boltmesh.planner.transformer import transformer_like
from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    OwnedExperts,
    StepWork,
    widths_of,
)
from boltmesh.strategies.cost_model.offload import keeps_fp32
from boltmesh.strategies.pipeline.schedules.registry import searched_schedules

MOST_RANKS = 4096
"""If the requested job is too small, larger ones up to this number of ranks are tried."""
MOST_DIVISIONS = 12
"""Divisions of layers that are planned, the most promising first."""
SEARCH_S = 16.0
"""Seconds beyond which no division is planned if a layout fits: large models take long."""
MOST_FLOPS = 10**12
"""A larger forward pass is not run on the CPU to find experts."""
MOST_EXPERTS = 1024
"""A step that chooses among more chooses tokens."""
EXCHANGES_OF_LAYER = 7
"""Collectives of a layer of experts for each batch: rows there and back and their weights."""
TRIED = ("schedule", "microbatches", "zero_stage", "sequence_parallel")
BEST = 3
"""Layouts that are printed."""
NO_TILES = {"tile_logits": None, "activation_offload": False}
"""Arguments of a config's strategy that no layout has."""
MIXED = "bf16-mixed"
"""The precision that is looked at beside fp32 on a GPU."""


class ConfigSearcher:
    """Predicts the layouts of one config.

    Args:
        config: Its name or path.
        overrides: ``key=value`` of the command line.
        source: The config's file, for errors.
        hardware: Devices and rates that the layouts are for.
    """

    def __init__(
        self, config: str, overrides: "list[str]", *, source: str, hardware: Hardware
    ) -> None:
        self.name, self.overrides, self.source = config, overrides, source
        self.hardware = hardware
        self.loaded = load(config, overrides)
        self._refused: dict[str, str] = {}
        self._scale = 1.0
        """Tokens of a batch over those that the config has."""
        self._models: dict[Recompute, ModelShape] = {}
        """The model by what its blocks compute again."""
        self._found: list[PlannedLayout] = []
        self._configs: dict[tuple[object, ...], Any] = {}
        """Configs by what layouts change of them."""
        self._took: dict[Hashable, float] = {}
        """Seconds for each stage in which divisions were planned."""

    def search(self) -> ConfigSearch:
        """Return all layouts, those that fit first.

        Raises:
            ConfigError: When the model cannot be built, or its step cannot be run without data.
        """
        from boltmesh.plan.dry_model import keeping_models

        with keeping_models():
            return self._search()

    def _search(self) -> ConfigSearch:
        from boltmesh.plan.dry_model import describe_model
        from boltmesh.strategies.dry_run.unsupported import nothing_to_train

        self._end = time.monotonic() + SEARCH_S
        model, optimizer, notes = describe_model(self.loaded, None, source=self.source)
        if not any(each.is_trained for unit in model.units for each in unit.tensors):
            raise ConfigError(f"{self.source}: {nothing_to_train(model.name)}")
        if model.work is None or model.activations is None:
            raise ConfigError(
                f"{self.source}: a step's time is predicted by running it without data, and "
                f"{notes[-1]}. Measure layouts with boltmesh bench."
            )
        copies, assumed = optimizer_copies(self.loaded, *class_of(optimizer))
        self._copies = copies
        self._rows = rows_of_batch(self.loaded)
        self._batches = batches_of_step(self.loaded, self.hardware.num_ranks, source=self.source)
        self._models = {"none": model}
        self._found = []
        experts = self._expert_sizes()
        bases = list(divisions(self._allowed(experts)))
        whole = [each for each in bases if not each.is_divided]
        divided = self._ordered([each for each in bases if each.is_divided])
        for base in whole:
            self._found += self._layouts(base)
        num_planned = 0
        for base in divided[:MOST_DIVISIONS]:
            if self._is_late(ConfigLayout(base)):
                continue
            self._found += self._layouts(base)
            num_planned += 1
        self._found += self._scheduled(self._found)
        took = self.hardware.measured.get(key_of(self.loaded), {})
        found = [
            each.measured(took[each.layout.described()].seconds)
            if each.layout.described() in took
            else each
            for each in self._found
        ]
        found.sort(key=order)
        return ConfigSearch(
            self.name,
            tuple(self.overrides),
            self.loaded,
            model,
            self.hardware,
            tuple(found),
            tuple(self._refused.items()),
            len(divided) - num_planned,
            None if self._rows is None else self._rows * self._batches,
            self._batches,
            (*notes, *assumed),
            None if any(each.fits for each in found) else self._enough_ranks(),
            dict(self._changes(found)),
        )

    def _changes(self, found: Sequence[PlannedLayout]) -> Iterator[tuple[str, PlannedLayout]]:
        """Yield the best layouts of faster links, mixed precision, fewer tokens and more devices.

        Mixed precision changes the rate of products alone: memory and traffic are those of fp32.
        """
        machine = self.hardware.machine.with_faster_links(2)
        faster = replace(self.hardware, machine=machine)
        if (cluster := self.hardware.cluster) is not None:
            device = replace(cluster.accelerator, link_rate=2 * cluster.accelerator.link_rate)
            cluster = replace(cluster, accelerator=device, network_rate=2 * cluster.network_rate)
            faster = replace(faster, cluster=cluster)
        again = [judged(each.layout, each.memory, faster, each.step) for each in found]
        what_if = {"links twice as fast": again}
        if cluster is not None:
            rate = of_cluster(cluster, MIXED, "highest").machine.device_tflops or 0.0
            if rate > (self.hardware.machine.device_tflops or 0.0):
                machine = replace(self.hardware.machine, device_tflops=rate)
                mixed = replace(self.hardware, machine=machine)
                what_if[f"trainer.precision={MIXED}"] = [
                    judged(each.layout, each.memory, mixed, each.step) for each in found
                ]
        own, refused = self.hardware, self._refused
        self._refused, self._found = {}, []  # what cannot be there is no news
        self._scale = 0.5
        what_if["half the tokens in each batch, without pipelines and groups"] = list(
            self._layouts(Layout(data=own.num_ranks, balance=None))
        )
        self._scale = 1.0
        if (larger := own.doubled()) is not None:
            self.hardware = larger
            name = f"{self.hardware.num_ranks} devices, without pipelines and groups"
            what_if[name] = list(self._layouts(Layout(data=self.hardware.num_ranks, balance=None)))
        self.hardware, self._refused = own, refused
        for name, layouts in what_if.items():
            best = min(layouts, key=order, default=None)
            if best is not None and best.fits:
                yield name, best

    def _is_late(self, layout: ConfigLayout) -> bool:
        """Whether a layout is not to be planned, as this would end too late, and another one fits.

        The time is that of the slowest division so far, by the number of stages.
        """
        left = self._end - time.monotonic()
        if layout.division not in self._took:
            left -= layout.num_counted_stages * max(self._took.values(), default=0.0)
        return left < 0 and any(each.fits for each in self._found)

    def _ordered(self, bases: Sequence[Layout]) -> list[Layout]:
        """Return divisions of layers, the most promising first.

        On a cluster they are ordered by their predictions for a transformer of the same work.
        """
        model, cluster = self._models["none"], self.hardware.cluster
        blocks = [each.numel for each in model.units if each.name]
        has_experts = any(each.expert > 1 for each in bases)
        if cluster is None or model.work is None or self._rows is None or has_experts:
            return by_kind(bases)
        like = transformer_like(
            model.work.products,
            rows=self._rows,
            blocks=len(blocks),
            block_numel=sum(blocks) / max(1, len(blocks)),
            numel=model.numel,
            heads=cluster.devices_per_node,
        )
        if like is None:
            return by_kind(bases)
        found = search(like, cluster, sequences=self._rows * self._batches)
        return by_prediction(bases, found.candidates)

    # Limits of the search.

    def _allowed(self, experts: Sequence[int] = ()) -> Allowed:
        """Return what the model and the devices let layouts be."""
        hardware, model = self.hardware, self._models["none"]
        has_fp32 = keeps_fp32(model, widths_of(self.loaded.trainer.precision))
        places: list[Tier] = ["cpu"] if has_fp32 and not hardware.is_cpu else []
        if has_fp32 and hardware.machine.disk_read_gb_s is not None:
            places.append("nvme")
        return Allowed(
            devices=hardware.num_ranks,
            per_node=hardware.ranks_per_node,
            stages=max(1, sum(1 for each in model.units if each.name)),
            positions=hardware.num_ranks,
            tensors=divisors(hardware.ranks_per_node),
            experts=experts,
            places=places,
            has_tiles=has_fp32 and hardware.num_ranks > 1,
            has_whole_sequences=hardware.is_cpu,
        )

    def _expert_sizes(self) -> list[int]:
        """Return over how many ranks of a node experts may be divided; none without experts."""
        hardware, model = self.hardware, self._models["none"]
        if not model.chosen_widths or hardware.ranks_per_node == 1:
            return []
        if (model.forward_flops or 0) > MOST_FLOPS:
            if min(model.chosen_widths) < MOST_EXPERTS:
                self._refused["experts"] = (
                    "they are found by running a step, and this one has too many operations"
                )
            return []
        from boltmesh.plan.expert_plan import watch_experts

        found = watch_experts(self._config(), self.source)
        self._refused |= {f"experts of {name}": why for name, why in found.whole.items()}
        counts = [each.num_experts for each, _ in found.shapes]
        sizes = []
        for size in divisors(hardware.ranks_per_node)[1:] if counts else ():
            if uneven := [each for each in counts if each % size]:
                self._refused[f"experts over {size} ranks"] = (
                    f"{size} does not divide {uneven[0]} experts"
                )
            else:
                sizes.append(size)
        return sizes

    def _layouts(self, base: Layout) -> Iterator[PlannedLayout]:
        """Yield the layouts of a division, with batches that its replicas can have."""
        dealt = splits(self._batches, self._rows, base.data)
        if dealt is None:
            why = f"a step of {self._batches} batches cannot be dealt to {base.data} replicas"
            self._refused[_named(base)] = why
            return
        own = ConfigLayout(replace(base, balance=None), *dealt)
        smaller = [] if base.is_divided else smaller_batches(own, self._rows)
        for layout in (own, *smaller):
            evaluate = partial(self._with_batches_of, layout)
            found = list(
                with_room(layout.axes, self._allowed(), evaluate, may_be_best=self._may_be_best)
            )
            yield from found
            if any(each.has_room for each in found if each.layout.axes.recompute == "none"):
                return

    def _with_batches_of(self, layout: ConfigLayout, axes: Layout) -> PlannedLayout | None:
        layout = replace(layout, axes=axes)
        return None if axes.is_divided and self._is_late(layout) else self._planned(layout)

    def _may_be_best(self, made: PlannedLayout) -> bool:
        """Whether something slower than this could be among the best layouts."""
        seconds: dict[object, float] = {}
        for each in self._found:
            if each.has_room:
                axes = each.layout.axes.division
                seconds[axes] = min(each.seconds, seconds.get(axes, each.seconds))
        return len(seconds) < BEST or made.seconds < sorted(seconds.values())[BEST - 1]

    def _enough_ranks(self) -> int | None:
        """Return on how many ranks ZeRO-3 fits with the config's own batches."""
        ranks = self.hardware.num_ranks
        while ranks < MOST_RANKS:
            ranks *= 2
            layout = ConfigLayout(Layout(data=ranks, zero=3))
            made = self._planned(layout)
            if made is not None and made.fits:
                return ranks
        return None

    def _planned(self, layout: ConfigLayout) -> PlannedLayout | None:
        """Return what a run would need; None where it would be refused."""
        axes = layout.axes
        try:
            if not axes.is_divided:
                return self._replica(layout)
            whole = self._mesh(replace(layout, axes=replace(axes, recompute_share=1.0)))
            if axes.recompute_share == 1:
                return whole
            kept = self._mesh(replace(layout, axes=replace(axes, recompute="none")))
        except BoltMeshError as error:
            reason = str(error)
            for each in (self.source, COMMAND_LINE, "strategy"):
                reason = reason.removeprefix(f"{each}: ")
            self._refused[_what(layout)] = reason
            return None
        _, again = self._repeated(axes)
        memory = kept.memory.between(whole.memory, axes.recompute_share)
        again = scaled(again, self._scale_of(layout))
        return judged(layout, memory, self.hardware, replace(kept.step, recomputed=again))

    def _scale_of(self, layout: ConfigLayout) -> float:
        """Return the tokens of a layout's batch over those of the config's."""
        part = layout.batch / self._rows if layout.batch and self._rows else 1.0
        return part * self._scale

    def _repeated(self, axes: Layout) -> tuple[ModelShape, StepWork]:
        """Return the model as a layout recomputes it, and the work that this repeats."""
        from boltmesh.plan.dry_model import describe_model

        model, kind = self._models["none"], axes.recompute
        if kind == "none" or kind == "alternate":
            return model, NO_WORK
        if kind not in self._models:
            again, _, notes = describe_model(self.loaded, None, source=self.source, recompute=kind)
            if again.activations is None:
                raise ConfigError(f"activation_checkpointing={kind!r}: {notes[-1]}")
            self._models[kind] = again
        again = self._models[kind]
        return repeated(model, again, axes.recompute_share)

    # Whole models.

    def _replica(self, layout: ConfigLayout) -> PlannedLayout:
        axes = layout.axes
        model, again = self._repeated(axes)
        job = JobShape(
            num_ranks=axes.data,
            shard_size=axes.shard,
            widths=widths_of(self.loaded.trainer.precision),
            num_microbatches=layout.accumulate,
            state_copies=self._copies,
            reads_gradients=trainer_reads_gradients(self.loaded),
            is_on_host=self.hardware.is_cpu,
        )
        owned: OwnedExperts | None = None
        exchanged: Sequence[Collective] = ()
        if axes.expert > 1:
            owned, exchanged = self._experts(layout)
        return plan_replicas(
            model,
            layout,
            job,
            self.hardware,
            scale=self._scale_of(layout),
            owned=owned,
            exchanged=exchanged,
            recomputed=again,
        )

    def _experts(self, layout: ConfigLayout) -> tuple[OwnedExperts, tuple[Collective, ...]]:
        """Return the experts of a layout of whole models, and the bytes that are moved for them."""
        from boltmesh.plan.expert_plan import plan_expert, watch_experts

        config, size = self._config(), layout.axes.expert
        given = {"expert": size, "stage": layout.axes.zero}
        plan = plan_expert(config, self.hardware.ranks_per_node, given, source=self.source)
        shapes = watch_experts(config, self.source).shapes
        names = frozenset(name for each, _ in shapes for name in each.parameters)
        copies = layout.axes.data // size
        sent = sum(each.sent_bytes for each in plan.experts)
        sent *= layout.accumulate * self._scale_of(layout)
        calls = EXCHANGES_OF_LAYER * len(plan.experts) * layout.accumulate
        summed = Collective("data", "all-reduce", None, plan.expert_bytes / size, copies)
        exchanged = Collective("expert", EXCHANGES[0], calls, sent, size)
        return OwnedExperts(names, size, copies), (summed, exchanged)

    # Pipelines, context and tensor groups.

    def _scheduled(self, found: Sequence[PlannedLayout]) -> Iterator[PlannedLayout]:
        """Plan the fastest pipeline with other schedules and numbers of microbatches."""
        pipelines = [
            each
            for each in found
            if each.layout.axes.pipeline > 1 and each.layout.axes.recompute == "none"
        ]
        if not pipelines:
            return
        first, best = min(pipelines, key=order), min(found, key=order)
        if best.fits >= first.fits and best.seconds < first.seconds - first.time["bubble"]:
            return  # no schedule takes away more than the bubble
        axes = first.layout.axes
        usual = 4 * axes.pipeline
        changes: list[dict[str, Any]] = [
            *(
                {"axes": replace(axes, schedule=each)}
                for each in searched_schedules()
                if each != "1f1b"
            ),
            *({"microbatches": each} for each in (usual // 2, 2 * usual)),
        ]
        for change in changes:
            layout = replace(first.layout, **change)
            made = None if self._is_late(layout) else self._planned(layout)
            if made is not None:
                yield made

    def _config(self, *changes: str, recompute: Any = None) -> Any:
        """Return the config, with the nodes of the devices; it is not to be changed.

        Args:
            *changes: ``key=value`` of a layout.
            recompute: ``activation_checkpointing`` of a layout, in place of the config's.
        """
        key = changes, self.hardware.num_nodes, repr(recompute)
        if key not in self._configs:
            config = load(self.name, [*self.overrides, *changes])
            config.trainer.num_nodes = self.hardware.num_nodes
            own = {"activation_checkpointing": recompute, **NO_TILES}  # as the layout's command
            for name, value in own.items():
                OmegaConf.update(config, f"strategy.{name}", value, merge=False, force_add=True)
            self._configs[key] = config
        return self._configs[key]

    def _mesh(self, layout: ConfigLayout) -> PlannedLayout:
        """Return what a run of a divided model would need.

        Raises:
            BoltMeshError: Where it would be refused.
        """
        from boltmesh.plan.mesh_plan import plan_mesh
        from boltmesh.strategies.cost_model.step_time import Machine

        changes = [f"trainer.accumulate_grad_batches={layout.accumulate}"]
        if layout.batch is not None:
            changes.append(f"{BATCH_KEY}={layout.batch}")
        changes.append(f"trainer.accelerator={'cpu' if self.hardware.is_cpu else 'cuda'}")
        arguments, axes = dict(layout.arguments), layout.axes
        config = self._config(*changes, recompute=arguments.get("activation_checkpointing"))
        begun = time.monotonic()
        plan = plan_mesh(
            config,
            self.hardware.ranks_per_node,
            arguments,
            Machine(),
            source=self.source,
            is_brief=True,
        )
        took = (time.monotonic() - begun) / layout.num_counted_stages
        self._took.setdefault(layout.division, took)
        _, again = self._repeated(axes)
        widths = widths_of(config.trainer.precision)
        return plan_divided(
            plan,
            self._models["none"],
            layout,
            JobShape(1, widths, num_microbatches=layout.accumulate, state_copies=self._copies),
            self.hardware,
            scale=self._scale_of(layout),
            recomputed=again,
        )


def _named(axes: Layout) -> str:
    return sizes_text(ConfigLayout(axes).sizes) or "one rank"


def _what(layout: ConfigLayout) -> str:
    """Return what is refused of a layout: its sizes, and what was tried beside them."""
    more = [f"{key}={layout.arguments[key]}" for key in TRIED if key in layout.arguments]
    return ", ".join([_named(layout.axes), *more])
