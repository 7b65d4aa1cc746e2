"""Parameters that several stages use: equal values, and gradients added up."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from boltmesh.strategies.torch_compat import ParametersInPlace, local_tensor

_FLAG = torch.int32


class SharedParameters:
    """Parameters of stages on more than one rank: tied weights, and what code between units uses.

    Each of their ranks holds them whole and makes a part of their gradient; the parts are added
    up after each batch, so that equal steps follow. Collective to make, over the pipeline.

    Args:
        parameters: Those that this rank holds and shares.
        ranks: By name of every shared parameter of the model, the ranks that hold it, counted
            within the pipeline; alike on all ranks.
        group: The pipeline.
        new_group: Makes a group of some of its ranks, for all pipelines at once.
    """

    def __init__(
        self,
        parameters: ParametersInPlace,
        ranks: Mapping[str, tuple[int, ...]],
        group: ProcessGroup,
        new_group: Callable[[tuple[int, ...]], ProcessGroup | None],
    ) -> None:
        self.names = frozenset(parameters.named())
        """What this rank shares."""
        self._parameters = parameters
        self._members: list[tuple[ProcessGroup, list[str]]] = []
        for members in sorted(set(ranks.values())):
            # By all ranks, though only some are in it: ranks that have made different numbers of
            # groups may never meet in the next one (gloo, torch 2.13).
            made = new_group(members)
            if made is None:
                continue
            held = [name for name in sorted(ranks) if ranks[name] == members]
            self._members.append((made, held))

    def _held(self) -> list[tuple[ProcessGroup, list[Parameter]]]:
        """Return the groups, and what their ranks share."""
        named = self._parameters.named()
        return [(group, [named[each] for each in names]) for group, names in self._members]

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that gradients are added up in."""
        return [group for group, _ in self._members]

    def size_per_batch(self) -> tuple[int, int]:
        """Return the bytes and the calls of ``add_up``, with a gradient for every parameter."""
        trained = [[each for each in held if each.requires_grad] for _, held in self._held()]
        flags = [len(held) * _FLAG.itemsize for held in trained if held]
        gradients = [each.numel() * each.element_size() for held in trained for each in held]
        return sum(flags) + sum(gradients), len(flags) + len(gradients)

    def add_up(self, gradients: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        """Sum gradients over the ranks that hold the same parameter; return the sums.

        Collective over those ranks. A rank that made none adds nothing.

        Args:
            gradients: By identity of the parameter.
        """
        sums: dict[int, Tensor] = {}
        for group, parameters in self._held():
            trained = [each for each in parameters if each.requires_grad]
            if not trained:
                continue
            found = [gradients.get(id(each)) for each in trained]
            # Without a gradient on any rank there is none, which optimizers tell from zeros.
            flags = torch.tensor([each is not None for each in found], dtype=_FLAG)
            flags = flags.to(trained[0].device)
            dist.all_reduce(flags, group=group)
            for each, own, count in zip(trained, found, flags.tolist(), strict=True):
                if count:
                    gradient = torch.zeros_like(each) if own is None else own
                    dist.all_reduce(gradient, group=group)
                    sums[id(each)] = gradient
        return sums

    def size_of_gradients(self) -> tuple[int, int]:
        """Return the bytes and the calls of ``even``, with a gradient for every parameter."""
        parts = [
            local_tensor(each.detach())
            for _, held in self._held()
            for each in held
            if each.requires_grad
        ]
        return sum(each.numel() * each.element_size() for each in parts), len(parts)

    def even(self) -> None:
        """Give every holder the gradients of the first one, which differ by roundings at most.

        Collective over the ranks that hold the same parameter. All of them have one, or none has.
        """
        for group, parameters in self._held():
            source = dist.get_process_group_ranks(group)[0]
            for each in parameters:
                if each.grad is not None:
                    dist.broadcast(local_tensor(each.grad), source, group=group)

    def broadcast(self) -> None:
        """Give every holder the values of the first one."""
        for group, parameters in self._held():
            source = dist.get_process_group_ranks(group)[0]
            for each in parameters:
                # Of shards each rank's is that of the holder beside it.
                dist.broadcast(local_tensor(each.detach()), source, group=group)
