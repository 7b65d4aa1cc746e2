"""Number of ranks of a config, their devices, and the launcher that started them.

Imports torch only where a driver of GPUs is loaded.
"""

import os
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from boltmesh.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Launcher:
    """The launcher that started this process as one rank of several."""

    name: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    """Ranks of this host, if the launcher sets them."""


@dataclass(frozen=True)
class Placement:
    """Devices and ranks of this host."""

    accelerator: Literal["cpu", "cuda"]
    devices: int | list[int]
    """Argument of the Trainer: a number of ranks, or the CUDA devices of the ranks."""
    num_nodes: int
    launcher: Launcher | None

    @property
    def num_local_ranks(self) -> int:
        """Ranks of this host."""
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_local_ranks * self.num_nodes


def place_ranks(config: "DictConfig") -> Placement:
    """Choose devices and ranks, and compare them with the ranks that a launcher has started.

    Raises:
        ConfigError: The devices do not exist.
        LayoutError: The config needs another number of ranks than were started.
    """
    launcher = find_launcher(os.environ)
    trainer = config.trainer
    accelerator = _choose_accelerator(trainer.accelerator)
    if accelerator == "cpu":
        devices: int | list[int] = _cpu_ranks(trainer.devices, launcher)
    else:
        devices = _cuda_devices(trainer.devices, count_cuda_devices())
    placement = Placement(accelerator, devices, trainer.num_nodes, launcher)
    if launcher is not None and placement.world_size != launcher.world_size:
        raise LayoutError(_mismatch(placement, launcher))
    if launcher is None and placement.num_nodes > 1:
        ranks = placement.num_local_ranks
        raise LayoutError(
            f"trainer.num_nodes={placement.num_nodes} needs a launcher that starts the ranks of "
            f"every node. Start it with torchrun --nnodes={placement.num_nodes} "
            f"--nproc-per-node={ranks} -m boltmesh, or srun, or set trainer.num_nodes=1."
        )
    return placement


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Recognise torchrun, SLURM and MPI by the variables that they set, as Lightning does."""

    def number(name: str, default: int = 0) -> int:
        return int(environment.get(name, default))

    if "LOCAL_RANK" in environment and "RANK" in environment and "WORLD_SIZE" in environment:
        return Launcher(
            "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "the launcher",
            number("RANK"),
            number("LOCAL_RANK"),
            number("WORLD_SIZE"),
            number("LOCAL_WORLD_SIZE") or None,
        )
    interactive = environment.get("SLURM_JOB_NAME") in {"bash", "interactive"}
    if "SLURM_NTASKS" in environment and "SLURM_PROCID" in environment and not interactive:
        return Launcher(
            "srun",
            number("SLURM_PROCID"),
            number("SLURM_LOCALID"),
            number("SLURM_NTASKS"),
            number("SLURM_NTASKS_PER_NODE") or None,
        )
    if number("OMPI_COMM_WORLD_SIZE", 1) > 1:
        if find_spec("mpi4py") is None:
            raise ConfigError(
                "mpirun has started this process, and joining the others needs mpi4py. "
                "Run: pip install mpi4py"
            )
        return Launcher(
            "mpirun",
            number("OMPI_COMM_WORLD_RANK"),
            number("OMPI_COMM_WORLD_LOCAL_RANK"),
            number("OMPI_COMM_WORLD_SIZE"),
            number("OMPI_COMM_WORLD_LOCAL_SIZE") or None,
        )
    return None


_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of GPU drivers: NVIDIA's, Windows', and AMD's, whose devices are cuda as well.
NVML says no more, and is missing in some containers."""


def count_cuda_devices() -> int:
    """Return the number of CUDA devices that torch sees here."""
    if not any(map(os.path.exists, _DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count()


def _choose_accelerator(wanted: str) -> Literal["cpu", "cuda"]:
    if wanted == "cpu":
        return "cpu"
    if count_cuda_devices():
        return "cuda"
    if wanted == "auto":
        return "cpu"
    raise ConfigError(
        f"trainer.accelerator={wanted} needs a CUDA device, and torch finds none here. "
        f"Set trainer.accelerator=cpu."
    )


def _cpu_ranks(wanted: Any, launcher: Launcher | None) -> int:
    if wanted == "auto":
        if launcher is None:
            return 1
        return launcher.local_world_size or launcher.world_size
    text = str(wanted)
    if isinstance(wanted, MutableSequence) or not text.isdigit():
        count = len([name for name in text.strip("[]").split(",") if name.strip()]) or 1
        raise ConfigError(
            f"trainer.devices={text} names CUDA devices, but the ranks run on the CPU. "
            f"Set trainer.devices={count}."
        )
    return int(text)


def _cuda_devices(wanted: Any, available: int) -> int | list[int]:
    text = "auto" if wanted == -1 else str(wanted)
    if text in {"auto", "-1"}:
        return available
    if isinstance(wanted, MutableSequence) or "," in text:
        chosen = [int(name) for name in text.strip("[]").split(",") if name.strip()]
        missing = [device for device in chosen if device >= available]
        if missing or len(set(chosen)) < len(chosen):
            raise ConfigError(
                f"trainer.devices={chosen} names CUDA devices that do not exist, or one "
                f"twice; there are 0 to {available - 1}. Set trainer.devices={available}."
            )
        return chosen
    if int(text) > available:
        raise ConfigError(
            f"trainer.devices={text} needs {text} CUDA devices, but there are {available}. "
            f"Set trainer.devices={available}, or trainer.accelerator=cpu."
        )
    return int(text)


def _mismatch(placement: Placement, launcher: Launcher) -> str:
    local = launcher.local_world_size or launcher.world_size
    if launcher.world_size % local:
        local = launcher.world_size
    nodes = launcher.world_size // local
    fitting = f"trainer.devices={local}"
    if nodes != placement.num_nodes:
        fitting += f" trainer.num_nodes={nodes}"
    return (
        f"trainer.devices={placement.num_local_ranks} x trainer.num_nodes={placement.num_nodes} "
        f"needs {_ranks(placement.world_size)}, but {launcher.name} has started "
        f"{_ranks(launcher.world_size)}. Set {fitting}, or start {placement.world_size}."
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
