"""The gradients of PipeDream-2BW: made by one batch, complete and applied in the step of the next.

The update is W(t+1) = W(t) - step(gradient of batch t-1 at W(t-1)) (Narayanan et al. 2021,
https://arxiv.org/abs/2006.09503, section 3.1): on every rank the same delay of one step. The first
batch of a run finds no gradient, and its optimizer step changes nothing; that of the last batch is
not applied unless the run is gone on with, for which checkpoints keep it.

A version of the weights: what a batch's forward passes use, whatever the optimizer does after.

[Note: Two versions]
A backward pass that comes after an optimizer step has to see the weights that its forward pass has
seen. Autograd keeps a parameter itself, not a copy, so writing it makes every graph that has it
worthless (and autograd says so). Therefore the module runs with stand-ins: parameters of the same
values in the same memory, that no optimizer knows. Where a graph outlives the step, the module's
own parameters move to new memory before the optimizer writes them, and the stand-ins keep the old.
Gradients arrive at the stand-ins, so those of two batches never mix.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.stage_params import TiedWeights
from boltmesh.strategies.torch_compat.autograd import has_gradient_hooks
from boltmesh.strategies.torch_compat.optimizers import scale_all


class ParamSites:
    """Where in a module the trained parameters of this rank stand, under each of their names.

    Args:
        module: The whole model.
        held: The parameters of this rank.
    """

    def __init__(self, module: Module, held: Iterable[Parameter]) -> None:
        wanted = {id(each) for each in held if each.requires_grad}
        self.slots = [
            (owner, name, each)
            for owner in module.modules()
            for name, each in owner.named_parameters(recurse=False, remove_duplicate=False)
            if id(each) in wanted
        ]
        self.parameters = list({id(each): each for _, _, each in self.slots}.values())
        self._names = {id(each): name for name, each in module.named_parameters()}

    def name_of(self, parameter: Parameter) -> str:
        """Return its first name in the module."""
        return self._names[id(parameter)]


class StashedWeights:
    """The weights as they are now; see [Note: Two versions].

    Raises:
        ConfigError: A parameter has a hook on its gradient, which would never be called.
    """

    def __init__(self, slots: ParamSites) -> None:
        self._slots = slots
        for each in slots.parameters:
            if has_gradient_hooks(each):
                raise ConfigError(
                    f"{slots.name_of(each)} has a hook on its gradient, and with schedule="
                    f"'pipedream_2bw' gradients arrive a step late and beside it. Change "
                    f"gradients in on_before_optimizer_step, or use schedule='1f1b'."
                )
        self._stand_ins = {id(each): _stand_in(each) for each in slots.parameters}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the module computes with this version.

        Raises:
            ConfigError: The module has kept one of its own parameters elsewhere and used that.
        """
        own = self._slots.parameters
        for each in own:
            each.grad = None  # of the step before; whoever makes gradients begins with none
        for owner, name, parameter in self._slots.slots:
            setattr(owner, name, self._stand_ins[id(parameter)])
        try:
            yield
        finally:
            for owner, name, parameter in self._slots.slots:
                setattr(owner, name, parameter)
        astray = next((each for each in own if each.grad is not None), None)
        if astray is not None:
            raise ConfigError(
                f"The model uses {self._slots.name_of(astray)} by a reference of its own beside "
                f"the module that it belongs to, and schedule='pipedream_2bw' puts a version of "
                f"the weights into that module's place. Read the parameter from its module, or "
                f"use schedule='1f1b'."
            )

    @torch.no_grad()
    def part(self) -> None:
        """Let the module's parameters go to memory of their own: the optimizer is about to come."""
        for each in self._slots.parameters:
            if each.data_ptr() == self._stand_ins[id(each)].data_ptr():
                each.data = each.data.clone()

    def gradients(self) -> dict[int, Tensor]:
        """Return what has arrived, by identity of the module's parameter."""
        return {
            number: each.grad for number, each in self._stand_ins.items() if each.grad is not None
        }

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return what it keeps in memory beside the module: weights and gradients."""
        weights: list[Tensor] = [
            self._stand_ins[id(each)]
            for each in self._slots.parameters
            if self._stand_ins[id(each)].data_ptr() != each.data_ptr()
        ]
        return weights, list(self.gradients().values())


def _stand_in(parameter: Parameter) -> Parameter:
    made = Parameter(parameter.data)
    made.__dict__.update(parameter.__dict__)  # what users and libraries mark parameters with
    return made


@dataclass
class _DelayedBatch:
    """One whose backward passes are not all done."""

    version: StashedWeights
    num_microbatches: int
    total: Tensor | float | None
    """What its gradients are to be divided by; None where it gave no loss."""


class DelayedGradients:
    """What is under way between two batches on one rank.

    Args:
        slots: The parameters of this rank.
        shared: Those that several ranks hold.
        finish: Does the backward passes that are left of so many microbatches. Collective.
        drop: Lets go of them.
    """

    def __init__(
        self,
        slots: ParamSites,
        shared: TiedWeights,
        finish: Callable[[int], None],
        drop: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._shared = shared
        self._finish = finish
        self._drop = drop
        self._under_way: _DelayedBatch | None = None
        self._ready: dict[int, Tensor] = {}
        """Of the newest batch that is complete, until a step takes them."""

    @contextmanager
    def batch(self) -> Iterator[int]:
        """Within, a batch's schedule is run; gives the microbatches of the one that it completes.

        Collective over the pipeline. That batch's gradient is ready afterwards, and the new one
        goes on when ``wait`` is called.
        """
        before, self._under_way = self._under_way, None
        self._version = StashedWeights(self._slots)
        with self._version.in_place():
            yield before.num_microbatches if before is not None else 0
        if before is not None:
            self._complete(before)

    def wait(self, num_microbatches: int, total: Tensor | float | None) -> None:
        """Keep the batch that was run last until the next one completes it.

        Args:
            num_microbatches: Of it.
            total: What its gradients are to be divided by; None where it gave no loss.
        """
        self._version.part()
        self._under_way = _DelayedBatch(self._version, num_microbatches, total)
        del self._version

    def take(self) -> dict[int, Tensor]:
        """Give away the gradients that are ready, by identity of their parameter."""
        ready, self._ready = self._ready, {}
        return ready

    def drain(self) -> None:
        """Complete what is under way, so that no graph is left. Collective over the pipeline.

        Nothing of what is computed changes by it.
        """
        before, self._under_way = self._under_way, None
        if before is not None:
            self._finish(before.num_microbatches)
            self._complete(before)

    def abandon(self) -> None:
        """Let go of what is under way; what is ready stays."""
        self._under_way = None
        self._drop()

    def _complete(self, batch: _DelayedBatch) -> None:
        if batch.total is None:
            return
        made = batch.version.gradients()
        made |= self._shared.add_up(made)
        if made:
            _divide(list(made.values()), batch.total)
        self._ready = made

    # Keeping.

    def pending(self) -> Mapping[int, Tensor]:
        """Return the gradients that are ready, which stay here; after ``drain`` all there are."""
        return self._ready

    def begin(self) -> None:
        """Begin anew: nothing is under way, nothing ready."""
        self.abandon()
        self._ready = {}

    def put(self, parameter: Parameter, gradient: Tensor) -> None:
        """Take a gradient that a run before has kept."""
        self._ready[id(parameter)] = gradient

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is kept in memory beside the module: weights and gradients."""
        weights: list[Tensor] = []
        gradients = list(self._ready.values())
        if self._under_way is not None:
            kept = self._under_way.version.tensors()
            weights, gradients = kept[0], gradients + kept[1]
        return weights, gradients


def _divide(gradients: Sequence[Tensor], total: Tensor | float) -> None:
    """As ``GradHandoff`` does it: in the same way on every rank; without any weight to zeros."""
    whole = torch.as_tensor(total, dtype=torch.float64, device=gradients[0].device)
    factor = torch.where(whole == 0, 0.0, 1 / whole)
    for dtype in {each.dtype for each in gradients}:
        alike = [each for each in gradients if each.dtype == dtype]
        scale_all(alike, factor.to(torch.promote_types(dtype, torch.float32)))
