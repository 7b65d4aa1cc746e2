"""Ranks of a mesh: their axes, coordinates and process groups, and how they are started.

Nothing here depends on a model; ``strategy.py`` puts one on the axes.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from typing_extensions import override

from boltmesh.errors import ConfigError, UnsupportedError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.engine.axis import Axis
from boltmesh.strategies.engine.data_axis import DataAxis
from boltmesh.strategies.lightning_compat.launchers import MultiProcessingLauncher, ScriptLauncher
from boltmesh.strategies.lightning_compat.trainer import is_compiled_whole, trainer_of
from boltmesh.strategies.mesh import AXES, MeshLayout, fit_layout
from boltmesh.strategies.process_groups import axis_group, begin, end, temporary_group
from boltmesh.strategies.topology.devices import (
    CORES,
    explain_cuda,
    gather_topology,
    near_cores,
    refuse_devices,
)
from boltmesh.strategies.topology.links import find_slow_groups
from boltmesh.strategies.torch_compat.communication import device_index, store_of_attempt
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.torch_compat import FLIGHT_RECORDER

if TYPE_CHECKING:
    from boltmesh.telemetry.writer.recorder import Recorder

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

NUM_RECORDED = 2000
"""Number of NCCL calls that torch keeps, newest ones, to explain a hang."""

MAX_TIMEOUT_S = 1e8
"""Three years. torch counts in 64-bit nanoseconds."""


class RankMeshStrategy(ParallelStrategy):
    """Starts ranks, gives each its coordinates on the axes, and makes their process groups.

    Its arguments are those of ``MeshStrategy``.
    """

    def __init__(
        self,
        *,
        axes: Sequence[Axis],
        timeout_s: float,
        process_group_backend: str | None,
        start_method: StartMethod,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
        )
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s={timeout_s} is not a time for collectives: seconds, more than 0 and at "
                f"most {MAX_TIMEOUT_S:.0f}. Use 1800, the default."
            )
        self.axes = in_order(axes)
        """Outermost to innermost."""
        self.timeout_s = timeout_s
        self.groups: dict[str, ProcessGroup] = {}
        """This rank's group of each axis, by name."""
        self._joint_group: ProcessGroup | None = None
        self.recorder: Recorder | NullRecorder = NullRecorder()
        self.num_nodes = 1
        """Number of hosts. Set by the Trainer."""
        self._process_group_backend = process_group_backend
        self._start_method = start_method

    @property  # type: ignore[explicit-override]
    @override
    def _lightning_module(self) -> LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # The Trainer sets it before its own check, which does not allow this strategy at all.
        if is_compiled_whole(module) and not isinstance(self, LightningDDPStrategy):
            can_compile = all(axis.can_compile for axis in self.axes)
            instead = ", and set compile_blocks=True" if can_compile else ""
            raise UnsupportedError(
                f"{type(module).__name__} was compiled as a whole by torch.compile, and "
                f"{type(self).__name__} runs its layers by themselves. Pass the module as it "
                f"is{instead}."
            )
        self._module = module

    # The axes.

    @property
    def data_axis(self) -> DataAxis:
        """The axis that has the parameters and the optimizers."""
        return next(axis for axis in self.axes if isinstance(axis, DataAxis))

    @property
    def model_axes(self) -> list[Axis]:
        """The axes other than the data axis, outermost first."""
        return [axis for axis in self.axes if not isinstance(axis, DataAxis)]

    @property
    def divides_layers(self) -> bool:
        """Whether ranks with the same batch compute different layers, or parts of each."""
        return any(
            axis.size > 1 and axis.shares_batches and not axis.averages_gradients
            for axis in self.axes
        )

    @property
    def shares_batches(self) -> bool:
        """Whether an axis of any size gives its ranks the same batches."""
        return any(axis.shares_batches for axis in self.axes)

    # The coordinates of this rank.

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer has to shard the data; it reads this attribute.

        Ranks that share batches get the same data. Without replicas their loaders keep the user's
        sampler, and a run sees its data in the order of one process.
        """
        return not self.shares_batches or self.layout.data > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def timeout(self) -> timedelta:
        """How long a collective may take."""
        return timedelta(seconds=self.timeout_s)

    @property
    def num_processes(self) -> int:
        """Ranks of this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str:
        """``nccl`` on CUDA, ``gloo`` on the CPU, unless chosen."""
        return self._process_group_backend or compat.default_backend(self.root_device)

    @property
    def layout(self) -> MeshLayout:
        """The sizes of the axes.

        Raises:
            LayoutError: The sizes do not divide the number of ranks.
        """
        return self.layout_of(self.num_nodes * self.num_processes)

    def layout_of(self, world_size: int) -> MeshLayout:
        """Return the sizes of the axes in a job of ``world_size`` ranks.

        Raises:
            LayoutError: The sizes do not divide the number of ranks.
            ConfigError: An axis cannot run on its size.
        """
        layout = self.choose_layout(world_size)
        for axis in self.axes:
            axis.check_layout(layout)
        return layout

    @property
    def wanted_sizes(self) -> dict[str, int]:
        """Requested sizes of axes, by name."""
        return {axis.name: axis.wanted_size for axis in self.axes if axis.wanted_size is not None}

    def choose_layout(self, world_size: int) -> MeshLayout:
        """Divide ``world_size`` ranks over the axes, see ``layout_of``."""
        return fit_layout(world_size=world_size, ranks_per_host=world_size, **self.wanted_sizes)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return self.layout.coordinates(self.global_rank)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.layout.data, "rank": self.coordinates["data"]}

    def set_world_ranks(self) -> None:
        """Set rank and world size. Called by the Trainer before and after ranks start."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # Read back: some environments ignore the setters.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # Starting.

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        _ = self.layout  # refuses sizes that do not fit, when the Trainer is built
        if self._start_method == "popen":
            launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
            launcher.on_death = self._record_death
            self._launcher = launcher
        else:
            self._launcher = MultiProcessingLauncher(self, start_method=self._start_method)

    def _record_death(self, local_rank: int, code: int | None) -> None:
        self.recorder.rank_died(self.node_rank * self.num_processes + local_rank, code)

    @override
    def setup_environment(self) -> None:
        try:
            self._setup_environment()
        except RuntimeError as error:
            explained = explain_cuda(error, os.environ)
            if explained is None:
                raise
            raise explained from error

    def _prepare_cuda(self) -> None:
        """Check the devices of this host's ranks, and set what CUDA reads when it starts."""
        if self.root_device.type != "cuda":
            return
        for axis in self.axes:
            for name, value in axis.cuda_variables.items():
                os.environ.setdefault(name, value)
        if sum(axis.size > 1 for axis in self.axes) > 1:
            # From NCCL 2.26 on, communicators of several axes start their kernels in the order of
            # the calls, which is the same on all ranks.
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        if not any(name in os.environ for name in FLIGHT_RECORDER):
            os.environ[FLIGHT_RECORDER[0]] = str(NUM_RECORDED)
        refuse_devices(self.parallel_devices or [], torch.cuda.device_count, os.environ)

    def _setup_environment(self) -> None:
        self._prepare_cuda()
        super().setup_environment()
        if self.root_device.type == "cuda":
            CORES.bind(near_cores(torch.cuda.get_device_properties(self.root_device)))
        self._reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        store = None
        if not dist.is_initialized():
            store = store_of_attempt(self.global_rank, self.world_size, self.timeout)
        compat.init_process_group(
            self.cluster_environment,
            self.process_group_backend,
            store=store,
            timeout=self.timeout,
            device_id=None if device.type == "cpu" else device,
        )
        begin(self, self.lightning_module)
        if not self.groups:
            self.groups = self._build_groups()
            if len(self.gradient_axes) > 1:
                self._joint_group = self.new_group(self.gradient_axes)
            for axis in self.axes:
                axis.build_groups()
            self._check_placement()

    def near_groups(self) -> dict[str, list[list[int]]]:
        """Return the groups whose ranks should be near each other, by kind.

        Inner axes, which move the most bytes, come first.
        """
        groups: dict[str, list[list[int]]] = {}
        for axis in reversed(self.axes):
            groups.update(axis.near_groups())
        return groups

    def _check_placement(self) -> None:
        """Warn about groups that use a slow link although a faster one exists. Collective."""
        groups = self.near_groups()
        if not groups:
            return
        topology = gather_topology(self.root_device)
        if self.global_rank == 0:
            for text in find_slow_groups(topology, groups):
                warnings.warn(f"Rank placement: {text}", stacklevel=2)

    def _reset_seed(self) -> None:
        """Seed every rank again after the model was built.

        Ranks that share batches and run the script themselves are left out: they continue as one
        process does, and ``setup`` gives them the generators of the first one. Spawned ranks have
        only the seed.
        """
        is_one_process = self.shares_batches and self.layout.data == 1
        if not is_one_process or self._start_method in {"spawn", "forkserver"}:
            compat.reset_seed()

    def _build_groups(self) -> dict[str, ProcessGroup]:
        """Make one new group per axis; traffic of the default group would belong to no axis.

        Collective over all ranks.
        """
        groups = {}
        for axis in self.axes:
            if axis.folds is not None:  # it makes its own
                continue
            group = self.new_group(axis.name)
            assert group is not None
            groups[axis.name] = group
        return groups

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are averaged, outermost first."""
        return tuple(
            axis.name
            for axis in self.axes
            if isinstance(axis, DataAxis) or (axis.averages_gradients and axis.size > 1)
        )

    @property
    def coupled(self) -> ProcessGroup | None:
        """Ranks with other batches that compute layers with this one; a group on the CPU."""
        return next((axis.coupled for axis in self.axes if axis.coupled is not None), None)

    @property
    def gradient_group(self) -> ProcessGroup:
        """Ranks that average gradients with this one. Loaders and logs use ``data`` alone."""
        return self.groups["data"] if self._joint_group is None else self._joint_group

    def new_group(
        self,
        axis: str | tuple[str, ...],
        members: Sequence[int] | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> ProcessGroup | None:
        """Make a further group along one or several axes and return this rank's.

        Collective over all ranks: each group of the axes gets its own one.

        Args:
            axis: The axis of its ranks; several make one group over all of them.
            members: Its members' indices on the axis; None: all.
            backend: ``gloo`` or ``nccl``; None: that of the other groups.
            timeout: Timeout of its collectives; None: that of the other groups. A group with its
                own timeout is for a trial; the caller destroys it.

        Returns:
            The group with this rank, None without one.
        """
        along = (axis,) if isinstance(axis, str) else axis
        chosen = [
            [ranks[each] for each in (range(len(ranks)) if members is None else members)]
            for ranks in self.layout.groups(*along)
        ]
        name = " x ".join(along)
        return self.enumerated_group(chosen, name, backend=backend, timeout=timeout)

    def enumerated_group(
        self,
        groups: Sequence[Sequence[int]],
        name: str,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> ProcessGroup | None:
        """Make the listed groups and return this rank's, see ``new_group``. Collective.

        Args:
            groups: Ranks of each group; the same list on all ranks.
            name: Description of the groups in messages of torch.
            backend: See ``new_group``.
            timeout: See ``new_group``.
        """

        def make() -> ProcessGroup | None:
            group: ProcessGroup | None
            group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                groups, timeout=timeout or self.timeout, backend=backend, group_desc=name
            )
            return group

        if timeout is not None:  # for a trial, which destroys the group
            return make()
        if backend is not None:
            return temporary_group(make(), self)
        return axis_group((name, tuple(map(tuple, groups)), self.timeout), make, self)

    def end_run(self) -> None:
        """Close the records of a run, and register whether it ended without an error."""
        self.recorder.close()
        self.recorder = NullRecorder()
        trainer = trainer_of(self.lightning_module)
        if trainer is not None and trainer.state.status != TrainerStatus.INTERRUPTED:
            end(self)

    # Collectives.

    @override
    def barrier(self, name: str | None = None) -> None:
        if compat.distributed_is_initialized():
            dist.barrier(device_ids=device_index(self.root_device))

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not compat.distributed_is_initialized():
            return obj
        holder = [obj]
        dist.broadcast_object_list(holder, src)
        return holder[0]

    @override
    def reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Tensor | Any:
        """Reduce a copy of a tensor over the data axis unless another group is given.

        Ranks of the other axes hold the same value; a sum over all ranks would count it again.
        Collective over the group. Values that are no tensors are returned.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        return compat.all_reduce_copy(tensor, group or self.groups.get("data"), reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: ProcessGroup | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather to ``(R, *)`` over the data axis unless another group is given. Collective."""
        if group is None or group is dist.group.WORLD:  # the default of LightningModule.all_gather
            group = self.groups.get("data")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not compat.distributed_is_initialized():
            return decision
        agree = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(agree, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(agree)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks make their own groups and files.
        return {
            **super().__getstate__(),
            "groups": {},
            "_joint_group": None,
            "recorder": NullRecorder(),
        }


def in_order(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Sort axes from the outermost to the innermost.

    Raises:
        ConfigError: There is no data axis, or two axes have the same name.
    """
    ordered = tuple(sorted(axes, key=_position))
    names = [axis.name for axis in ordered]
    if len(set(names)) < len(names) or not any(isinstance(axis, DataAxis) for axis in ordered):
        raise ConfigError(
            f"axes has {', '.join(names) or 'nothing'}, and a mesh has one data axis and at most "
            f"one of each other axis. Add DdpAxis(DdpOptions()), or leave out what is there twice."
        )
    return ordered


def _position(axis: Axis) -> tuple[int, bool]:
    """Return the position of an axis; one that folds another follows it."""
    return AXES.index(axis.folds or axis.name), axis.folds is not None
