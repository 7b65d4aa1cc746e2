"""Packing and padding of sequences by operators that also run on tensors without data.

Torch's own two operators write into memory, and have no version for fake tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.strategies.torch_compat.tensors import is_fake


class FakePackedSequences(TorchFunctionMode):
    """Mode in which fake tensors can be packed and padded, by lengths that have values."""

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        run = _BY_NAME.get(getattr(func, "__name__", ""))
        if run is None or kwargs or not is_fake(args[0]) or is_fake(args[1]):
            return func(*args, **(kwargs or {}))
        return run(*args)


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the rows of all steps, one step after the other, and the number of each step.

    Args:
        padded: Shape ``(steps, rows, ...)``, or ``(rows, steps, ...)`` with ``batch_first``.
        lengths: Lengths of the rows, in decreasing order.
        batch_first: See ``padded``.
    """
    steps = padded.transpose(0, 1) if batch_first else padded
    longest = lengths.tolist()
    sizes = [sum(length > step for length in longest) for step in range(longest[0])]
    return torch.cat([steps[step, :size] for step, size in enumerate(sizes)]), torch.tensor(sizes)


def _pad(
    packed: Tensor, sizes: Tensor, batch_first: bool, value: float, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Return the padded sequences, and their lengths. The reverse of ``_pack``."""
    of_steps = sizes.tolist()
    rows = of_steps[0]
    parts = [
        functional.pad(part, (*[0, 0] * (packed.dim() - 1), 0, rows - len(part)), value=value)
        for part in torch.split(packed, of_steps)
    ]
    missing = num_steps - len(parts)
    parts += [torch.full_like(parts[0], value)] * max(missing, 0)
    padded = torch.stack(parts)
    lengths = torch.tensor([sum(size > row for size in of_steps) for row in range(rows)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


_BY_NAME: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
}
