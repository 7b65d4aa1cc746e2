"""The ranks of a mesh: where each stands, how they start, and what they ask each other.

Nothing here knows of a model; the engine puts one on the mesh.
"""

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from typing_extensions import override

from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.engine.checkpointing import CheckpointingStrategy
from boltmesh.strategies.lightning_compat.launchers import MultiProcessingLauncher, ScriptLauncher
from boltmesh.strategies.mesh import AXES, MeshLayout
from boltmesh.strategies.topology.gather import gather_topology
from boltmesh.strategies.topology.slow_links import find_slow_groups
from boltmesh.strategies.torch_compat.communication import device_index

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class RankMeshStrategy(CheckpointingStrategy):
    """Starts ranks, gives each its place on the axes, and lets them talk.

    Args:
        pipeline: Size of the pipeline axis.
        tensor: Size of the tensor axis. The data axis takes the ranks that are left.
        timeout_s: How long a collective may take before the run ends with an error, seconds.
        process_group_backend: ``gloo`` or ``nccl``; by default the one that fits the device.
        start_method: How ranks of this host are started, see ``MeshStrategy``.
        accelerator: As in any Lightning strategy, like the arguments below.
        parallel_devices: The devices of this host's ranks.
        cluster_environment: Tells ranks and addresses.
        precision_plugin: Set by ``Trainer(precision=...)``.
    """

    def __init__(
        self,
        *,
        pipeline: int,
        tensor: int,
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
        self.timeout_s = timeout_s
        self.groups: dict[str, ProcessGroup] = {}
        self._pipeline, self._tensor = pipeline, tensor
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._start_method = start_method

    # Where this rank stands.

    is_distributed = True
    """Read by the Trainer, which otherwise would give every rank the same data."""

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
    def num_nodes(self) -> int:
        """Set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

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
            LayoutError: When they do not divide the number of ranks.
        """
        return self.layout_of(self.num_nodes * self.num_processes)

    def layout_of(self, world_size: int) -> MeshLayout:
        """Return what the sizes of the axes would be in a job of so many ranks.

        Raises:
            LayoutError: When they do not divide the number of ranks.
        """
        return MeshLayout.fill_data(
            world_size=world_size, pipeline=self._pipeline, tensor=self._tensor
        )

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return self.layout.coordinates(self.global_rank)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.layout.data, "rank": self.coordinates["data"]}

    def set_world_ranks(self) -> None:
        """Called by the Trainer once ranks are known, and again after the ranks were started."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # Some environments ignore the setters, so what they say afterwards counts.
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
        super().setup_environment()
        self._reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        compat.init_process_group(
            self.cluster_environment,
            self.process_group_backend,
            timeout=self.timeout,
            device_id=None if device.type == "cpu" else device,
        )
        if not self.groups:
            self.groups = self._build_groups()
            self._check_placement()

    def near_groups(self) -> dict[str, list[list[int]]]:
        """Return, by kind, the groups whose ranks should be near each other.

        Those come first that move most. Of one axis alone there are none: its group is the job.
        """
        sizes = self.layout.sizes
        if sum(size > 1 for size in sizes.values()) < 2 and sizes["tensor"] == 1:
            return {}
        # A pipeline hands on what one rank computes, to one other: it can lie farthest apart.
        return {axis: self.layout.groups(axis) for axis in ("tensor", "data") if sizes[axis] > 1}

    def _check_placement(self) -> None:
        """Warn of groups that a slow link holds up though a faster one is there. Collective."""
        groups = self.near_groups()
        if not groups:
            return
        topology = gather_topology(self.root_device)
        if self.global_rank == 0:
            for text in find_slow_groups(topology, groups):
                warnings.warn(f"Rank placement: {text}", stacklevel=2)

    def _reset_seed(self) -> None:
        """Begin the random numbers anew on every rank, after the model was built."""
        compat.reset_seed()

    def _build_groups(self) -> dict[str, ProcessGroup]:
        """One group per axis, never the default one: the default's traffic is nobody's axis.

        Collective over all ranks.
        """
        groups = {}
        for axis in AXES:
            if self._asks_group(axis):
                group = self.new_group(axis)
                assert group is not None
                groups[axis] = group
        return groups

    def _asks_group(self, axis: str) -> bool:
        """Whether there is something to do along an axis, if only by one rank."""
        return axis == "data" or self.layout.sizes[axis] > 1

    def new_group(
        self,
        axis: str,
        members: Sequence[int] | None = None,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> ProcessGroup | None:
        """Return one more group along an axis, beside those of the other ranks.

        Collective over all ranks: each group of the axis gets one of its own at the same time.

        Args:
            axis: Along which its ranks lie.
            members: Places on the axis of those that are in it; None: all.
            backend: None: as the other groups.
            timeout: How long its collectives may take; None: as of the other groups.

        Returns:
            The one that this rank is in, None where it is in none.
        """
        chosen = [
            [ranks[each] for each in (range(len(ranks)) if members is None else members)]
            for ranks in self.layout.groups(axis)
        ]
        group: ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            chosen, timeout=timeout or self.timeout, backend=backend, group_desc=axis
        )
        return group

    # Collectives.

    @override
    def _meet(self) -> None:
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
        """Reduce over the data axis unless another group is given.

        Ranks of the other axes hold the same value; over all ranks a sum would count it again.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        return compat.all_reduce_copy(tensor, group or self.groups.get("data"), reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: ProcessGroup | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the data axis unless another group is given: others hold the same."""
        if group is None or group is dist.group.WORLD:  # which a module asks for by default
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
        # Spawned ranks make their own groups.
        return {**super().__getstate__(), "groups": {}}
