"""State of a sharded model beside its shards: scalars, buffers, gradients.

- ``ScalarParams``: a parameter without dimensions, such as a learned temperature, cannot be
  sharded. Every rank keeps it. Between steps it is a replicated DTensor, so that optimizers and
  checkpoints see one kind of parameter; within a step it is a plain tensor over the same memory, as
  the forward pass computes with plain tensors.
- ``OwnedParams``: each rank has its own rows of experts' parameters and computes with them. Between
  steps they are DTensors as well.
- ``follow_toggles``: the optimizer holds the shard of a parameter, the forward pass uses the
  unsharded one. FSDP2 copies ``requires_grad`` from the first to the second when it gathers;
  parameters that stay gathered are updated before a forward pass (``StepUnits.follow_shards``) and
  after a toggle.
- ``BufferSync``: the buffers of the first rank are sent to all ranks, as
  ``DistributedDataParallel`` does. Every buffer is sent: writes to batch norms, codebooks and
  averages leave no trace in the tensor. The list follows from the model alone, so it is the same on
  every rank.
- ``EarlyZeroGrad``: the Trainer zeroes gradients between forward and backward pass, so during the
  forward pass the old ones would be in memory beside the gathered parameters, which ZeRO's formulas
  do not count. A block's old gradients are dropped when its forward begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import Module, Parameter
from typing_extensions import override

from boltmesh.strategies.engine.data_axis import OwnedRows
from boltmesh.strategies.grad_norm import OWNED_DIM
from boltmesh.strategies.object_collectives import noop
from boltmesh.strategies.offload.shard_tensor import GatheredSource, OffloadedShard
from boltmesh.strategies.torch_compat.communication import broadcast_coalesced
from boltmesh.strategies.torch_compat.fsdp import unit_parameters
from boltmesh.strategies.torch_compat.modules import buffers_of, set_parameter
from boltmesh.strategies.torch_compat.optimizers import zeroed_by
from boltmesh.strategies.torch_compat.tensors import (
    compare_over_meshes,
    disabled_torch_function,
    local_tensor,
    storage_key,
)
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from boltmesh.strategies.data_parallel.fully_shard import RootModule


def scalars_of(module: Module) -> set[Parameter]:
    """Return the parameters below a module that cannot be sharded."""
    return {param for param in module.parameters() if has_no_rows(param)}


def has_no_rows(parameter: Tensor) -> bool:
    """Whether a parameter cannot be sharded: a number, or a tensor without elements."""
    return parameter.dim() == 0 or not parameter.numel()


class PlainInStep(ABC):
    """Parameters that no unit gathers: DTensors between steps, plain tensors within a step.

    Args:
        replicas: Ranks with the same values, which sum their gradients.
        num_batches: Batches of all ranks in a step, over which gradients are averaged.
    """

    stays_in_evaluation = True
    """Whether plain tensors stay for all batches of an evaluation: a rank that has run out of
    batches still computes with its experts for others."""

    def __init__(self, replicas: ProcessGroup, num_batches: int) -> None:
        self.replicas, self.num_batches = replicas, num_batches
        self.note: Callable[[str], None] = noop
        """Records a collective call of this rank, see ``OrderCheck.record``."""
        self._names: Mapping[int, str] = {}
        """Names of the parameters that all ranks have, by ``id``."""
        self.places: list[tuple[Module, str, Parameter]] = []
        """Modules and attribute names of the DTensors."""
        self.plain: dict[Parameter, Tensor] = {}
        """The tensor last put in the place of each DTensor."""
        self.copied: dict[Parameter, tuple[Any, int]] = {}
        """Copies of offloaded values among these: memory and version when they were made."""

    def replace(self, module: Module, made: Mapping[Parameter, Parameter]) -> None:
        """Replace parameters below a module by DTensors."""
        owners: dict[Module, None] = {}
        for owner in module.modules():
            own = list(owner.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own:
                if parameter in made:
                    self.places.append((owner, name, made[parameter]))
                    owners[owner] = None
        for owner in owners:
            owner.register_state_dict_pre_hook(self._use_dtensors_hook)  # type: ignore[no-untyped-call]
            owner.register_load_state_dict_pre_hook(self._use_dtensors_hook)  # type: ignore[no-untyped-call]
        self.use_dtensors()

    def _plain_of(self, parameter: Parameter) -> Tensor:
        """Return this rank's values as a plain tensor with autograd back to the parameter."""
        plain: Tensor = _Plain.apply(parameter, self)  # type: ignore[no-untyped-call]
        return InStepParameter.of(plain, parameter)

    def announce(self, parameter: Tensor) -> None:
        """Record that the gradient of a parameter that all ranks have is averaged."""
        if (name := self._names.get(id(parameter))) is not None:
            self.note(f"averaged the gradient of {name!r}")

    def averaged(self, gradient: Tensor) -> Tensor:
        """Return the average of a gradient, same shape and dtype. Collective over replicas."""
        gradient = gradient / self.num_batches
        if self.replicas.size() > 1:
            dist.all_reduce(gradient, group=self.replicas)
        return gradient

    @abstractmethod
    def expected_traffic(self, *, num_batches: int) -> Iterable[ExpectedTraffic]:
        """Return the traffic of one optimizer step with so many batches."""

    @property
    def parameters(self) -> list[Parameter]:
        """The DTensors, which optimizers hold."""
        return list(dict.fromkeys(parameter for _, _, parameter in self.places))

    def use_plain(self) -> None:
        """Replace the DTensors by plain tensors, for a forward pass."""
        self.write_back()
        for parameter in self.parameters:
            self.plain[parameter] = plain = self._plain_of(parameter)
            self.note_copy(parameter, plain)
        for owner, name, parameter in self.places:
            set_parameter(owner, name, self.plain[parameter])

    def note_copy(self, parameter: Parameter, plain: Tensor) -> None:
        """Remember that a plain tensor is a copy, if its values are offloaded."""
        if isinstance(local_tensor(parameter), OffloadedShard):
            self.copied[parameter] = storage_key(plain), plain._version  # noqa: SLF001

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy values back from plain tensors whose ``.data`` was set, and from changed copies.

        Other plain tensors share the parameter's memory.
        """
        for parameter, made in self.copied.items():
            plain = self.plain.pop(parameter)
            if (storage_key(plain), plain._version) != made:  # noqa: SLF001
                local_tensor(parameter).copy_(plain)
        self.copied.clear()
        for parameter, plain in self.plain.items():
            local = local_tensor(parameter)
            if storage_key(plain) != storage_key(local):
                local.copy_(plain)
                plain.data = local

    def use_dtensors(self) -> None:
        """Put the DTensors in place."""
        self.write_back()
        for owner, name, parameter in self.places:
            set_parameter(owner, name, parameter)

    def _use_dtensors_hook(self, *_: object) -> None:
        self.use_dtensors()


class ScalarParams(PlainInStep):
    """Parameters without dimensions, replicated.

    Args:
        module: Holds them as plain parameters, equal on all ranks.
        mesh: Mesh of the shards of other parameters.
        group: The data axis, over which their gradients are averaged.
        absent: Parameters that these ranks have no values of; left unchanged.
    """

    stays_in_evaluation = False

    def __init__(
        self,
        module: Module,
        mesh: DeviceMesh,
        group: ProcessGroup,
        *,
        absent: Set[Parameter] = frozenset(),
    ) -> None:
        super().__init__(group, group.size())
        scalars = scalars_of(module) - absent
        made = {param: _replicate(param, mesh) for param in scalars}
        named = module.named_parameters()
        self._names = {id(made[param]): name for name, param in named if param in made}
        self.replace(module, made)

    @override
    def expected_traffic(self, *, num_batches: int) -> Iterable[ExpectedTraffic]:
        trained = [param for param in self.parameters if param.requires_grad]
        if trained and self.replicas.size() > 1:
            moved = num_batches * sum(param.element_size() for param in trained)
            calls = num_batches * len(trained)
            why = "gradients of parameters without rows, once per batch"
            yield ExpectedTraffic("data", "allreduce", moved, calls, why)


class OwnedParams(PlainInStep):
    """Parameters of which each rank has its own rows, such as those of its experts.

    A rank computes with its rows for all ranks of ``owned.group``, so the gradient is the sum over
    these ranks. Ranks with the same rows sum theirs. Gradients are averaged over the
    ``num_batches`` of all ranks in a step.
    """

    def __init__(self, owned: OwnedRows, device: torch.device, num_batches: int) -> None:
        super().__init__(owned.replicas, num_batches)
        compare_over_meshes()
        self._owned = owned
        self._mesh: DeviceMesh
        self._placements: list[Placement] = [Shard(0)]
        if owned.replicas.size() == 1:
            self._mesh = DeviceMesh.from_group(
                owned.group, device.type, mesh_dim_names=(OWNED_DIM,)
            )
            return
        self._mesh = DeviceMesh.from_group(
            [owned.replicas, owned.group],
            device.type,
            mesh=torch.tensor(owned.ranks),
            mesh_dim_names=("replicate", OWNED_DIM),
        )
        self._placements.insert(0, Replicate())

    def cut(self, module: Module) -> None:
        """Reduce the parameters below a module, so far whole, to this rank's rows."""
        whole = self.whole_in(module)
        self.replace(module, {param: self.cut_one(param) for param in whole})
        self._owned.parameters.difference_update(whole)

    def whole_in(self, module: Module) -> set[Parameter]:
        """Return the parameters below a module that are still to be cut."""
        return self._owned.parameters.intersection(module.parameters())

    def follow(self, made: Mapping[Parameter, Parameter]) -> None:
        """Track parameters made in the place of those on ``meta``."""
        for each in self._owned.parameters & made.keys():
            self._owned.parameters.remove(each)
            self._owned.parameters.add(made[each])

    def cut_one(self, parameter: Parameter) -> Parameter:
        """Return this rank's rows of a whole parameter ``(X, ...)``, as a DTensor of its shape."""
        group = self._owned.group
        size = -(-parameter.shape[0] // group.size())
        rows = parameter.detach()[group.rank() * size : (group.rank() + 1) * size].clone()
        value = DTensor.from_local(
            rows,
            self._mesh,
            self._placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.detach().contiguous().stride(),
        )
        return Parameter(value, requires_grad=parameter.requires_grad)

    @override
    def expected_traffic(self, *, num_batches: int) -> Iterable[ExpectedTraffic]:
        trained = [param for param in self.parameters if param.requires_grad]
        if trained and self.replicas.size() > 1:
            moved = num_batches * sum(local_tensor(param).nbytes for param in trained)
            why = "gradients of experts, over the ranks that have the same ones, once per batch"
            yield ExpectedTraffic("data", "allreduce", moved, num_batches * len(trained), why)


class InStepParameter(Tensor):
    """A plain tensor in the place of a parameter, whose ``.grad`` is the parameter's."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    parameter: Parameter

    @staticmethod
    def of(plain: Tensor, parameter: Parameter) -> "InStepParameter":
        """Return a view of ``plain``, with its autograd, whose ``.grad`` is the parameter's."""
        made = plain.as_subclass(InStepParameter)
        made.parameter = parameter
        return made

    def _read_grad(self) -> Tensor | None:
        """Return the gradient for the optimizer, a DTensor."""
        return self.parameter.grad

    def _write_grad(self, value: Tensor | None) -> None:
        self.parameter.grad = value

    grad = property(_read_grad, _write_grad)


class _Plain(torch.autograd.Function):
    """Local values of a DTensor; the gradient is averaged."""

    @staticmethod
    @override
    def forward(ctx: Any, parameter: Tensor, of: PlainInStep) -> Tensor:
        ctx.of, ctx.like = of, parameter
        plain = local_values(parameter)
        return plain.view_as(plain)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.of.announce(ctx.like)
        gradient = ctx.of.averaged(gradients[0])
        mesh, placements = ctx.like.device_mesh, ctx.like.placements
        return DTensor.from_local(gradient, mesh, placements, run_check=False), None


def local_values(parameter: Tensor) -> Tensor:
    """Return a DTensor's local shard, in its shape, on the device; a copy if it is offloaded."""
    local = local_tensor(parameter)
    if not isinstance(local, OffloadedShard):
        return local
    assert isinstance(local.source, GatheredSource)
    return local.source.fetch_part(0, local.numel()).view(local.shape)


def _replicate(parameter: Parameter, mesh: DeviceMesh) -> Parameter:
    placements = [Replicate()] * mesh.ndim
    value = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
    return Parameter(value, requires_grad=parameter.requires_grad)


_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def follow_toggles(module: LightningModule, follow: Callable[[], None]) -> None:
    """Call ``follow`` after each ``toggle_optimizer`` and ``untoggle_optimizer`` of this module.

    Manual optimisation switches between optimizers in the middle of a step, while parameters are
    gathered, and Lightning only knows the shards.
    """
    forget_toggles(module)
    for name in _TOGGLES:
        vars(module)[name] = _followed(getattr(module, name), follow)


def forget_toggles(module: LightningModule) -> None:
    """Undo ``follow_toggles``."""
    for name in _TOGGLES:
        vars(module).pop(name, None)


def _followed(toggle: Callable[..., None], follow: Callable[[], None]) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        toggle(*args, **kwargs)
        follow()

    return call


class BufferSync:
    """Sends the buffers of a module to all ranks of a group.

    Args:
        module: The full model.
        group: The ranks.
        holds: Whether these ranks have the model's value of a named buffer; None for all buffers.
    """

    def __init__(
        self, module: Module, group: ProcessGroup, *, holds: Callable[[str], bool] | None = None
    ) -> None:
        self._module, self._group, self._holds = module, group, holds

    def held(self) -> list[Tensor]:
        """Return the buffers that ``send`` sends, any shapes and dtypes."""
        if self._holds is None:
            return buffers_of(self._module)
        return [buffer for name, buffer in self._module.named_buffers() if self._holds(name)]

    def send(self) -> None:
        """Overwrite buffers with those of the first rank. Collective."""
        if self._group.size() == 1:
            return
        buffers = [buffer.detach() for buffer in self.held()]
        if buffers:
            broadcast_coalesced(buffers, self._group)


class EarlyZeroGrad:
    """Frees the old gradients of a model's units during the forward pass after a step."""

    def __init__(self, root: "RootModule", units: Mapping[str, FSDPModule]) -> None:
        self.optimizers: Sequence[Optimizer] = ()
        """Optimizers whose ``zero_grad`` the Trainer is about to call."""
        self._root = root
        self._root_unit = units[""]
        self._stale: set[Parameter] = set()
        for name, unit in units.items():
            if name:
                assert isinstance(unit, Module)
                unit.register_forward_pre_hook(partial(self._before_unit, unit), prepend=True)

    def begin(self) -> None:
        """Free the root's gradients; the units' follow. The Trainer will call ``zero_grad``."""
        self._stale = zeroed_by(self.optimizers)
        self._free(self._root_unit)

    def end(self) -> None:
        """Leave ``.grad`` alone from now on."""
        self._stale = set()

    def _before_unit(self, unit: FSDPModule, *_: object) -> None:
        # A checkpointed block runs again in the backward pass, where gradients are new.
        if self._stale and self._root.is_running:
            self._free(unit)

    def _free(self, unit: FSDPModule) -> None:
        for shard, _ in unit_parameters(unit):
            if shard in self._stale:
                shard.grad = None
