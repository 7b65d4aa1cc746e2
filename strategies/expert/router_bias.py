"""Corrects the choices of routers, so that experts get rows evenly without an auxiliary loss.

After each step the bias of an expert with fewer rows than the mean rises, that of an expert with
more falls; rows count over all ranks.

Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from boltmesh.strategies.expert.find import Experts, arguments, find_experts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RouterBiases:
    """The biases of a model's routers.

    Args:
        rate: Change of an expert's bias in a step.
        names: The buffer of each router, by name of its experts.
    """

    def __init__(self, rate: float, names: dict[str, str]) -> None:
        self.rate, self.names = rate, names
        self._rows: dict[str, Tensor] = {}
        """Rows of each expert on this rank since the last step, shape ``(X,)``, fp32, by name."""

    def count(self, name: str, chosen: Tensor, num_experts: int) -> None:
        """Count the rows of a batch by expert.

        Args:
            name: Name of the experts.
            chosen: Numbers of the chosen experts, of any shape and integer dtype.
            num_experts: Number of experts.
        """
        if name in self.names:
            rows = chosen.new_zeros(num_experts, dtype=torch.float32)
            flat = chosen.detach().reshape(-1).long()
            rows.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
            self._rows[name] = self._rows.get(name, 0) + rows

    @torch.no_grad()
    def correct(self, module: Module, groups: Sequence["ProcessGroup"]) -> None:
        """Change the biases by the counts since the last call. Collective over the groups."""
        names = [name for name in self.names if name in self._rows]
        if not names:
            return
        rows = torch.cat([self._rows[name] for name in names])
        for group in groups:
            dist.all_reduce(rows, group=group)
        sizes = [len(self._rows[name]) for name in names]
        for name, of_layer in zip(names, rows.split_with_sizes(sizes), strict=True):
            bias = module.get_buffer(self.names[name])
            bias += self.rate * (of_layer.mean() - of_layer).sign().view_as(bias)
        self._rows.clear()


def find_biases(
    model: Module, experts: Iterable[Experts], step: Callable[[], object]
) -> dict[str, str]:
    """Return the name of each router's buffer that corrects choices, by name of its experts.

    It is next to its experts, has an element for each, and a large value of one of them makes every
    row choose that expert. ``step`` runs a step of the model.
    """
    near: dict[str, str] = {}
    for each in experts:
        above = each.name
        while each.kind == "routed" and each.name not in near and "." in above:
            above = above.rpartition(".")[0]
            fitting = [
                f"{above}.{name}"
                for name, buffer in model.get_submodule(above).named_buffers()
                if buffer.is_floating_point() and buffer.numel() == each.num_experts
                if not f"{above}.{name}".startswith(f"{each.name}.")
            ]
            if len(fitting) == 1:
                near[each.name] = fitting[0]
    before = {name: model.get_buffer(name).clone() for name in near.values()}
    try:
        for name in before:
            model.get_buffer(name).view(-1)[0] += 1e6
        calls = find_experts(model, step).calls
    finally:
        for name, value in before.items():
            model.get_buffer(name).copy_(value)
    biases: dict[str, str] = {}
    for each in experts:
        call = calls.get(each.name)
        if call is None or each.name not in near:
            continue
        chosen = arguments(call.args, call.kwargs)[each.slots["experts"]]
        if bool((chosen == 0).any(-1).all()):
            biases[each.name] = near[each.name]
    return biases
