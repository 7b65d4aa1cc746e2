"""Shards: the ranks of the data axis hold a share each of what replicas would hold whole.

The work is done by torch's ``fully_shard``, in all three stages; this part decides what is
gathered together, when it is freed again, and when gradients are reduced.

Source: ZeRO, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data.axis import AxisContext, DataAxis
from boltmesh.strategies.data.root import Root
from boltmesh.strategies.data.shard_options import ShardOptions
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class Shards(DataAxis):
    """The data axis of ZeRO."""

    is_sharded = True

    def __init__(self, options: ShardOptions) -> None:
        self.options = options
        self._root: Root | None = None
        self._units: dict[str, FSDPModule] = {}

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        if self._root is not None and self._root.module is module:
            return self._root  # a second fit, or an evaluation after it
        assert isinstance(module, LightningModule)
        mesh = DeviceMesh.from_group(context.group, context.device.type)
        is_freed = self.options.stage == 3
        policy = MixedPrecisionPolicy(
            param_dtype=context.compute_dtype,
            reduce_dtype=None if context.compute_dtype is None else torch.float32,
            cast_forward_inputs=False,
        )
        units: dict[str, Module] = {}  # from units.find_units(module, self.options.blocks)
        module.to(context.device)
        for unit in units.values():
            fully_shard(unit, mesh=mesh, reshard_after_forward=is_freed, mp_policy=policy)
        root = Root(module)
        fully_shard(
            root, mesh=mesh, reshard_after_forward=None if is_freed else False, mp_policy=policy
        )
        self._root = root
        return root

    @override
    @contextmanager
    def no_sync(self, module: Module) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        if self.options.stage == 3:
            yield
            return
        self._set_last(module, is_last=False)
        try:
            yield
        finally:
            self._set_last(module, is_last=True)

    def _set_last(self, module: FSDPModule, *, is_last: bool) -> None:
        # Parameters do not change within an accumulation window, so both stages keep them
        # gathered; stage 1 also keeps the gradients whole, and reduces them once.
        module.set_reshard_after_backward(is_last)
        if self.options.stage == 1:
            module.set_requires_gradient_sync(is_last)
            module.set_is_last_backward(is_last)

    @override
    def before_manual_backward(self, module: Module, loss: Tensor) -> None:
        pass

    @override
    def after_manual_backward(self, module: Module) -> None:
        pass

    @override
    def after_optimizer_step(self, module: Module, optimizer: Optimizer) -> None:
        # A forward pass without a backward pass leaves gathered copies behind, and the step has
        # just made them old.
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return []

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return []
