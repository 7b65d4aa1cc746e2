"""Rates of a machine: measured here, remembered from an earlier run, or by its name.

``boltmesh tune`` writes what it has measured into a file of the user's cache folder, in the form
that ``boltmesh plan --cluster`` reads; later plans for the same ranks begin with it.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from boltmesh.errors import ConfigError
from boltmesh.host_memory import host_memory_bytes
from boltmesh.planner.calibration import Correction, PredictedLayout, default_spread
from boltmesh.planner.layout_memory import CONTEXT_BYTES
from boltmesh.planner.links import LINK_LATENCY
from boltmesh.planner.machine import DISK_BYTES, DISK_RATE, GB, Cluster, more_devices
from boltmesh.planner.rates import default_rates
from boltmesh.strategies.cost_model.step_time import Machine

TIMEOUT_S = 120.0
STEP_MS = 2.0
"""Time of Lightning's loop on a step, unless the steps of a run have been measured."""
OPERATOR_US = 5.0
"""Time in which a GPU's operator is launched."""
SHARE_OF_FP32 = {"highest": 1 / 16, "high": 1 / 2, "medium": 1.0}
"""Rates of products of fp32 over those of bf16, by torch's precision: fp32, TF32, bf16."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Variable of the settings of torch's allocator."""
HOST_GB_S = 100.0
"""Memory of a host with a few channels, as the optimizer's step there uses it."""
NEEDED = ("device_tflops", "memory_gb_s")
"""Rates without which no step can be predicted."""
USUAL_PER_NODE = 8
"""GPUs that a node has at most, unless their kind is known."""
HERE = "here"
"""The cluster of layouts that are measured."""

STACK = log(2)
"""Standard deviation of the error that all layouts share here, as a logarithm: other load of the
machine changes it by more than software does on the clusters of published runs."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a layout that ``boltmesh tune`` has measured."""

    seconds: float
    predicted_s: float
    """Prediction by rates alone."""
    layout: PredictedLayout
    """The prediction at that time."""

    @classmethod
    def of(cls, given: Any, *, source: str) -> "MeasuredStep":
        """Read the steps that ``remember_steps`` has written.

        Raises:
            ConfigError: For anything else, such as a file of an earlier version.
        """
        try:
            layout = {name: tuple(each) for name, each in given["layout"].items()}
            found = cls(
                float(given["seconds"]),
                float(given["predicted_s"]),
                PredictedLayout(HERE, **layout),
            )
            if min(found.seconds, found.predicted_s) > 0:
                return found
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        raise ConfigError(
            f"{source} is of another version. Delete it, and run boltmesh tune again."
        )


@dataclass(frozen=True)
class Hardware:
    """The devices that a plan is for, with their rates."""

    machine: Machine
    ranks_per_node: int
    num_nodes: int
    is_cpu: bool
    name: str
    rates_from: str
    """Where the rates are from, as a sentence."""
    measured: Mapping[str, Mapping[str, MeasuredStep]] = field(default_factory=dict)
    """Steps by layout, for each config that was measured here."""

    cluster: Cluster | None = None
    """The devices that are elsewhere; None: rates were measured."""
    device_limit: Mapping[str, str] = field(default_factory=dict)
    """Environment of a job whose ranks may not take all memory of a GPU."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.ranks_per_node * self.num_nodes

    @property
    def rank_gib(self) -> float:
        """Memory of a rank: that of the host on a CPU, else that of its device."""
        return (self.machine.host_gib if self.is_cpu else self.machine.device_gib) or 0.0

    @property
    def rank_bytes(self) -> int:
        """The same in bytes."""
        return round(self.rank_gib * 2**30)

    def with_rank_gib(self, gib: float) -> "Hardware":
        """Return the same with another memory of a rank."""
        sizes = {"host_gib" if self.is_cpu else "device_gib": gib}
        return replace(self, machine=replace(self.machine, **sizes))  # type: ignore[arg-type]

    @cached_property
    def correction(self) -> Correction:
        """Correction of predicted times by the measured steps of all configs."""
        steps = [each for of_config in self.measured.values() for each in of_config.values()]
        ratios = [(each.layout, each.seconds / each.predicted_s) for each in steps]
        return Correction(ratios, replace(default_spread(), stack=STACK))

    def doubled(self) -> "Hardware | None":
        """Return twice the devices; None where nothing is known of them.

        Links to other nodes are not known of GPUs that are here.
        """
        if self.cluster is None:
            ranks = 2 * self.ranks_per_node
            fits = not self.is_cpu and ranks <= USUAL_PER_NODE
            return replace(self, ranks_per_node=ranks) if fits else None
        cluster = more_devices(self.cluster, 2 * self.num_ranks)
        rate = self.machine.network_gb_s
        if rate is not None:
            rate *= cluster.network_rate / self.cluster.network_rate
        return replace(
            self,
            machine=replace(self.machine, network_gb_s=rate),
            ranks_per_node=cluster.devices_per_node,
            num_nodes=cluster.num_nodes,
            cluster=cluster,
        )

    def limited(self, gib: float) -> "Hardware":
        """Return the same with so much memory of a rank, and the limit that holds jobs to it.

        Raises:
            ConfigError: If there is less.
        """
        room = self.rank_gib
        if gib > room:
            raise ConfigError(
                f"--memory {gib:g}: a rank has {room:.3g} GiB here, its share of the machine. "
                f"Write less, or leave it out."
            )
        limit = {} if self.is_cpu else {ALLOCATOR: f"per_process_memory_fraction:{gib / room:.4f}"}
        return replace(self.with_rank_gib(gib), device_limit=limit)


def of_cluster(cluster: Cluster, precision: str, matmul_precision: str) -> Hardware:
    """Return the rates of a cluster from data sheets and published runs.

    Args:
        cluster: Nodes of accelerators from the table.
        precision: The Trainer's.
        matmul_precision: torch's, for fp32 products: ``highest``, or ``high`` for TF32.
    """
    device, rates = cluster.accelerator, default_rates()
    share = 1.0 if "16" in precision else SHARE_OF_FP32[matmul_precision]
    machine = Machine(
        device_gib=(device.memory_bytes - CONTEXT_BYTES) / 2**30,
        host_gib=device.host_bytes / 2**30,
        disk_gib=DISK_BYTES / 2**30,
        disk_read_gb_s=DISK_RATE / GB,
        disk_write_gb_s=DISK_RATE / GB,
        device_tflops=device.matmul_rate("bf16") * share * rates.matmul / 1e12,
        network_gb_s=cluster.network_rate * rates.network / GB,
        link_gb_s=device.link_rate / GB,
        collective_us=LINK_LATENCY * 1e6,
        bus_gb_s=device.host_rate / GB,
        host_gb_s=HOST_GB_S,
        memory_gb_s=device.memory_rate / GB,
        operator_us=OPERATOR_US,
        step_ms=STEP_MS,
    )
    rates_from = f"rates of {device.name}: data sheet, and shares that published runs reach"
    return Hardware(
        machine,
        cluster.devices_per_node,
        cluster.num_nodes,
        False,
        device.name,
        rates_from,
        cluster=cluster,
    )


def of_this_machine(
    accelerator: str, num_ranks: int, precision: str, disk: str, *, again: bool = False
) -> Hardware:
    """Return the rates of the devices that are here: remembered ones, else measured now.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        num_ranks: Ranks of this machine.
        precision: The Trainer's.
        disk: A folder on the disk for what is offloaded.
        again: Measure although there are remembered rates.
    """
    path = None if again else known_file(accelerator, num_ranks, precision)
    name = f"{num_ranks} {'CPU ranks' if accelerator == 'cpu' else 'CUDA devices'} of this machine"
    machine = None if path is None else read_rates(path)
    if machine is not None:
        rates_from = f"rates of this machine: remembered by boltmesh tune in {path}"
    else:
        machine = measure_here(accelerator, num_ranks, precision, disk)
        rates_from = (
            "rates of this machine: measured just now, all ranks at once, in a few seconds; "
            "boltmesh tune measures whole steps"
        )
    machine = replace(machine, **_memory(accelerator, num_ranks, disk))
    measured = {} if path is None else read_steps(steps_file(path))
    return Hardware(machine, num_ranks, 1, accelerator == "cpu", name, rates_from, measured)


def measure_here(accelerator: str, num_ranks: int, precision: str, disk: str) -> Machine:
    """Run the ranks of ``microbenchmark`` and return their mean rates.

    Raises:
        ConfigError: If they cannot be started, or take too long.
    """
    dtype = "bfloat16" if "16" in precision and accelerator != "cpu" else "float32"
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // num_ranks))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    program = [sys.executable, "-m", "boltmesh.advisor.microbenchmark"]
    with tempfile.TemporaryDirectory(prefix="boltmesh-rates-") as folder:
        ranks = [
            subprocess.Popen(  # noqa: S603 - a module of this very package
                [*program, folder, disk, str(rank), str(num_ranks), accelerator, dtype],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            said = [each.communicate(timeout=TIMEOUT_S) for each in ranks]
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"The rates of this machine could not be measured in {TIMEOUT_S:.0f} s. Try again "
                f"when it has less to do, or plan with --gpu NAME --devices N."
            ) from None
        finally:
            for each in ranks:
                if each.poll() is None:
                    each.kill()
    if any(each.returncode for each in ranks):
        error = next(err for each, (_, err) in zip(ranks, said, strict=True) if each.returncode)
        last = (error.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"The rates of this machine could not be measured: {last}")
    rates = json.loads(said[0][0].strip().splitlines()[-1])
    shared = num_ranks / cores if accelerator == "cpu" and num_ranks > cores else None
    return replace(
        Machine.of(rates, source="boltmesh.advisor.microbenchmark"),
        **_links(rates.get("allreduce_s"), num_ranks),
        ranks_per_core=shared,
        step_ms=STEP_MS,
    )


def _links(table: Mapping[str, Mapping[str, float]] | None, num_ranks: int) -> dict[str, Any]:
    """Return latency and rate of a collective of all ranks, from the all-reduces."""
    if table is None:
        return {}
    seconds = {int(size): each for size, each in table[str(num_ranks)].items()}
    least, most = min(seconds), max(seconds)
    sent = 2 * (num_ranks - 1) / num_ranks * most
    moving = max(seconds[most] - seconds[least], seconds[most] / 10)
    return {"collective_us": seconds[least] * 1e6, "network_gb_s": sent / moving / GB}


def _memory(accelerator: str, num_ranks: int, disk: str) -> dict[str, Any]:
    """Return the memory and the part of a disk that each rank may take, in GiB."""
    found = {"host_gib": host_memory_bytes(), "disk_gib": shutil.disk_usage(disk).free}
    sizes = {name: size / num_ranks / 2**30 for name, size in found.items()}
    if accelerator == "cpu":
        return sizes
    import torch

    device = torch.cuda.get_device_properties(0).total_memory - CONTEXT_BYTES
    return {**sizes, "device_gib": device / 2**30}


def rates_file(accelerator: str, num_ranks: int, precision: str) -> Path:
    """Return the path of the rates of ``num_ranks`` ranks of this machine.

    Raises:
        ConfigError: For a user without a home folder.
    """
    try:
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "Rates of a machine are kept in the home folder of the user, who has none here. Set "
            "XDG_CACHE_HOME to a folder for them."
        ) from None
    kind = "16" if "16" in precision else "32"
    name = f"{platform.node() or 'machine'}-{accelerator}-{num_ranks}-{kind}.yaml"
    return Path(folder) / "boltmesh" / "rates" / name


def known_file(accelerator: str, num_ranks: int, precision: str) -> Path | None:
    """Return the same; None without a home folder: then nothing is remembered."""
    try:
        return rates_file(accelerator, num_ranks, precision)
    except ConfigError:
        return None


def read_rates(path: Path) -> Machine | None:
    """Return remembered rates; None where there are none.

    Raises:
        ConfigError: For a file that has something else, or not all that a prediction needs.
    """
    content = _read(path)
    if content is None:
        return None
    # Earlier versions kept one factor on all times.
    rates = {key: each for key, each in content.items() if key != "calibration"}
    found = Machine.of(rates, source=str(path))
    if lacking := [each for each in NEEDED if getattr(found, each) is None]:
        raise ConfigError(f"{path} lacks {lacking[0]}. Delete it, and run boltmesh tune again.")
    return found


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Delete it.") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds no rates. Delete it, and run boltmesh tune again.")
    return content


def steps_file(path: Path) -> Path:
    """Return the path of the steps that were measured beside the rates in ``path``."""
    return path.with_suffix(".steps.yaml")


def read_steps(path: Path) -> dict[str, dict[str, MeasuredStep]]:
    """Return remembered steps by layout, for each config.

    Raises:
        ConfigError: For a file that has something else.
    """
    return {
        str(config): {
            str(layout): MeasuredStep.of(each, source=str(path))
            for layout, each in (steps.items() if isinstance(steps, Mapping) else [("", None)])
        }
        for config, steps in (_read(path) or {}).items()
    }


def remember_steps(config: str, steps: Mapping[str, MeasuredStep], path: Path) -> None:
    """Write the steps of a config by layout; those of other configs stay.

    Args:
        config: Its ``key_of``.
        steps: Measured steps by the layout in words.
        path: The file of the rates.
    """
    path = steps_file(path)
    try:
        known = read_steps(path)
    except ConfigError:
        known = {}  # of another version: it has just been measured again
    written = {
        name: {layout: _as_data(each) for layout, each in of_config.items()}
        for name, of_config in {**known, config: steps}.items()
    }
    _write(path, "# Measured by `boltmesh tune`: steps by config and layout.\n", written)


def _as_data(step: MeasuredStep) -> dict[str, Any]:
    layout = {name: list(each) for name, each in asdict(step.layout).items() if name != "place"}
    return {"seconds": step.seconds, "predicted_s": step.predicted_s, "layout": layout}


def key_of(config: Any) -> str:
    """Return a key of a config's model, data, strategy and Trainer."""
    parts = {name: value for name, value in config.items() if name != "run"}
    text = OmegaConf.to_yaml(OmegaConf.create(parts), resolve=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def remember(machine: Machine, path: Path) -> None:
    """Write the rates of a machine for later plans."""
    known: dict[str, Any] = {
        each.name: getattr(machine, each.name)
        for each in fields(machine)
        if getattr(machine, each.name) is not None and not each.name.endswith("_gib")
    }
    _write(
        path, "# Measured by `boltmesh tune`, read by `boltmesh plan auto` and --cluster.\n", known
    )


def _write(path: Path, about: str, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(about + yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
    os.replace(partial, path)
