"""What ``boltmesh plan`` says of a mesh, beside what telemetry has measured of the same run."""

from collections.abc import Iterable, Mapping
from typing import Any

from boltmesh.configs.load import load
from boltmesh.plan.mesh_plan import MeshPlan, plan_mesh
from boltmesh.strategies.cost_model.step_time import Machine
from boltmesh.strategies.mesh import AXES
from boltmesh.telemetry.snapshot import JobSnapshot

Amounts = dict[tuple[str, str], tuple[float, float]]
"""Bytes and calls of an optimizer step by axis and operator, in the mean over ranks that move."""


def planned(
    model: type,
    data: type,
    num_ranks: int,
    options: Mapping[str, Any],
    trainer: Mapping[str, Any],
    **arguments: Any,
) -> MeshPlan:
    """Plan a run on ranks of one host.

    Args:
        model: A LightningModule, ``arguments`` are of it.
        data: A LightningDataModule without arguments.
        num_ranks: Of the job.
        options: Of ``Parallel3DStrategy``.
        trainer: What differs from a Trainer on the CPU that clips nothing.
        arguments: Of the model.
    """
    settings = {"accelerator": "cpu", "devices": num_ranks, "gradient_clip_val": None, **trainer}
    changes = [
        f"model.class_path={model.__module__}.{model.__qualname__}",
        f"model.init_args={arguments}",
        f"data.class_path={data.__module__}.{data.__qualname__}",
        "data.init_args={}",
        *(f"trainer.{key}={'null' if each is None else each}" for key, each in settings.items()),
    ]
    return plan_mesh(load("threed", changes), num_ranks, options, Machine(), source="config")


def said(plan: MeshPlan) -> Amounts:
    """What the plan says that ranks move."""
    return _mean(
        [
            (each.axis, each.operator, each.payload_bytes, each.calls or 0.0)
            for each in place.traffic
            if each.axis in AXES
        ]
        for place in plan.places
    )


def measured(seen: JobSnapshot) -> Amounts:
    """What ranks have moved along axes of several ranks."""
    assert seen.communication_note is None
    axes = {axis for axis in AXES if seen.mesh.get(axis, 1) > 1}
    return _mean(
        [
            (each.axis, each.operator, each.bytes_per_step, each.calls_per_step or 0.0)
            for each in rank.collectives
            if each.axis in axes and each.bytes_per_step
        ]
        for rank in seen.ranks
    )


def _mean(of_ranks: Iterable[Iterable[tuple[str, str, float, float]]]) -> Amounts:
    moved: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for rank in of_ranks:
        own: Amounts = {}
        for axis, operator, num_bytes, calls in rank:  # of several groups along an axis
            size, count = own.get((axis, operator), (0.0, 0.0))
            own[axis, operator] = size + num_bytes, count + calls
        for key, amount in own.items():
            moved.setdefault(key, []).append(amount)
    return {
        key: (
            sum(size for size, _ in amounts) / len(amounts),
            sum(calls for _, calls in amounts) / len(amounts),
        )
        for key, amounts in moved.items()
    }


def check_memory(plan: MeshPlan, seen: JobSnapshot, *, num_parameters: int) -> None:
    """Compare what each rank is expected to hold, and holds, between two steps, to the byte.

    Args:
        plan: On the CPU.
        seen: What was measured.
        num_parameters: Tensors, for each of which Adam counts its steps in four bytes at most.
    """
    for place in plan.places:
        for rank in place.ranks:
            held = {each.kind: each for each in seen.ranks[rank].memory_kinds}
            for kind in ("parameters", "gradients", "optimizer"):
                beside = 4 * num_parameters if kind == "optimizer" else 0
                known = [held[kind].predicted_bytes]
                if plan.num_batches == 1:  # or else it may be seen between two batches of a step
                    known.append(held[kind].measured_bytes)
                for num_bytes in known:
                    assert num_bytes is not None
                    more = num_bytes - place.memory.kept[kind].host
                    assert 0 <= more <= beside, (kind, rank, held[kind])
            if "activations" in held:
                assert held["activations"].predicted_bytes == place.activation_bytes
