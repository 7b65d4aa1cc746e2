"""Holds what a stage gives against what its border is known to carry, before anything is sent."""

import functools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from boltmesh.errors import PipelineError
from boltmesh.strategies.pipeline.values import ValueSpec


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return, for example, ``float32 (4, 8)``."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def describe_specs(specs: Sequence[ValueSpec]) -> str:
    """Return what a border carries, in words."""
    if not specs:
        return "nothing"
    return ", ".join(
        f"{describe_tensor(spec.shape, spec.dtype)}{'' if spec.needs_grad else ' without gradient'}"
        f" ({spec.origin})"
        for spec in specs
    )


@functools.lru_cache(maxsize=1024)
def digest(microbatches: tuple[tuple[ValueSpec, ...], ...]) -> int:
    """Return a number, below 2**32, by which two sides of a border compare what they know of it."""
    return zlib.crc32(";".join(map(describe_specs, microbatches)).encode())


def check_outputs(
    outputs: Sequence[Tensor],
    specs: Sequence[ValueSpec],
    *,
    stage: int,
    microbatch: int,
    is_differentiated: bool,
) -> None:
    """Refuse outputs that are not what the next stage awaits.

    Raises:
        PipelineError: Their number, a shape, a dtype or a gradient differs.
    """
    if len(outputs) == len(specs) and all(
        output.shape == spec.shape
        and output.dtype == spec.dtype
        and output.layout == torch.strided
        and (spec.needs_grad or not (is_differentiated and output.requires_grad))
        for output, spec in zip(outputs, specs, strict=True)
    ):
        return
    border = (
        f"the border from stage {stage} to stage {stage + 1}, in microbatch {microbatch}, awaits"
    )
    if len(outputs) != len(specs):
        raise PipelineError(
            f"Stage {stage} gave {len(outputs)} values, and {border} {len(specs)}: "
            f"{describe_specs(specs)}. What a stage hands on may not depend on values of the batch."
        )
    for output, spec in zip(outputs, specs, strict=True):
        if output.shape != spec.shape or output.dtype != spec.dtype:
            raise PipelineError(
                f"The {spec.origin} is {describe_tensor(output.shape, output.dtype)}, and {border} "
                f"{describe_tensor(spec.shape, spec.dtype)}. Shapes and types may depend on those "
                "of the batch, not on its values."
            )
        if output.layout != torch.strided:
            raise PipelineError(
                f"The {spec.origin} has the layout {output.layout}, and {border} a dense tensor: "
                "make it dense before the border."
            )
        if is_differentiated and output.requires_grad and not spec.needs_grad:
            raise PipelineError(
                f"The {spec.origin} needs a gradient, and {border} none for it, so it would be "
                "lost. Whether a value is trained may not change within a step."
            )
