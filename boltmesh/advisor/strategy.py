"""``AutoStrategy`` (``bolt_auto``): replicas, ZeRO or offload, chosen when the model is known."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from boltmesh.advisor.evaluate import order, plan_replicas
from boltmesh.advisor.layouts import ConfigLayout, PlannedLayout
from boltmesh.advisor.machine import Hardware, known_file, read_rates
from boltmesh.advisor.prediction import NO_WORK
from boltmesh.advisor.report import memory_text, room_text
from boltmesh.errors import BoltMeshError, ConfigError
from boltmesh.host_memory import host_memory_bytes
from boltmesh.plan.dry_model import NumberTypes, count_on_fakes, shape_of_model
from boltmesh.plan.dry_step import DryStep, short_error
from boltmesh.planner.layout import Layout
from boltmesh.planner.layout_memory import CONTEXT_BYTES
from boltmesh.strategies.cost_model.model import JobShape, ModelShape, widths_of
from boltmesh.strategies.cost_model.offload import keeps_fp32
from boltmesh.strategies.cost_model.step_time import Machine
from boltmesh.strategies.data_parallel.ddp import DdpAxis, DdpOptions
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.zero import ZeroAxis
from boltmesh.strategies.dry_run.no_side_effects import untraced
from boltmesh.strategies.dry_run.sample import sample_batch
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.lightning_compat.loops import without_shown_loader
from boltmesh.strategies.lightning_compat.trainer import reads_gradients
from boltmesh.strategies.registry import STRATEGIES

if TYPE_CHECKING:
    from boltmesh.strategies.engine.data_axis import DataAxis

SHARE_WITHOUT_ACTIVATIONS = 0.5
"""Share of a rank's memory for parameters, gradients and optimizer state where a step cannot be
run without data, so that activations are not known."""
TYPICAL = {
    "cpu": Machine(device_tflops=0.05, memory_gb_s=5.0, operator_us=5.0, network_gb_s=1.0,
                   collective_us=200.0),
    "cuda": Machine(device_tflops=100.0, memory_gb_s=2000.0, operator_us=5.0, network_gb_s=50.0,
                    collective_us=20.0, bus_gb_s=25.0, host_gb_s=50.0),
}  # fmt: skip
"""Rates where `boltmesh tune` has remembered none; the choice depends little on them."""


class AutoStrategy(MeshStrategy):
    """Chooses among the strategies of whole models: the fastest that fits a rank's memory.

    Replicas (``bolt_ddp``), ZeRO stages 1, 2 and 3 and, on GPUs, offload to host memory. The choice
    is made when a fit sets up: ``training_step`` runs once on tensors without data, and memory is
    computed as by ``boltmesh plan``. Rank 0 decides for all, and one line states the choice. From
    then on everything is as with the chosen strategy, the numbers too.

    Layers are not divided: process groups and the dealing of the data are made before a model is
    known. ``boltmesh plan auto CONFIG`` chooses among pipelines and tensor groups as well.

    Args:
        max_memory_bytes: Memory that a rank may take; by default that of its device.
        **kwargs: As for ``MeshStrategy``.

    Raises:
        ConfigError: When none of them fits, at set-up.
    """

    strategy_name = "bolt_auto"

    def __init__(self, *, max_memory_bytes: int | None = None, **kwargs: Any) -> None:
        if max_memory_bytes is not None and max_memory_bytes < 1:
            raise ConfigError(
                f"max_memory_bytes={max_memory_bytes} holds no model. Give the bytes that a rank "
                f"may take, or leave it out."
            )
        # Until the choice: builds a model of configure_model without memory, as the choice needs.
        super().__init__(axes=[_axis_of("bolt_zero3")], **kwargs)
        self.max_memory_bytes = max_memory_bytes
        self.chosen: str | None = None
        """Registered name of the strategy; None before the first set-up."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # asked before and after the choice

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.chosen is None and not self.is_fitting:
            self._evaluate(trainer)
        elif self.chosen is None:
            found = self.broadcast(self._choose(trainer))
            if isinstance(found, BoltMeshError):
                raise found
            name, why = found
            rank_zero_info(f"bolt_auto: {name} on {self.world_size} ranks: {why}.")
            self.add_axis(_axis_of(name))
            self.chosen = name
        if self.chosen is not None:
            self.recorder.chose(f"{type(self).__name__}: {self.chosen}")
        super().setup(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        """Take replicas where the parameters fit; a fit can still divide them. Else ZeRO-3."""
        assert self.lightning_module is not None
        room = self._hardware(str(trainer.precision)).rank_bytes
        held = sum(
            each.numel() * each.element_size() for each in self.lightning_module.parameters()
        )
        if self.broadcast(held <= room):
            self.add_axis(_axis_of("bolt_ddp"))
        else:
            self.chosen = "bolt_zero3"

    def _choose(self, trainer: Trainer) -> tuple[str, str] | BoltMeshError:
        """Return a name and the reason, or why there is none; all ranks call this."""
        assert self.lightning_module is not None
        try:
            hardware = self._hardware(str(trainer.precision))
            model, complaint = _describe(trainer, self.lightning_module)
            planned = self._planned(trainer, model, hardware, knows=complaint is None)
        except BoltMeshError as error:
            return error
        first, best = planned[0], min(planned, key=order)
        note = "" if complaint is None else f"; activations are not known: {complaint}"
        if not best.fits:
            least = min(planned, key=lambda each: each.peak_bytes)
            return ConfigError(
                f"bolt_auto: no layout of the whole model fits into the {room_text(hardware)} "
                f"of a rank: {least.layout.name} needs {memory_text(least)}{note}. "
                f"Use more ranks or smaller batches; boltmesh plan auto CONFIG tries pipelines and "
                f"tensor groups as well."
            )
        why = f"it needs {memory_text(best)} of {room_text(hardware)} a rank"
        if best is not first and not first.fits:
            why += f", and {first.layout.name} {memory_text(first)}"
        return best.layout.name, why + note

    def _planned(
        self, trainer: Trainer, model: ModelShape, hardware: Hardware, *, knows: bool
    ) -> list[PlannedLayout]:
        if not knows:
            hardware = hardware.with_rank_gib(SHARE_WITHOUT_ACTIVATIONS * hardware.rank_gib)
        widths = widths_of(str(trainer.precision))
        replicas = Layout(data=self.world_size)
        layouts = [replace(replicas, zero=n) for n in range(4 if self.world_size > 1 else 1)]
        if not hardware.is_cpu and keeps_fp32(model, widths):
            layouts += [
                replace(replicas, zero=1, offload="optimizer"),
                replace(replicas, zero=3, offload="all"),
            ]
        assert self.lightning_module is not None
        job = JobShape(
            num_ranks=self.world_size,
            widths=widths,
            num_microbatches=trainer.accumulate_grad_batches,
            reads_gradients=reads_gradients(trainer, self.lightning_module),
            is_on_host=hardware.is_cpu,
        )
        return [
            plan_replicas(
                model,
                ConfigLayout(each, accumulate=trainer.accumulate_grad_batches),
                job,
                hardware,
            )
            for each in layouts
        ]

    def _hardware(self, precision: str) -> Hardware:
        kind = self.root_device.type
        host = host_memory_bytes() / self.num_processes
        path = known_file(kind, self.num_processes, precision)
        machine = (None if path is None else read_rates(path)) or TYPICAL[kind]
        room = host
        if kind == "cuda":
            total = torch.cuda.get_device_properties(self.root_device).total_memory
            room = total - CONTEXT_BYTES
        if self.max_memory_bytes is not None:
            room = self.max_memory_bytes
        sizes: dict[str, Any] = {"host_gib": host / 2**30}
        sizes["host_gib" if kind == "cpu" else "device_gib"] = room / 2**30
        machine = replace(machine, **sizes)
        return Hardware(machine, self.num_processes, self.num_nodes, kind == "cpu", kind, "")


def _axis_of(name: str) -> "DataAxis":
    """Return the data axis of a registered strategy."""
    arguments = STRATEGIES[name].arguments
    return ZeroAxis(ZeroOptions(**arguments)) if arguments else DdpAxis(DdpOptions())


def _describe(trainer: Trainer, module: LightningModule) -> tuple[ModelShape, str | None]:
    """Return the module as the estimates have it, and why its step could not be run, if so."""
    types = NumberTypes.of(str(trainer.precision))
    measured = DryStep()
    complaint: str | None
    try:
        batch = without_shown_loader(sample_batch, trainer).batch
        with untraced(module, torch.device("cpu")):
            complaint = count_on_fakes(measured, module, batch, types)
    except Exception as error:  # noqa: BLE001 - the choice goes on without activations
        complaint = short_error(error)
    counts = measured.counts if complaint is None else None
    shape = shape_of_model(module, None, types, counts)
    # Where work could not be counted, times still compare traffic and the optimizer step.
    return replace(shape, work=shape.work or NO_WORK), complaint
