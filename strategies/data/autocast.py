"""Which parameters of a block autocast uses in fp32, and who gathers those.

Under autocast a block is gathered in what autocast computes in, since its matrix products would
make that copy anyway. Norms and embeddings are not multiplied: autocast reads them in fp32, on the
CPU it even refuses a layer norm of mixed types. One collective has one type, so these few are
gathered with the root, which stays in fp32.
"""

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import Module

_MULTIPLYING = (
    nn.Bilinear,
    nn.Linear,
    nn.MultiheadAttention,
    nn.PReLU,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvNd,  # noqa: SLF001 - the base of all convolutions
)
"""Modules of torch whose parameters autocast casts, vectors included."""

_LOOKING_UP = (nn.Embedding, nn.EmbeddingBag)


def full_precision_modules(unit: Module) -> list[Module]:
    """Return the modules of a unit whose own parameters stay in fp32 under autocast.

    A matrix of an author's own module is taken for a factor of a product, which large ones are.
    """
    return [each for each in unit.modules() if _owns_shardable(each) and not _is_cast(each)]


def is_any_cast(unit: Module) -> bool:
    """Whether autocast casts parameters of a unit, so that gathering them cast pays."""
    return any(_is_cast(each) for each in unit.modules() if _owns_shardable(each))


def _is_cast(module: Module) -> bool:
    if isinstance(module, _LOOKING_UP):
        return False
    if isinstance(module, _MULTIPLYING):
        return True
    return any(each.dim() > 1 for each in module.parameters(recurse=False))


def _owns_shardable(module: Module) -> bool:
    """Whether a module has parameters itself that no unit within has taken."""
    return any(not isinstance(each, DTensor) for each in module.parameters(recurse=False))
