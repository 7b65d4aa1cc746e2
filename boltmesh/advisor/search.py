"""Finds the layouts of a config's own model that fit, the fastest first.

Replicas and ZeRO are computed from one dry run of the module; each division over the pipeline and
the tensor axis is planned by the code that a run divides the model with, so what it would refuse is
refused here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from boltmesh.advisor.layouts import (
    AXES,
    BATCH_KEY,
    DIVIDED,
    ConfigLayout,
    ConfigSearch,
    PlannedLayout,
    smaller_batches,
    splits,
)
from boltmesh.advisor.machine import Hardware, key_of
from boltmesh.advisor.prediction import EXCHANGE, Collective, RankStep
from boltmesh.advisor.replicas import (
    OFFLOADED,
    ON_DISK,
    PARTS,
    REPLICATED,
    TILES,
    OwnedExperts,
    between,
    judged,
    order,
    plan_replicas,
    scaled,
)
from boltmesh.configs.load import load
from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.plan.strategy_options import (
    as_mapping,
    optimizer_copies,
    trainer_reads_gradients,
)
from boltmesh.strategies.cost_model.model import (
    Bytes,
    JobShape,
    ModelShape,
    widths_of,
)
from boltmesh.strategies.cost_model.offload import keeps_fp32
from boltmesh.strategies.registry import STRATEGIES

if TYPE_CHECKING:
    from boltmesh.strategies.activation_checkpointing import Recompute, RecomputeShare

MOST_RANKS = 4096
"""Larger jobs are not looked at where the one that was asked for is too small."""
MOST_DIVISIONS = 12
"""Divisions of layers that are planned, those into fewest parts first."""
SCHEDULES = ("interleaved_1f1b", "zero_bubble", "zbv")
"""Those that are tried beside 1F1B."""
MOST_FLOPS = 10**12
"""A larger forward pass is not run on the CPU to find experts."""
MOST_EXPERTS = 1024
"""A step that chooses among more chooses tokens."""
EXCHANGES = 7
"""Collectives of a layer of experts for each batch: rows there and back and their weights."""
TRIED = ("schedule", "microbatches")


class ConfigSearcher:
    """Predicts the layouts of one config.

    Args:
        config: Its name or path.
        overrides: ``key=value`` of the command line.
        source: The config's file, for errors.
        hardware: What it is for.
    """

    def __init__(
        self, config: str, overrides: "list[str]", *, source: str, hardware: Hardware
    ) -> None:
        self.name, self.overrides, self.source = config, overrides, source
        self.hardware = hardware
        self.loaded = load(config, overrides)
        self._refused: list[tuple[str, str]] = []
        self._scale = 1.0
        """Tokens of a batch over those that the config has."""

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
        from boltmesh.plan.stage_model import class_of

        model, optimizer, notes = describe_model(self.loaded, None, source=self.source)
        if model.work is None or model.activations is None:
            raise ConfigError(
                f"{self.source}: a step's time is predicted by running it without data, and "
                f"{notes[-1]}. Measure layouts with boltmesh bench."
            )
        copies, assumed = optimizer_copies(self.loaded, *class_of(optimizer))
        self._copies = copies
        self._rows = self._rows_of_batch()
        self._batches = self._batches_of_step()
        self._whole = model
        found = list(self._replicated(model))
        if not any(each.fits and each.layout.name in REPLICATED for each in found):
            found += self._recomputed(model)
        found += self._with_experts(model)
        divisions = list(self._divisions(sum(1 for each in model.units if each.name)))
        for sizes in divisions[:MOST_DIVISIONS]:
            found += self._divided(sizes)
        found += self._scheduled(found)
        took = self.hardware.measured.get(key_of(self.loaded), {})
        found = [
            each.measured(took[each.layout.described()])
            if each.layout.described() in took
            else each
            for each in found
        ]
        found.sort(key=order)
        return ConfigSearch(
            self.loaded,
            model,
            self.hardware,
            tuple(found),
            tuple(self._refused),
            max(0, len(divisions) - MOST_DIVISIONS),
            None if self._rows is None else self._rows * self._batches,
            self._batches,
            (*notes, *assumed),
            None if any(each.fits for each in found) else self._enough_ranks(model),
            dict(self._changes(model, found)),
        )

    def _changes(
        self, model: ModelShape, found: Sequence[PlannedLayout]
    ) -> Iterator[tuple[str, PlannedLayout]]:
        """Yield the best layouts of a faster link, more devices and fewer tokens, that fit."""
        machine = self.hardware.machine.with_faster_links(2)
        faster = replace(self.hardware, machine=machine)
        if (cluster := self.hardware.cluster) is not None:
            device = replace(cluster.accelerator, link_rate=2 * cluster.accelerator.link_rate)
            cluster = replace(cluster, accelerator=device, network_rate=2 * cluster.network_rate)
            faster = replace(faster, cluster=cluster)
        again = [judged(each.layout, each.memory, faster, each.step) for each in found]
        what_if = {"links twice as fast": again}
        own, refused = self.hardware, self._refused
        self._refused = []  # what cannot be there is no news
        self._scale = 0.5
        what_if["half the tokens in each batch, without pipelines and groups"] = list(
            self._replicated(model)
        )
        self._scale = 1.0
        if not own.is_cpu:
            more: dict[str, Any] = {"num_nodes": 2 * own.num_nodes}
            if own.num_nodes == 1:
                more = {"ranks_per_node": 2 * own.ranks_per_node}
            self.hardware = replace(own, **more)
            if own.cluster is not None:
                cluster = replace(own.cluster, num_devices=2 * own.num_ranks)
                if own.num_nodes == 1:
                    cluster = replace(cluster, devices_per_node=2 * own.num_ranks)
                self.hardware = replace(self.hardware, cluster=cluster)
            name = f"{self.hardware.num_ranks} devices, without pipelines and groups"
            what_if[name] = list(self._replicated(model))
        self.hardware, self._refused = own, refused
        for name, layouts in what_if.items():
            best = min(layouts, key=order, default=None)
            if best is not None and best.fits:
                yield name, best

    # Rows of a step.

    def _rows_of_batch(self) -> int | None:
        rows = OmegaConf.select(self.loaded, BATCH_KEY)
        return rows if isinstance(rows, int) and not isinstance(rows, bool) else None

    def _batches_of_step(self) -> int:
        """Return the batches of a step over all replicas, by the config's own layout."""
        own = as_mapping(self.loaded.strategy)
        name = own.pop("name")
        entry = STRATEGIES[name]
        ranks = self.hardware.num_ranks
        replicas = ranks
        if entry.class_name not in {"DDPStrategy", "ReplicatedStrategy"}:
            try:
                made = entry.load()(**{**entry.arguments, **own})
                replicas = made.choose_layout(ranks).data
            except BoltMeshError:
                pass  # its sizes are of other ranks: as many batches as there are ranks
        return int(replicas * self.loaded.trainer.accumulate_grad_batches)

    # Replicas and ZeRO.

    def _replicated(
        self, model: ModelShape, recompute: "RecomputeShare | None" = None
    ) -> Iterator[PlannedLayout]:
        dealt = splits(self._batches, self._rows, self.hardware.num_ranks)
        if dealt is None:
            ranks = self.hardware.num_ranks
            why = f"a step of {self._batches} batches cannot be dealt to {ranks} replicas"
            self._refused.append(("replicas and ZeRO", why))
            return
        arguments = {} if recompute is None else {"activation_checkpointing": recompute}
        sizes = {"pipeline": 1, "data": self.hardware.num_ranks, "tensor": 1}
        has_room = False
        for name, given in self._ways(model):
            if has_room and (name == ON_DISK or given == TILES):
                continue  # slower than what fits
            layout = ConfigLayout(name, sizes, {**arguments, **given}, *dealt)
            made = self._replica(model, layout)
            yield made
            has_room |= made.fits
            if not made.fits:
                for smaller in smaller_batches(layout, self._rows):
                    yield (again := self._replica(model, smaller))
                    has_room |= again.fits
            elif name == OFFLOADED[0]:
                yield from self._in_part(model, layout)

    def _in_part(self, model: ModelShape, layout: ConfigLayout) -> Iterator[PlannedLayout]:
        """Yield the layout that offloads the least part of the optimizer state that fits."""
        for part in PARTS:
            arguments = {**layout.arguments, "offload_fraction": part}
            made = self._replica(model, replace(layout, arguments=arguments))
            if made.fits and not made.is_tight:
                yield made
                return

    def _enough_ranks(self, model: ModelShape) -> int | None:
        """Return on how many ranks ZeRO-3 fits with the config's own batches."""
        ranks = self.hardware.num_ranks
        while ranks < MOST_RANKS:
            ranks *= 2
            layout = ConfigLayout("bolt_zero3", {"pipeline": 1, "data": ranks, "tensor": 1})
            if self._replica(model, layout).fits:
                return ranks
        return None

    def _recomputed(self, model: ModelShape) -> Iterator[PlannedLayout]:
        """Yield the same layouts with blocks that run again in the backward pass."""
        from boltmesh.plan.dry_model import describe_model

        kinds: tuple[Recompute, ...] = ("selective", "full")
        for kind in kinds:
            again, _, _ = describe_model(self.loaded, None, source=self.source, recompute=kind)
            if again.activations is None or model.activations is None:
                return
            blocks = max(1, sum(1 for each in model.units if each.name))
            one_block = (model.activations.saved_bytes - again.activations.saved_bytes) // blocks
            kept = replace(
                again.activations, transient_bytes=again.activations.transient_bytes + one_block
            )
            again = replace(again, activations=kept)
            for part in PARTS if kind == "full" else ():
                found = list(self._replicated(between(model, again, part), {kind: part}))
                yield from found
                if any(each.fits for each in found):
                    return
            found = list(self._replicated(again, kind))
            yield from found
            if any(each.fits for each in found):
                return

    def _ways(self, model: ModelShape) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield strategies with arguments, those that cost least time first."""
        ranks, per_node = self.hardware.num_ranks, self.hardware.ranks_per_node
        yield from ((name, {}) for name in REPLICATED[: None if ranks > 1 else 1])
        if 1 < per_node < ranks:
            yield "bolt_zero3", {"shard_size": per_node}
        if keeps_fp32(model, widths_of(self.loaded.trainer.precision)):
            if not self.hardware.is_cpu:
                yield from ((name, {}) for name in OFFLOADED)
            if ranks > 1:
                yield "bolt_zero3", TILES
            if self.hardware.machine.disk_read_gb_s is not None:
                yield ON_DISK, {}
                yield ON_DISK, TILES

    def _replica(
        self, model: ModelShape, layout: ConfigLayout, experts: OwnedExperts | None = None
    ) -> PlannedLayout:
        scale = layout.batch / self._rows if layout.batch and self._rows else 1.0
        scale *= self._scale
        job = JobShape(
            num_ranks=layout.sizes["data"],
            shard_size=layout.arguments.get("shard_size"),
            widths=widths_of(self.loaded.trainer.precision),
            num_microbatches=layout.accumulate,
            state_copies=self._copies,
            reads_gradients=trainer_reads_gradients(self.loaded),
            is_on_host=self.hardware.is_cpu,
        )
        return plan_replicas(model, layout, job, self.hardware, scale=scale, experts=experts)

    # Experts.

    def _with_experts(self, model: ModelShape) -> Iterator[PlannedLayout]:
        """Yield ZeRO with the experts of each layer divided over ranks of a node."""
        hardware, ranks = self.hardware, self.hardware.num_ranks
        dealt = splits(self._batches, self._rows, ranks)
        if dealt is None or not model.chosen_widths or hardware.ranks_per_node == 1:
            return
        if (model.forward_flops or 0) > MOST_FLOPS:
            if min(model.chosen_widths) < MOST_EXPERTS:
                why = "they are found by running a step, and this one has too many operations"
                self._refused.append(("experts", why))
            return
        from boltmesh.plan.expert_plan import plan_expert, watch_experts

        config = load(self.name, [*self.overrides, f"trainer.num_nodes={hardware.num_nodes}"])
        found = watch_experts(config, self.source)
        self._refused += [(f"experts of {name}", why) for name, why in found.whole.items()]
        names = frozenset(name for each, _ in found.shapes for name in each.parameters)
        for size in _divisors(hardware.ranks_per_node)[1:] if names else ():
            given: dict[str, Any] = {"expert": size, "stage": 1}
            try:
                plan = plan_expert(config, hardware.ranks_per_node, given, source=self.source)
            except BoltMeshError as error:
                reason = str(error).removeprefix(f"{self.source}: ")
                self._refused.append((f"experts over {size} ranks", reason))
                continue
            sizes = {"pipeline": 1, "data": ranks, "tensor": 1}
            layout = ConfigLayout("bolt_expert", sizes, given, *dealt)
            part = layout.batch / self._rows if layout.batch and self._rows else 1.0
            sent = layout.accumulate * part * sum(each.sent_bytes for each in plan.experts)
            calls = EXCHANGES * len(plan.experts) * layout.accumulate
            summed = Collective("data", "all-reduce", None, plan.expert_bytes / size, ranks // size)
            exchanged = Collective("expert", EXCHANGE, calls, sent, size)
            experts = OwnedExperts(names, size, ranks // size, (summed, exchanged))
            for stage in (1, 3):
                arguments = {**given, "stage": stage}
                made = self._replica(model, replace(layout, arguments=arguments), experts)
                yield made
                if made.fits:
                    break

    # Pipelines and tensor groups.

    def _divisions(self, num_blocks: int) -> Iterator[dict[str, int]]:
        """Yield sizes of the axes, those into fewest parts first, a context axis later."""
        ranks, per_node = self.hardware.num_ranks, self.hardware.ranks_per_node
        found = [
            (pipeline, context, tensor)
            for tensor in _divisors(per_node)
            for context in _divisors(ranks)
            for pipeline in _divisors(ranks)
            if pipeline * context * tensor > 1
            and ranks % (pipeline * context * tensor) == 0
            and pipeline <= max(1, num_blocks)
            and 1 in {pipeline, context}  # no plan has both
        ]

        def place(sizes: tuple[int, int, int]) -> tuple[int, tuple[int, int, int]]:
            pipeline, context, tensor = sizes
            later = (context > 1) + (context > 1 and tensor > 1)
            return pipeline * context * tensor * 2**later, sizes

        for pipeline, context, tensor in sorted(found, key=place):
            sizes = {"pipeline": pipeline, "context": context, "tensor": tensor}
            yield {**sizes, "data": ranks // (pipeline * context * tensor)}

    def _divided(self, sizes: dict[str, int]) -> Iterator[PlannedLayout]:
        data, pipeline = sizes["data"], sizes["pipeline"]
        replicas = data * sizes["context"]
        dealt = splits(self._batches, self._rows, data)
        if dealt is None:
            what = f"a step of {self._batches} batches cannot be dealt to {data} replicas"
            self._refused.append((_sizes_text(sizes), what))
            return
        arguments: dict[str, Any] = {
            axis: sizes[axis] for axis in AXES if axis != "context" or sizes[axis] > 1
        }
        arguments["zero_stage"] = int(replicas > 1)
        layout = ConfigLayout(DIVIDED, sizes, arguments, *dealt)
        made = self._planned(layout)
        if made is None:
            return
        yield made
        if made.fits:
            return
        if pipeline > 1:
            yield from self._recomputed_stages(made)
        if replicas == 1 or pipeline > 1:
            return
        fuller = replace(layout, arguments={**arguments, "zero_stage": 3})
        if (again := self._planned(fuller)) is not None:
            yield again

    def _recomputed_stages(self, made: PlannedLayout) -> Iterator[PlannedLayout]:
        """Yield a pipeline with the smallest part of its blocks run again that leaves room."""
        given = made.layout.arguments

        def layout(kind: "RecomputeShare") -> ConfigLayout:
            return replace(made.layout, arguments={**given, "activation_checkpointing": kind})

        full = self._planned(layout("full"))
        if full is None:
            return
        for part in PARTS:
            memory = made.memory.between(full.memory, part)
            step = replace(full.step, repeated=part)
            less = judged(layout({"full": part}), memory, self.hardware, step)
            if less.fits and not less.is_tight:
                yield less
                return
        yield full

    def _scheduled(self, found: Sequence[PlannedLayout]) -> Iterator[PlannedLayout]:
        """Plan the fastest pipeline with other schedules and numbers of microbatches."""
        pipelines = [
            each
            for each in found
            if each.layout.sizes["pipeline"] > 1
            and "activation_checkpointing" not in each.layout.arguments
        ]
        if not pipelines:
            return
        first, best = min(pipelines, key=order), min(found, key=order)
        if best.fits >= first.fits and best.seconds < first.seconds - first.time["bubble"]:
            return  # no schedule takes away more than the bubble
        layout = first.layout
        usual = 4 * layout.sizes["pipeline"]
        changes: list[dict[str, Any]] = [
            *({"schedule": each} for each in SCHEDULES),
            *({"microbatches": each} for each in (usual // 2, 2 * usual)),
        ]
        for change in changes:
            made = self._planned(replace(layout, arguments={**layout.arguments, **change}))
            if made is not None:
                yield made

    def _planned(self, layout: ConfigLayout) -> PlannedLayout | None:
        """Return what a run of a divided model would need; None where it would be refused."""
        from boltmesh.plan.mesh_plan import plan_mesh
        from boltmesh.strategies.cost_model.step_time import Machine

        changes = [f"trainer.accumulate_grad_batches={layout.accumulate}"]
        if layout.batch is not None:
            changes.append(f"{BATCH_KEY}={layout.batch}")
        changes.append(f"trainer.accelerator={'cpu' if self.hardware.is_cpu else 'cuda'}")
        config = load(self.name, [*self.overrides, *changes])
        config.trainer.num_nodes = self.hardware.num_nodes
        kind = layout.arguments.get("activation_checkpointing")
        if kind is not None:
            key = "strategy.activation_checkpointing"
            OmegaConf.update(config, key, kind, merge=False, force_add=True)
        try:
            plan = plan_mesh(
                config,
                self.hardware.ranks_per_node,
                layout.arguments,
                Machine(),
                source=self.source,
                is_brief=True,
            )
        except BoltMeshError as error:
            reason = str(error).removeprefix(f"{self.source}: ").removeprefix("strategy: ")
            self._refused.append((_what(layout), reason))
            return None
        fullest = max(plan.places, key=lambda each: _total_bytes(each.memory.peak))
        busiest = max(plan.places, key=lambda each: sum(one.payload_bytes for one in each.traffic))
        assert self._whole.work is not None
        scale = layout.batch / self._rows if layout.batch and self._rows else 1.0
        replicas = layout.sizes["data"] * layout.sizes["context"]
        shards = replicas if plan.zero_stage else 1
        return judged(
            layout,
            fullest.memory,
            self.hardware,
            RankStep(
                work=scaled(self._whole.work, scale),
                batches=layout.accumulate,
                sizes=layout.sizes,
                microbatches=plan.num_microbatches,
                bubble=0.0 if plan.pipeline is None else plan.pipeline.bubble,
                traffic=tuple(
                    Collective(each.axis, each.operator, each.calls, each.payload_bytes)
                    for each in busiest.traffic
                ),
                is_gathering=plan.zero_stage == 3 and plan.pipeline is None,
                repeated=float(kind == "full"),
                stepped_numel=max(each.parameters for each in plan.places) / shards,
                stepped_tensors=sum(len(each.tensors) for each in self._whole.units)
                // layout.sizes["pipeline"],
                state_copies=self._copies,
            ),
        )


def _total_bytes(amount: Bytes) -> int:
    return amount.device + amount.host + amount.disk


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _what(layout: ConfigLayout) -> str:
    """Return what is refused of a layout: its sizes, and what was tried beside them."""
    more = [f"{key}={layout.arguments[key]}" for key in TRIED if key in layout.arguments]
    return ", ".join([_sizes_text(layout.sizes), *more])


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
