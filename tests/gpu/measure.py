"""One measurement of the campaign, in its own process: ``python -m tests.gpu.measure``.

Reads a line of JSON with ``name``, ``arguments`` and ``environment``, and prints one. What fails
ends this process alone.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from boltmesh import strategies
from boltmesh.strategies.mesh import AXES
from boltmesh.strategies.offload.disk.preflight import DiskLoad, measure_disk
from boltmesh.strategies.offload.disk.swap_file import Swap
from boltmesh.strategies.parameter_access import gathered_parameters
from boltmesh.strategies.topology.devices import near_cores
from boltmesh.telemetry.reader.reader import open_job
from tests.benchmarks.peers.transformer import Transformer
from tests.support.expert_models import Mixture

DENSE_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""bf16, without sparsity."""


class Tokens(Dataset[Tensor]):
    """Texts drawn by their number; the same for every strategy."""

    def __init__(self, words: int, length: int, count: int) -> None:
        self.words, self.length, self.count = words, length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(self.words, (self.length + 1,), generator=generator)


class Language(LightningModule):
    """A GPT of given sizes, trained by AdamW or SGD on texts in their order."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.sizes = arguments, arguments["sizes"]
        self.optimizer_name = arguments.get("optimizer", "adamw")
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            # Else Lightning would draw on the device, and a deferred construction on the host.
            on_host = self.arguments.get("on_host") or not on_gpu()
            with torch.device("cpu") if on_host else torch.device("cuda", 0):
                self.model = transformer(self.sizes)

    def train_dataloader(self) -> DataLoader[Tensor]:
        # Lightning's own sampler would shuffle, in one process it would not.
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        ranks = ranks or {"num_replicas": 1, "rank": 0}
        batch = self.arguments["batch"]
        count = batch * self.arguments["steps"] * ranks["num_replicas"]
        data = Tokens(self.sizes["words"], self.arguments["length"], count)
        sampler: DistributedSampler[Tensor] = DistributedSampler(data, shuffle=False, **ranks)
        return DataLoader(data, batch_size=batch, sampler=sampler)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def transformer(sizes: dict[str, int]) -> Transformer:
    """Return a GPT, whose blocks have a mixture of experts if ``experts`` says how many."""
    dims = dict(sizes)
    num_experts = dims.pop("experts", 0)
    model = Transformer(**dims)
    for block in model.blocks if num_experts else ():
        block.up, block.down = nn.Identity(), Mixture(dims["width"], num_experts, 2)
    return model


class Timing(Callback):
    """Seconds of each step, losses, the most memory of the device, and graphs compiled so far."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[Tensor] = []
        self.reserved: list[int] = []
        self.graphs: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach())
        self.graphs.append(num_graphs())
        if module.device.type == "cuda":
            torch.cuda.synchronize()
            self.reserved.append(torch.cuda.max_memory_allocated())
        self.ends.append(time.monotonic())

    def step_s(self, skip: int = 3) -> float:
        """Median of the steps behind the first ones."""
        seconds = sorted(b - a for a, b in itertools.pairwise(self.ends[skip - 1 :]))
        return seconds[len(seconds) // 2]


def num_graphs() -> int:
    """How many graphs torch's compiler has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def strategy_of(spec: dict[str, Any], folder: str) -> Any:
    """Return a strategy from its class and arguments; ``"plain"`` is Lightning's."""
    given = dict(spec)
    name = given.pop("name")
    if name == "plain":
        return SingleDeviceStrategy(torch.device("cuda", 0) if on_gpu() else torch.device("cpu"))
    if "offload_path" in given:
        given["offload_path"] = folder
    return getattr(strategies, name)(**given)


def on_gpu() -> bool:
    """Whether the campaign runs on a GPU and not dry."""
    return os.environ.get("BOLTMESH_CAMPAIGN", "cuda") == "cuda"


def trained(arguments: dict[str, Any], **options: Any) -> tuple[Timing, Language, Trainer]:
    """Train a GPT as ``arguments`` say."""
    seed_everything(1, verbose=False)
    timing = Timing()
    with tempfile.TemporaryDirectory(dir=arguments.get("folder")) as folder:
        module = Language(arguments)
        trainer = Trainer(
            accelerator="cuda" if on_gpu() else "cpu",
            strategy=strategy_of(arguments["strategy"], folder), max_steps=arguments["steps"],
            precision=arguments.get("precision", "bf16-mixed"), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, **{"devices": 1, "callbacks": [timing], **options},
        )  # fmt: skip
        trainer.fit(module)
    return timing, module, trainer


def fit(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return speed and memory of a strategy."""
    begin = time.monotonic()
    timing, _, _ = trained(arguments)
    sizes = arguments["sizes"]
    tokens = arguments["batch"] * arguments["length"]
    numel = sizes["layers"] * 12 * sizes["width"] ** 2 + sizes["words"] * sizes["width"]
    seconds = timing.step_s(arguments.get("skip", 3))
    tflops = 6 * numel * tokens / seconds / 1e12
    found = {"step_s": seconds, "tokens_per_s": tokens / seconds, "tflops": tflops}
    found["steps_s"] = [b - a for a, b in itertools.pairwise(timing.ends)]
    found |= {"loss": float(timing.losses[-1]), "first_step_s": timing.ends[0] - begin}
    if arguments["strategy"].get("compile_blocks"):
        found["graphs"] = timing.graphs[-1]
        found["graphs_after_step_3"] = timing.graphs[-1] - timing.graphs[2]
    if on_gpu():
        name = torch.cuda.get_device_name()
        peak = next((each for key, each in DENSE_TFLOPS.items() if key in name), None)
        found["peak_gb"] = timing.reserved[-1] / 1e9
        found["growth_gb"] = (timing.reserved[-1] - timing.reserved[len(timing.ends) // 2]) / 1e9
        if peak is not None:
            found["mfu"] = tflops / peak
    return found


def fsdp2(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the speed of FSDP2 and AdamW, by hand.

    With ``offload`` parameters and the optimizer are on the host, and blocks are recomputed.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    device = torch.device("cuda", 0) if on_gpu() else torch.device("cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu() else "gloo")
    sizes = arguments["sizes"]
    with torch.device(device):
        model = transformer(sizes)
    given: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    if arguments["offload"]:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu())
    for block in model.blocks:
        if arguments["offload"]:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        fully_shard(block, **given)
    fully_shard(model, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = Tokens(sizes["words"], arguments["length"], arguments["batch"] * arguments["steps"])
    ends = []
    for batch in DataLoader(data, batch_size=arguments["batch"]):
        tokens = batch.to(device)
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu():
            torch.cuda.synchronize()
        ends.append(time.monotonic())
    dist.destroy_process_group()
    seconds = sorted(b - a for a, b in itertools.pairwise(ends))
    step_s = seconds[len(seconds) // 2]
    return {"step_s": step_s, "tokens_per_s": arguments["batch"] * arguments["length"] / step_s}


def machine(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the rates of this machine that later parts are judged by."""
    num_bytes = arguments["num_bytes"]
    found: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count()}
    found["disk_free_gb"] = shutil.disk_usage(arguments["folder"]).free / 1e9
    values = [torch.zeros(num_bytes // 4) for _ in range(4)]
    adam = torch.optim.AdamW([torch.nn.Parameter(values[0])], lr=1e-4, fused=True)
    adam.param_groups[0]["params"][0].grad = values[1]
    adam.step()
    found["adam_gb_per_s"] = 7 * num_bytes / timed(adam.step) / 1e9
    found["host_free_gb"] = psutil.virtual_memory().available / 1e9
    swap = Swap(arguments["folder"], num_bytes)
    disk = measure_disk(swap, DiskLoad(0, 0, 0))
    swap.close()
    found |= {
        "disk_is_direct": disk.is_direct,
        "disk_read_gb_per_s": disk.read_rate / 1e9,
        "disk_write_gb_per_s": disk.write_rate / 1e9,
        "disk_both_gb_per_s": disk.both_rate / 1e9,
    }
    if not on_gpu():
        return found
    properties = torch.cuda.get_device_properties(0)
    found["device"], found["memory_gb"] = properties.name, properties.total_memory / 1e9
    found["cores_near"] = len(near_cores(properties))
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        found["nvml_memory_gb"] = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 1e9
    except pynvml.NVMLError as error:
        found["nvml"] = str(error)
    pageable, there = values[2], torch.empty(num_bytes // 4, device="cuda")
    pinned = torch.empty(num_bytes // 4, pin_memory=True)
    for name, one, other in (
        ("h2d_pinned", there, pinned),
        ("d2h_pinned", pinned, there),
        ("h2d_pageable", there, pageable),
    ):
        found[f"{name}_gb_per_s"] = num_bytes / timed(lambda a=one, b=other: a.copy_(b)) / 1e9
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pci.bus_id",
               "--format=csv,noheader"]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    found["nvidia_smi"] = shown.stdout.strip()
    return found


def timed(run: Any) -> float:
    """Seconds of the second of two runs."""
    for _ in range(2):
        begin = time.monotonic()
        run()
        if on_gpu():
            torch.cuda.synchronize()
    return time.monotonic() - begin


def smoke(arguments: dict[str, Any]) -> dict[str, Any]:
    """As one rank of several: one all-reduce, one message to the next rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0) if on_gpu() else torch.device("cpu")
    if on_gpu():
        torch.cuda.set_device(device)
    dist.init_process_group(arguments["backend"])
    value = torch.full((1 << 16,), float(rank + 1), device=device)
    dist.all_reduce(value)
    is_right = bool((value == size * (size + 1) / 2).all())
    there = torch.empty_like(value)
    to, of = (rank + 1) % size, (rank - 1) % size
    messages = [dist.P2POp(dist.isend, value, to), dist.P2POp(dist.irecv, there, of)]
    for each in dist.batch_isend_irecv(messages):
        each.wait()
    is_right = is_right and torch.equal(value, there)
    dist.destroy_process_group()
    return {"is_right": is_right}


def rank(arguments: dict[str, Any]) -> dict[str, Any]:
    """As one rank of several on one GPU: losses, the norms of parameters, and what a step moved."""
    found: dict[str, Any] = {}
    paths: list[Any] = []

    class Ends(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if hasattr(trainer.strategy, "recorder"):
                paths.append(trainer.strategy.recorder.path)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            with gathered_parameters(pl_module) as parameters:
                found["norms"] = [float(each.double().norm()) for each in parameters.values()]

    timing = Timing()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    given = dict(arguments)
    given["batch"] = arguments["batch"] // arguments.get("data", size)
    devices: Any = size
    spec = dict(arguments["strategy"])
    if on_gpu() and size > 1:  # every rank on the one GPU
        spec["parallel_devices"] = [torch.device("cuda", 0)] * size
        spec["process_group_backend"] = arguments["backend"]
        devices = "auto"
    given["strategy"] = spec
    trained(given, callbacks=[timing, Ends()], devices=devices)
    if size > 1:
        dist.barrier()  # all have written what they moved
    moved = [traffic(Path(each)) for each in paths if each is not None]
    found["traffic"] = moved[0] if moved else None
    return {"losses": [float(each) for each in timing.losses], **found}


def traffic(path: Path) -> dict[str, tuple[float, float]]:
    """Return the bytes of a step by axis and operator: expected, and counted.

    Of the ranks that have such a call, the mean: others may have another stage. Without those that
    depend on the batch, as the rows of experts do.
    """
    with open_job(path) as job:
        seen = job.snapshot()
    varying = {(each.axis, each.operator) for each in seen.expected if each.is_mean}
    expected = {(each.axis, each.operator): each.payload_bytes for each in seen.expected}
    counted: dict[tuple[str, str], dict[int, float]] = {}
    for rank in seen.ranks:
        for each in rank.collectives:
            key = each.axis, each.operator
            if each.bytes_per_step and (key in expected or each.axis in AXES):
                of_ranks = counted.setdefault(key, {})
                of_ranks[rank.rank] = of_ranks.get(rank.rank, 0.0) + each.bytes_per_step
    means = {key: sum(each.values()) / len(each) for key, each in counted.items()}
    return {
        " ".join(key): (expected.get(key, 0.0), means.get(key, 0.0))
        for key in {*expected, *means} - varying
    }


MEASUREMENTS = {each.__name__: each for each in (fit, fsdp2, machine, smoke, rank)}


def main() -> None:
    """Run what the input names and print what was found; nothing if there is no input."""
    line = sys.stdin.read()
    if not line:
        return
    asked = json.loads(line)
    os.environ.update(asked["environment"])
    if "OMP_NUM_THREADS" in os.environ:  # read before this process knew it
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    print(json.dumps(MEASUREMENTS[asked["name"]](asked["arguments"])), flush=True)
    sys.stderr.flush()
    os._exit(0)  # to free 100 GB of pinned memory takes a minute


if __name__ == "__main__":
    main()
