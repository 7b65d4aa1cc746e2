"""PipeDream-2BW: gradients of one batch are applied in the step of the next; weight stashing.

The update is W(t+1) = W(t) - step(gradient of batch t-1 at W(t-1)) (Narayanan et al. 2021,
https://arxiv.org/abs/2006.09503, section 3.1): on every rank the same delay of one step. The first
batch of a run has no gradient to apply, so its optimizer step changes nothing. The gradient of the
last batch is not applied unless the run is resumed; checkpoints keep it for that.

[Note: Two versions]
A backward pass after an optimizer step has to use the weights of its forward pass. Autograd saves
the parameter itself, not a copy, so writing to it invalidates every graph that contains it (and
autograd raises an error). Therefore the module runs with stashed parameters: the same values in the
same memory, unknown to any optimizer. If a graph outlives the step, the module's own parameters get
new memory before the optimizer writes to them, and the stashed ones keep the old memory. Gradients
accumulate in the stashed parameters, so the gradients of two batches never mix.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.patch import members_replaced
from boltmesh.strategies.pipeline.stage_params import TiedWeights
from boltmesh.strategies.torch_compat.autograd import has_gradient_hooks
from boltmesh.strategies.torch_compat.optimizers import scale_all
from boltmesh.strategies.torch_compat.tensors import scalar_on


class ParamSites:
    """The submodules and attribute names at which a module has the trained parameters of this rank.

    Args:
        module: The full model.
        held: The parameters of this rank.
    """

    def __init__(self, module: Module, held: Iterable[Parameter]) -> None:
        trained = {id(param) for param in held if param.requires_grad}
        self.sites = [
            (owner, name, param)
            for owner in module.modules()
            for name, param in owner.named_parameters(recurse=False, remove_duplicate=False)
            if id(param) in trained
        ]
        self.parameters = list({id(param): param for _, _, param in self.sites}.values())
        self._names = {id(param): name for name, param in module.named_parameters()}

    def name_of(self, parameter: Parameter) -> str:
        """Return its first name in the module."""
        return self._names[id(parameter)]


class StashedWeights:
    """The current weights, kept for the backward passes of a batch; see [Note: Two versions].

    Raises:
        ConfigError: A parameter has a gradient hook, which would never be called.
    """

    def __init__(self, sites: ParamSites) -> None:
        self._sites = sites
        for param in sites.parameters:
            if has_gradient_hooks(param):
                raise ConfigError(
                    f"{sites.name_of(param)} has a hook on its gradient, and with schedule="
                    f"'pipedream_2bw' gradients arrive a step late and beside it. Change "
                    f"gradients in on_before_optimizer_step, or use schedule='1f1b'."
                )
        self._stashed = {id(param): _stash(param) for param in sites.parameters}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module computes with this version.

        Raises:
            ConfigError: The module uses one of its parameters by a reference kept elsewhere.
        """
        own = self._sites.parameters
        for param in own:
            param.grad = None  # of the step before
        sites = self._sites.sites
        values = [(owner, name, self._stashed[id(parameter)]) for owner, name, parameter in sites]
        with members_replaced(values):
            yield
        bypassed = next((param for param in own if param.grad is not None), None)
        if bypassed is not None:
            raise ConfigError(
                f"The model uses {self._sites.name_of(bypassed)} by a reference of its own beside "
                f"the module that it belongs to, and schedule='pipedream_2bw' puts a version of "
                f"the weights into that module's place. Read the parameter from its module, or "
                f"use schedule='1f1b'."
            )

    @torch.no_grad()
    def copy_on_write(self) -> None:
        """Give the module's parameters fresh storage; called before ``optimizer.step``."""
        for param in self._sites.parameters:
            if param.data_ptr() == self._stashed[id(param)].data_ptr():
                param.data = param.data.clone()

    def gradients(self) -> dict[int, Tensor]:
        """Return the gradients so far, by ``id`` of the module's parameter, with its shape."""
        return {key: param.grad for key, param in self._stashed.items() if param.grad is not None}

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and gradients kept in memory in addition to the module's."""
        weights: list[Tensor] = [
            self._stashed[id(param)]
            for param in self._sites.parameters
            if self._stashed[id(param)].data_ptr() != param.data_ptr()
        ]
        return weights, list(self.gradients().values())


def _stash(parameter: Parameter) -> Parameter:
    stashed = Parameter(parameter.data)
    stashed.__dict__.update(parameter.__dict__)  # attributes set by users and libraries
    return stashed


@dataclass
class _DelayedBatch:
    """A batch whose backward passes are not all done."""

    version: StashedWeights
    num_microbatches: int
    total: Tensor | float | None
    """Divisor of its gradients; None if it gave no loss."""


class DelayedGradients:
    """The batch on one rank whose gradients are applied in the next step.

    Args:
        sites: The parameters of this rank.
        shared: The tied weights that several ranks hold.
        finish: Runs the backward passes that are left of a number of microbatches. Collective.
        drop: Frees their graphs.
    """

    def __init__(
        self,
        sites: ParamSites,
        shared: TiedWeights,
        finish: Callable[[int], None],
        drop: Callable[[], None],
    ) -> None:
        self._sites = sites
        self._shared = shared
        self._finish = finish
        self._drop = drop
        self._under_way: _DelayedBatch | None = None
        self._ready: dict[int, Tensor] = {}
        """Gradients of the newest complete batch, by ``id`` of the parameter."""

    @contextmanager
    def batch(self) -> Iterator[int]:
        """Run a batch's schedule inside; yields the microbatches of the batch that it completes.

        Collective over the pipeline. The gradient of the completed batch is ready on exit; ``wait``
        keeps the new batch.
        """
        before, self._under_way = self._under_way, None
        self._version = StashedWeights(self._sites)
        with self._version.in_place():
            yield before.num_microbatches if before is not None else 0
        if before is not None:
            self._complete(before)

    def wait(self, num_microbatches: int, total: Tensor | float | None) -> None:
        """Keep the batch that was run last until the next one completes it.

        Args:
            num_microbatches: Microbatches of the batch.
            total: Divisor of its gradients, shape ``()`` if a tensor; None if it gave no loss.
        """
        self._version.copy_on_write()
        self._under_way = _DelayedBatch(self._version, num_microbatches, total)
        del self._version

    def take(self) -> dict[int, Tensor]:
        """Return the gradients that are ready, by ``id`` of their parameter, and forget them.

        They have the shape and dtype of the parameter.
        """
        ready, self._ready = self._ready, {}
        return ready

    def drain(self) -> None:
        """Complete the batch under way, so that no graph is left. Collective over the pipeline.

        No result changes by it.
        """
        before, self._under_way = self._under_way, None
        if before is not None:
            self._finish(before.num_microbatches)
            self._complete(before)

    def abandon(self) -> None:
        """Drop the batch under way; gradients that are ready stay."""
        self._under_way = None
        self._drop()

    def _complete(self, batch: _DelayedBatch) -> None:
        if batch.total is None:
            return
        gradients = batch.version.gradients()
        gradients |= self._shared.sum_gradients(gradients)
        if gradients:
            _divide(list(gradients.values()), batch.total)
        self._ready = gradients

    # Checkpoints.

    def pending(self) -> Mapping[int, Tensor]:
        """Return the gradients that are ready, in their parameters' shapes, by ``id`` of these.

        They are kept; after ``drain`` these are all.
        """
        return self._ready

    def begin(self) -> None:
        """Drop the batch under way and the gradients that are ready."""
        self.abandon()
        self._ready = {}

    def put(self, parameter: Parameter, gradient: Tensor) -> None:
        """Set a gradient from a checkpoint, with the shape of the parameter."""
        self._ready[id(parameter)] = gradient

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and gradients kept in memory in addition to the module's."""
        weights: list[Tensor] = []
        gradients = list(self._ready.values())
        if self._under_way is not None:
            kept = self._under_way.version.tensors()
            weights, gradients = kept[0], gradients + kept[1]
        return weights, gradients


def _divide(gradients: Sequence[Tensor], total: Tensor | float) -> None:
    """Divide as ``GradHandoff`` does, equally on every rank; a total of 0 gives zeros."""
    divisor = scalar_on(total, gradients[0].device)
    factor = torch.where(divisor == 0, 0.0, 1 / divisor)
    for dtype in {grad.dtype for grad in gradients}:
        same_dtype = [grad for grad in gradients if grad.dtype == dtype]
        scale_all(same_dtype, factor.to(torch.promote_types(dtype, torch.float32)))
