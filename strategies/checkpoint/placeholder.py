"""A tensor of a checkpoint that is not in memory yet, or not yet on its ranks.

It has the shape and dtype of the whole tensor and no elements. What ``load_state_dict`` does with
it, ``parameter.copy_(placeholder)``, fills the part of the parameter that this rank holds. So all
of torch's and the user's hooks around loading run as ever, and no rank holds a whole tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.parts import Division, Part
from boltmesh.strategies.checkpoint.pieces import KeptElsewhere, narrow, own_chunks, own_part
from boltmesh.strategies.checkpoint.shard_reader import ShardReader


class Placeholder(Tensor):
    """Stands for a stored tensor in a checkpoint's dictionary. Hooks may rename it or drop it."""

    filler: Callable[[Tensor], None]
    """Missing from what torch makes of a placeholder by computing."""

    @staticmethod
    def of(size: torch.Size, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> "Placeholder":
        """A placeholder that ``fill`` puts into a destination of its shape."""
        made = torch.empty(size, dtype=dtype, device="meta").as_subclass(Placeholder)
        made.filler = fill
        return made

    def fill(self, destination: Tensor) -> None:
        """Put this rank's part of the value into ``destination``, which has the same shape.

        Raises:
            CheckpointError: When this was computed from a placeholder, and so has no value.
        """
        if not hasattr(self, "filler"):
            raise CheckpointError(
                "on_load_checkpoint has computed something from a tensor of a checkpoint whose "
                "values are not loaded yet. Call load() on the tensor to get its whole value."
            )
        with torch.no_grad():
            self.filler(destination)

    def load(self) -> Tensor:
        """The whole value on the CPU, for hooks that look at it."""
        value = torch.empty(self.shape, dtype=self.dtype)
        self.fill(value)
        return value

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.copy_ and not isinstance(args[0], Placeholder):
            args[1].fill(args[0])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        return self  # nothing about it can change


def stored(reader: ShardReader, name: str) -> Placeholder:
    """A tensor of a directory of shards."""
    return Placeholder.of(
        *reader.size_and_dtype(name), lambda destination: reader.read_into(name, destination)
    )


def held(value: Any) -> Any:
    """A whole tensor that every rank has, of which each will take its part; else the value."""

    def fill(destination: Tensor) -> None:
        part = own_part(destination)
        chunks = [each for each in own_chunks(destination) if 0 not in each.whole.sizes]
        if not isinstance(part, KeptElsewhere):
            for chunk, offsets in chunks:
                own = narrow(value, chunk.offsets, chunk.sizes)
                narrow(part, offsets, chunk.sizes).copy_(own)
        elif len(chunks) == 1:
            part.write(narrow(value, chunks[0].whole.offsets, chunks[0].whole.sizes))
        elif chunks:
            kept = torch.empty(part.shape, dtype=part.dtype)
            for chunk, offsets in chunks:
                own = narrow(value, chunk.offsets, chunk.sizes)
                narrow(kept, offsets, chunk.sizes).copy_(own)
            part.write(kept)

    if isinstance(value, Placeholder) or not isinstance(value, Tensor):
        return value
    return Placeholder.of(value.shape, value.dtype, fill)


def divided(value: Any, division: Division, name: str) -> Any:
    """Stands for this rank's part of a whole tensor; for tensors of one element, that themselves.

    Args:
        value: Of a checkpoint: a tensor or a placeholder, whole.
        division: How it is divided; the destination is this rank's part by itself.
        name: For messages.

    Raises:
        CheckpointError: When the value has not the shape of the whole.
    """
    if not isinstance(value, Tensor) or (value.numel() <= 1 and value.shape != division.shape):
        return value
    if value.shape != division.shape:
        raise CheckpointError(
            f"{name} has the shape {tuple(value.shape)} in the checkpoint and "
            f"{tuple(division.shape)} in the model. Load it into the model that it was made with."
        )
    source = held(value)

    def fill(destination: Tensor) -> None:
        source.fill(Part.of(destination, division))

    return Placeholder.of(division.local_shape, value.dtype, fill)


def passed_over(value: Any) -> Any:
    """Stands for a tensor that this rank does not hold: nothing is loaded of it."""

    def fill(destination: Tensor) -> None:
        pass

    return Placeholder.of(value.shape, value.dtype, fill) if isinstance(value, Tensor) else value
