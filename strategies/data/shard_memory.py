"""What a rank holds of a sharded model, by kind of memory."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from boltmesh.strategies.data.sharded_model import ShardedModel
from boltmesh.strategies.observe import tensors_within
from boltmesh.strategies.torch_compat import unit_parameters, whole_gradients
from boltmesh.telemetry.recording.memory_walk import StoredBytes


def held_tensors(
    model: ShardedModel, optimizers: Sequence[Optimizer]
) -> dict[str, list[Tensor | StoredBytes]]:
    """Return the tensors that are there now; gathered copies count as parameters.

    Asked of the module itself, parameters would be the shards or the whole, as it happens to be.
    """
    pairs = [pair for unit in model.units.values() for pair in unit_parameters(unit)]
    shards: list[Tensor] = [shard for shard, _ in pairs]
    shards += model.scalars.parameters
    shards += [each.parameter for each in model.tiled]
    wholes = [whole for _, whole in pairs if whole is not None and _has_memory(whole)]
    gradients = [each.grad for each in shards if each.grad is not None]
    for unit in model.units.values():
        gradients += whole_gradients(unit)
    free = 0 if model.on_host is None else model.on_host.num_free_bytes
    return {
        "parameters": [*shards, *wholes],
        "gradients": [*gradients],
        "optimizer": [
            tensor
            for optimizer in optimizers
            for state in optimizer.state.values()
            for tensor in tensors_within(state)
        ],
        "buffers": [*model.module.buffers()],
        "cache": [StoredBytes("host", free)],
    }


def _has_memory(whole: Tensor) -> bool:
    """Whether a copy is there: FSDP2 keeps the tensor and frees what is behind it."""
    return whole.untyped_storage().size() > 0
