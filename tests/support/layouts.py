"""Layouts of every kind by name, for tests that go from one to another."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boltmesh.strategies import (
    DDPStrategy,
    MeshLayout,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)

PLAIN = "plain Lightning"


@dataclass(frozen=True)
class Layout:
    """Where an epoch is trained."""

    mesh: MeshLayout
    strategy: Callable[[Path], Any]
    """Made anew for each run; given a folder for what is offloaded."""


def _zero(stage: int, ranks: int, **options: Any) -> Layout:
    def strategy(folder: Path) -> ZeROStrategy:
        away: dict[str, Any] = {"offload_path": folder} if "nvme" in options.values() else {}
        return ZeROStrategy(telemetry=False, stage=stage, **options, **away)

    return Layout(MeshLayout(data=ranks), strategy)


def _pipeline(schedule: str, ranks: int, *, data: int = 1) -> Layout:
    def strategy(folder: Path) -> PipelineParallelStrategy:
        return PipelineParallelStrategy(
            telemetry=False, schedule=schedule, stages=ranks, microbatches=4
        )

    return Layout(MeshLayout(data=data, pipeline=ranks), strategy)


def _tensor(ranks: int, *, data: int = 1) -> Layout:
    return Layout(
        MeshLayout(data=data, tensor=ranks),
        lambda _: TensorParallelStrategy(telemetry=False, size=ranks),
    )


def _composed(stage: int, options: dict[str, Any] | None = None, **sizes: Any) -> Layout:
    return Layout(
        MeshLayout(**sizes),
        lambda _: Parallel3DStrategy(telemetry=False, zero_stage=stage, **sizes, **(options or {})),
    )


LAYOUTS = {
    PLAIN: Layout(MeshLayout(), lambda _: "auto"),
    "DDP, 1": Layout(MeshLayout(), lambda _: DDPStrategy(telemetry=False)),
    "DDP, 2": Layout(MeshLayout(data=2), lambda _: DDPStrategy(telemetry=False)),
    "ZeRO-1, 2": _zero(1, 2),
    "ZeRO-2, 2": _zero(2, 2),
    "ZeRO-3, 4": _zero(3, 4),
    "ZeRO-3 on the CPU, 2": _zero(3, 2, offload_optimizer="cpu", offload_parameters="cpu"),
    "ZeRO-3 on NVMe, 2": _zero(3, 2, offload_optimizer="nvme", offload_parameters="nvme"),
    "1f1b, 2": _pipeline("1f1b", 2),
    "interleaved 1f1b, 2": _pipeline("interleaved_1f1b", 2),
    "zbv, 2": _pipeline("zbv", 2),
    "tensor, 2": _tensor(2),
    "data 2 x tensor 2, ZeRO-3": _composed(3, data=2, tensor=2),
    "data 2 x pipeline 2, ZeRO-1": _composed(1, data=2, pipeline=2),
    "2 x 2 x 2, ZeRO-1": _composed(1, data=2, pipeline=2, tensor=2),
    "data 2 x pipeline 2, ZeRO-1 on the CPU": _composed(
        1, {"offload_optimizer": "cpu"}, data=2, pipeline=2
    ),
}
"""By name; the number is that of the ranks. Each goes on from each in the resharding matrix."""

ALL_LAYOUTS = {
    **LAYOUTS,
    "ZeRO-3, 2": _zero(3, 2),
    "1f1b, 4": _pipeline("1f1b", 4),
    "zero bubble, 4": _pipeline("zero_bubble", 4),
    "data 2 x 1f1b 2": _pipeline("1f1b", 2, data=2),
    "data 2 x zbv 2": _pipeline("zbv", 2, data=2),
    "tensor, 1": _tensor(1),
    "tensor, 4": _tensor(4),
    "data 2 x tensor 2": _tensor(2, data=2),
    "pipeline 2 x tensor 2": _composed(0, pipeline=2, tensor=2),
    "data 2 x tensor 2, ZeRO-1": _composed(1, data=2, tensor=2),
    "data 2 x tensor 2, ZeRO-1 on the CPU": _composed(
        1, {"offload_optimizer": "cpu"}, data=2, tensor=2
    ),
}
"""By name, with others that some tests go to."""
