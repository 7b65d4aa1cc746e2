"""A step on three axes beside torch's own parts put together by hand.

    python tests/benchmarks/threed_step.py [--mesh 2 2 2] [--rounds 4] [--steps 5] [--width 512]
    python tests/benchmarks/threed_step.py --mesh 2 2 1     # data x pipeline, 4 ranks
    python tests/benchmarks/threed_step.py --mesh 1 2 2     # pipeline x tensor, 4 ranks

``Parallel3DStrategy`` under the Trainer, on the unmodified transformer, with telemetry and without,
beside ``fully_shard``, ``parallelize_module`` and ``Schedule1F1B`` in a bare loop
(``peers/torch_3d.py``): ZeRO's stage 1, 1F1B, AdamW and clipping in both, in the same processes, in
turn. Losses and norms of the first steps are compared with one process, and those of all rounds
with each other, before anything is printed.

A round's figures are the first rank's median step, and the CPU time of a step, of all threads of
all ranks together. Where ranks are more than cores it is the CPU time that makes the step, and it
is the figure that means something on a machine that others use.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import MeshLayout, Parallel3DStrategy
from tests.benchmarks.peers.boltmesh_engine import silence
from tests.benchmarks.peers.stepping import take_turns
from tests.benchmarks.peers.torch_3d import HandWritten
from tests.benchmarks.peers.transformer import Transformer, build, cross_entropy
from tests.support.ranks import run_ranks

SKIPPED = 2
"""First steps of a round, in which caches fill."""
CHECKED = 3
"""Steps that are compared with one process."""
LEARNING_RATE, MAX_NORM = 1e-3, 0.5

Numbers = list[tuple[float, float]]
"""The loss of this rank's rows, NaN where it is not known, and the norm of all gradients."""


@dataclass(frozen=True)
class Job:
    """What everybody trains."""

    layout: MeshLayout
    width: int
    blocks: int
    rows: int
    """Of a data rank in a step."""
    tokens: int
    words: int
    microbatches: int
    steps: int
    """Of a round."""

    def model(self) -> Transformer:
        return build(self.width, layers=self.blocks, words=self.words, heads=8)

    def loader(self, data_rank: int) -> DataLoader[Any]:
        source = torch.Generator().manual_seed(data_rank)
        shape = (self.steps * self.rows, self.tokens)
        rows = (torch.randint(self.words, shape, generator=source) for _ in range(2))
        return DataLoader(TensorDataset(*rows), self.rows)


@dataclass
class Turn:
    """What one round of one side gave on this rank."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Of this process, at the same moments."""
    numbers: Numbers = field(default_factory=list)

    def read_clocks(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def step_s(self) -> float:
        steps = [after - before for before, after in itertools.pairwise(self.wall)]
        return statistics.median(steps[SKIPPED:])

    def cpu_s(self) -> float:
        behind = self.cpu[SKIPPED:]
        return (behind[-1] - behind[0]) / (len(behind) - 1)


class Network(LightningModule):
    """As its author wrote it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return cross_entropy(self.model(tokens), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)


class Notes(Callback):
    """Reads the clocks where a batch begins, and notes what it gave."""

    reads_gradients = False

    def __init__(self) -> None:
        self.turn = Turn()
        self.has_norms = False

    def on_train_batch_start(self, *args: Any) -> None:
        self.turn.read_clocks()

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if self.has_norms:
            assert isinstance(trainer.strategy, Parallel3DStrategy)
            norm = trainer.strategy.gradient_norm(trainer.optimizers[0])
            assert norm is not None
            self.turn.numbers.append((float("nan"), norm))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        norm = self.turn.numbers.pop()[1] if self.has_norms else float("nan")
        self.turn.numbers.append((outputs["loss"].item(), norm))

    def on_train_end(self, *args: Any) -> None:
        self.turn.read_clocks()


class Ours:
    """Runs of one Trainer, an epoch each."""

    def __init__(self, job: Job, data_rank: int, *, telemetry: bool) -> None:
        axes: dict[str, Any] = dict(job.layout.sizes)
        strategy = Parallel3DStrategy(microbatches=job.microbatches, telemetry=telemetry, **axes)
        self._network, self._loader, self._notes = Network(job), job.loader(data_rank), Notes()
        self._trainer = Trainer(
            accelerator="cpu", devices=job.layout.world_size, strategy=strategy, max_epochs=0,
            gradient_clip_val=MAX_NORM, logger=False, callbacks=[self._notes],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip

    def run(self, *, has_norms: bool = False) -> Turn:
        self._notes.turn, self._notes.has_norms = Turn(), has_norms
        assert self._trainer.fit_loop.max_epochs is not None
        self._trainer.fit_loop.max_epochs += 1
        self._trainer.fit(self._network, self._loader)
        return self._notes.turn


class Theirs:
    """A bare loop over the same rows."""

    def __init__(self, job: Job, data_rank: int) -> None:
        self._steps = HandWritten(
            job.model(), job.layout, microbatches=job.microbatches, max_norm=MAX_NORM,
            learning_rate=LEARNING_RATE,
        )  # fmt: skip
        self._loader = job.loader(data_rank)

    def run(self, *, has_norms: bool = False) -> Turn:
        turn = Turn()
        self._steps.restart()
        for tokens, targets in self._loader:
            turn.read_clocks()
            loss = self._steps.step(tokens, targets)
            norm = self._steps.norm.item() if has_norms else float("nan")
            turn.numbers.append((float("nan") if loss is None else loss.item(), norm))
        turn.read_clocks()
        return turn


def one_process(job: Job) -> Numbers:
    """The whole model on the rows of all data ranks together."""
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    numbers = []
    loaders = [job.loader(data_rank) for data_rank in range(job.layout.data)]
    for parts in itertools.islice(zip(*loaders, strict=True), CHECKED):
        optimizer.zero_grad()
        losses = [cross_entropy(model(tokens), targets) for tokens, targets in parts]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        numbers.append((loss.item(), norm.item()))
    return numbers


Result = tuple[dict[str, list[Turn]], Numbers]


def measure(rank: int, world_size: int, rounds: int, job: Job) -> Result:
    silence()
    data_rank = job.layout.coordinates(rank)["data"]
    runs: dict[str, Callable[..., Turn]] = {
        "boltmesh": Ours(job, data_rank, telemetry=True).run,
        "boltmesh, telemetry off": Ours(job, data_rank, telemetry=False).run,
        "torch": Theirs(job, data_rank).run,
    }
    turns = {name: [run(has_norms=True)] for name, run in runs.items()}
    for names in take_turns(list(runs), rounds):
        for name in names:
            dist.barrier()
            turns[name].append(runs[name]())
    return turns, one_process(job) if rank == 0 else []


def whole_numbers(ranks: Sequence[Sequence[Turn]], job: Job, turn: int) -> Numbers:
    """Return the loss of all data ranks together, and the norm that all ranks found."""
    numbers = [each[turn].numbers for each in ranks]
    last = job.layout.pipeline - 1
    means = []
    for step in range(job.steps):
        losses = [
            numbers[job.layout.rank_at(pipeline=last, data=data)][step][0]
            for data in range(job.layout.data)
        ]
        means.append((statistics.mean(losses), numbers[0][step][1]))
    return means


def compare(sides: Mapping[str, Sequence[Sequence[Turn]]], wanted: Numbers, job: Job) -> None:
    """Refuse to compare times of what does not compute the same.

    One process finds norms by torch's own sum, which is off by a part in ten thousand of a large
    gradient; and Adam makes a step of its own of a gradient that is nothing but rounding.
    """
    for turn in range(len(next(iter(sides.values()))[0])):
        known = torch.tensor(whole_numbers(sides["torch"], job, turn))
        for name, ranks in sides.items():
            found = torch.tensor(whole_numbers(ranks, job, turn))
            torch.testing.assert_close(
                found, known, rtol=2e-3, atol=0.0, equal_nan=True,
                msg=partial(said_of, f"{name}, round {turn}"),
            )  # fmt: skip
            if turn == 0:
                torch.testing.assert_close(
                    found[:CHECKED], torch.tensor(wanted), rtol=5e-4, atol=0.0,
                    msg=partial(said_of, f"{name} and one process"),
                )  # fmt: skip


def said_of(what: str, text: str) -> str:
    return f"{what}: {text}"


def print_figures(sides: Mapping[str, Sequence[Sequence[Turn]]]) -> None:
    """Print medians over the rounds, and the medians of the rounds' ratios to torch."""
    wall = {name: [each.step_s() for each in ranks[0][1:]] for name, ranks in sides.items()}
    cpu = {
        name: [sum(each.cpu_s() for each in turn) for turn in list(zip(*ranks, strict=True))[1:]]
        for name, ranks in sides.items()
    }
    for name in sides:
        line = f"  {name:<24}"
        for kind, clock in (("wall", wall), ("CPU of all ranks", cpu)):
            ratios = sorted(a / b for a, b in zip(clock[name], clock["torch"], strict=True))
            line += (f"   {kind} {1e3 * statistics.median(clock[name]):8.1f} ms"
                     f"  {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )  # fmt: skip
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=int, nargs=3, default=(2, 2, 2), metavar=("DATA", "PIPELINE",
                        "TENSOR"))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help=f"the first {SKIPPED} do not count")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="of a data rank, in a step")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    options = vars(parser.parse_args())
    rounds, (data, pipeline, tensor) = options.pop("rounds"), options.pop("mesh")
    if pipeline < 2:
        parser.error("what is measured here has a pipeline; see tensor_step.py and zero_step.py")
    job = Job(MeshLayout(data=data, pipeline=pipeline, tensor=tensor), **options)
    results = run_ranks(measure, job.layout.world_size, rounds, job, timeout_s=1800.0)
    sides = {name: [turns[name] for turns, _ in results] for name in results[0][0]}
    compare(sides, results[0][1], job)
    print(f"{job.layout}, {job.blocks} blocks of width {job.width}, {job.microbatches} "
          f"microbatches of {job.rows // job.microbatches} x {job.tokens} tokens, {rounds} rounds "
          f"of {job.steps} steps; losses and norms are one process's")  # fmt: skip
    print_figures(sides)


if __name__ == "__main__":
    main()
