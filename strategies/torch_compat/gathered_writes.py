"""Writes to parameters while they are gathered, such as by momentum encoders within a step.

[Note: Writes to gathered parameters]
The memory of an unsharded parameter is freed when its unit reshards, so what a step wrote to it is
copied to the shards before: each rank copies its own rows. A write is detected by

- the version counter of the unsharded parameter, for writes in place;
- its storage, for ``parameter.data = tensor``;
- ``GatheredParameter.was_data_used``, for writes in place to ``parameter.data``, which has a
  version counter of its own. If the shard is a plain tensor of the same dtype, the rows are then
  copied without comparing values: a copy of a shard costs less than waiting for the device.
  Otherwise they are compared first.

A write to the shards between a gather and the reshard is detected by the shard's version counter.

If units stay gathered (stages 1 and 2), a step may compute with ``.data`` of a unit that has run,
and of a frozen one that has not (MoCo): the latter is gathered when its ``.data`` is read.

Parameters that stay gathered after a backward pass, as the root's under manual optimisation, or are
gathered before gradients are zeroed, have the ``.grad`` of their shard, as does the optimizer.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.torch_compat.autograd import (
    is_in_backward,
    own_gradient,
    set_own_gradient,
)
from boltmesh.strategies.torch_compat.fsdp_hooks import InstrumentedParamGroup, instrument
from boltmesh.strategies.torch_compat.tensors import (
    is_equal,
    local_tensor,
    offer_whole,
    storage_key,
    times_data_was_used,
)

_DATA: Any = Parameter.data  # torch declares its descriptors as plain attributes


class GatheredParameter(Parameter):
    """An unsharded parameter that records whether its ``.data`` was read or set.

    Outside of backward passes its ``.grad`` is that of its shard.
    """

    was_data_used = False
    origin: tuple[InstrumentedParamGroup, Any] | None = None
    """The group and its ``FSDPParam``; None if its gradients are its own."""

    def _read_data(self) -> Tensor:
        """Return the values, without autograd."""
        self.was_data_used = True
        values: Tensor = _DATA.__get__(self)
        return values

    def _write_data(self, value: Tensor) -> None:
        self.was_data_used = True
        _DATA.__set__(self, value)

    data = property(_read_data, _write_data)

    def _read_grad(self) -> Tensor | None:
        """Return the gradient; an optimizer skips parameters without one."""
        own = own_gradient(self)
        shard = self._shard() if own is None else None
        return own if shard is None else shard.grad

    def _write_grad(self, value: Tensor | None) -> None:
        shard = self._shard()
        if shard is None or value is None:
            set_own_gradient(self, value)
        if shard is not None:
            if value is not None and not isinstance(value, DTensor):
                raise UnsupportedError(
                    "A gradient of this rank alone was put into .grad of a parameter, and under "
                    "ZeRO the optimizer is given a shard of the average over all ranks. Make it by "
                    "self.manual_backward, change .grad in place, or use bolt_tensor."
                )
            shard.grad = value

    def _shard(self) -> Parameter | None:
        """Return the shard whose gradient is also this parameter's, if that is so now."""
        if self.origin is None or is_in_backward() or self.origin[0].is_reducing:
            return None
        shard: Parameter = self.origin[1].sharded_param
        return shard

    grad = property(_read_grad, _write_grad)


class GatheredWrites:
    """Copies writes to gathered parameters to their shards, see the note above.

    Args:
        units: Modules of ``fully_shard``, the root last.
        refuse: Raises an error, given the name within the root of a parameter whose shards cannot
            take the write: shard and unsharded parameter were both written to, or the unsharded
            one has lower precision, or its replacement has another shape or dtype. Called when all
            other parameters of its unit are resharded.
    """

    def __init__(self, units: Iterable[FSDPModule], refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._units = [(unit, group) for unit in units for group in instrument(unit)]
        self._versions: dict[Any, tuple[int, int]] = {}
        """Versions of the shard and of the unsharded parameter, by gathered ``FSDPParam``."""
        self._shard_versions: dict[Any, int] = {}
        self._data_uses = 0
        self._refused: list[str] = []
        self.shares_gradients = False
        """Whether gathered parameters have the gradients of their shards: if steps run through the
        units, which reduce gradients in the backward pass."""
        self._frozen: dict[int, tuple[FSDPModule, Any]] = {}
        """Unit and ``FSDPParam``, by the id of the shard."""
        for _, group in self._units:
            group.phases.before_gather.append(partial(self._before_gather, group))
            group.phases.after_gather.append(partial(self._after_gather, group))
            group.phases.before_reshard.append(partial(self._write_back, group))
            group.phases.after_reshard.append(self._raise_refused)

    def gather_frozen(
        self, is_in_step: Callable[[], bool], gather: Callable[[FSDPModule], None]
    ) -> None:
        """Gather a frozen unit if a step reads its ``.data`` after other units have run."""
        self._is_in_step, self._gather = is_in_step, gather
        for unit, group in self._units:
            for param in group.fsdp_params:
                if not param.sharded_param.requires_grad:
                    self._frozen[id(param.sharded_param)] = unit, param
                    offer_whole(param.sharded_param, self._whole)

    def _whole(self, shard: Tensor) -> Tensor | None:
        unit, param = self._frozen[id(shard)]
        if not self._is_in_step() or param.param_dtype not in {None, shard.dtype}:
            return None
        root = self._units[-1][0]  # gathered from the beginning of a step
        if not any(group.is_unsharded for other, group in self._units if other is not root):
            return None
        self._gather(unit)
        whole: Tensor = param._unsharded_param
        return whole

    def begin_forward(self) -> None:
        """Note the versions of shards: FSDP2 orders gathers after all earlier writes."""
        self._data_uses = times_data_was_used()
        self._shard_versions = {
            param: param.sharded_param._version
            for _, group in self._units
            for param in group.fsdp_params
        }

    def write_back(self) -> None:
        """Copy all writes so far to the shards, before these are stepped."""
        for _, group in self._units:
            gathered = [param for param in group.fsdp_params if param in self._versions]
            shard_versions = [self._versions[param][0] for param in gathered]
            self._write_back(group)
            for param, shard_version in zip(gathered, shard_versions, strict=True):
                self._note(group, param, shard_version)
        self._raise_refused()

    def stale(self) -> dict[str, FSDPModule]:
        """Return units whose shards were written to after their gather, by parameter name."""
        return {
            param._param_fqn or "": unit
            for unit, group in self._units
            if group.is_unsharded
            for param in group.fsdp_params
            if param in self._versions and self._versions[param][0] != param.sharded_param._version
        }

    def _before_gather(self, group: InstrumentedParamGroup) -> None:
        # FSDP2 gathers on streams of its own, which wait for the optimizer but not for a step.
        known = self._shard_versions
        if self._data_uses != times_data_was_used() or any(
            known.get(param) != param.sharded_param._version for param in group.fsdp_params
        ):
            _order_gather(group)

    def _after_gather(self, group: InstrumentedParamGroup) -> None:
        for param in group.fsdp_params:
            self._note(group, param, param.sharded_param._version)

    def _note(self, group: InstrumentedParamGroup, param: Any, shard_version: int) -> None:
        unsharded = param._unsharded_param
        if type(unsharded) is Parameter:
            unsharded.__class__ = GatheredParameter
            vars(unsharded)["origin"] = (group, param) if self.shares_gradients else None
        vars(unsharded).pop("was_data_used", None)
        self._versions[param] = shard_version, _version(unsharded)

    @torch.no_grad()
    def _write_back(self, group: InstrumentedParamGroup) -> None:
        for param in group.fsdp_params:
            versions = self._versions.pop(param, None)
            if versions is None:
                continue
            try:
                rows = _written_rows(param, *versions)
            except ValueError:
                self._refused.append(param._param_fqn or "")
                continue
            if rows is not None:
                local_tensor(param.sharded_param).copy_(rows)
                _order_gather(group)

    def _raise_refused(self) -> None:
        if self._refused:
            name = self._refused[0]
            self._refused.clear()
            self._versions.clear()  # the run ends, and must reshard the other units
            self._refuse(name)


def _version(unsharded: Tensor) -> int:
    # Tensors made in inference mode have no version counter.
    return 0 if unsharded.is_inference() else unsharded._version


def _written_rows(param: Any, shard_version: int, version: int) -> Tensor | None:
    """Return this rank's rows of an unsharded parameter that may have been written, else None.

    Args:
        param: The ``FSDPParam``. The storage of its unsharded parameter is restored.
        shard_version: Version of the shard when it was gathered.
        version: Version of the unsharded parameter at that time.

    Raises:
        ValueError: If the shard cannot take the rows.
    """
    unsharded, shard = param._unsharded_param, param.sharded_param
    gathered = param.all_gather_outputs[0]
    is_replaced = storage_key(unsharded) != storage_key(gathered)
    is_written = is_replaced or version != _version(unsharded)
    if not is_written and not getattr(unsharded, "was_data_used", False):
        return None
    value = unsharded.detach()
    if is_replaced:
        own = torch.as_strided(gathered, param._orig_size, param._contiguous_orig_stride, 0)
        Parameter.data.__set__(unsharded, own)  # type: ignore[attr-defined]
        if (value.shape, value.dtype) != (own.shape, own.dtype):
            raise ValueError
        own.copy_(value)  # it may stay gathered
    if shard_version != shard._version:
        if is_written:
            raise ValueError
        return None
    local = local_tensor(shard)
    first_row = param.mesh_info.shard_mesh_rank * param.padded_sharded_param_size[0]
    rows: Tensor = value[first_row : first_row + local.shape[0]]
    is_same_type = rows.dtype == local.dtype
    if is_same_type and (is_written or type(local) is Tensor):
        return rows
    if is_equal(rows, local):
        return None
    if not is_same_type:
        raise ValueError
    return rows


def _order_gather(group: InstrumentedParamGroup) -> None:
    """Make the group's next gather wait for all work submitted so far to the current stream."""
    event = group.device_handle.Event()
    event.record()
    group._reshard_after_forward_event = event
