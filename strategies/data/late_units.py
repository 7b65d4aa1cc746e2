"""What shards of a pipeline would be gathered together, of a model that nobody has sharded.

As ``late_sharded_model.py`` puts ``fully_shard`` on it.
"""

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.data.units import find_units
from boltmesh.strategies.planner.model import ModelShape, TensorShape, UnitShape


def describe_late_units(
    module: Module,
    held: Collection[Parameter],
    buffers: Collection[Tensor],
    patterns: Sequence[str] | None,
    *,
    has_scalars: bool,
) -> ModelShape:
    """Return the shapes of what one rank of a pipeline holds.

    Args:
        module: The whole model, of which ``held`` may be in parts already.
        held: The parameters of the rank's stages.
        buffers: That it sends.
        patterns: ``blocks`` of the user.
        has_scalars: Whether to count parameters without rows, which nobody gathers.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    left = {each for each in held if has_scalars or each.dim() > 0}
    shapes: list[UnitShape] = []

    def take(name: str, unit: Module) -> None:
        own = [each for each in unit.parameters() if each in left]
        left.difference_update(own)
        tensors = tuple(
            TensorShape(
                names[each],
                tuple(each.shape),
                is_trained=each.requires_grad,
                element_bytes=each.element_size(),
            )
            for each in own
        )
        if tensors:
            shapes.append(UnitShape(name, tensors, is_autocast=False, stays_gathered=not name))

    for name, unit in reversed(find_units(module, patterns).items()):  # from the inside out
        take(name, unit)
    take("", module)
    return ModelShape(
        type(module).__name__,
        tuple(shapes),
        buffer_bytes=sum(each.numel() * each.element_size() for each in buffers),
    )
