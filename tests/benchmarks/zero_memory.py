"""Memory of a rank in every stage: measured, planned, by the papers' formula, and DeepSpeed's.

    python tests/benchmarks/zero_memory.py [--ranks 1 2 4] [--precision 32 bf16] [--stages 0 1 2 3]
    python tests/benchmarks/zero_memory.py --ranks 2 --width 256 --depth 8    # smoke

DeepSpeed is measured where it is installed, with small buffers; by ``--fp32-sums`` also with
micro-batches added up in fp32, as ours are, and by ``--default-buffers`` with its own buffers. All
figures are bytes per parameter of rank 0:
  formula   of the ZeRO paper: parameters, gradients and Adam's state, whole or shared
  planned   ``boltmesh plan``: the formula, shards with their padding, and what is gathered and
            reduced at a time; within 5 % of it is the goal
  peak      the most that was resident in a step, less what was before the model was built
  between   resident between two steps
  tensors   parameters, gradients and optimizer state before the optimizer's step, as telemetry
            counts them
Each tensor is a mapping of its own, or the C library would keep what was freed. The model is many
small blocks, so that what is gathered at a time weighs little; batches are of four rows.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.peers.resident import OWN_MAPPINGS

os.environ.update(OWN_MAPPINGS)  # for the processes of the ranks, which read it when they start

from tests.benchmarks.peers.deepspeed_engine import Sharded, is_installed
from tests.benchmarks.peers.network import count_parameters
from tests.benchmarks.peers.problem import Problem
from tests.benchmarks.peers.weighing import Weights, weigh_deepspeed, weigh_ours
from tests.support.ranks import RankFailure, run_ranks

TIMEOUT_S = 600.0
PLAIN = "DeepSpeed"

FORMULAS = {
    "32": {
        0: lambda n: 16,
        1: lambda n: 8 + 8 / n,
        2: lambda n: 4 + 12 / n,
        3: lambda n: 16 / n,
    },
    "bf16": {
        0: lambda n: 16,
        1: lambda n: 4 + 12 / n,
        2: lambda n: 2 + 14 / n,
        3: lambda n: 16 / n,
    },
}


def main() -> None:
    options = parse_options()
    has_deepspeed = is_installed()
    if not has_deepspeed:
        print("DeepSpeed is not here (pip install deepspeed): only ours.")
    numel = count_parameters(options.width, options.depth)
    print(
        f"{numel / 1e6:.1f} million parameters in {options.depth} blocks, "
        f"{options.accumulate} micro-batches a step; bytes per parameter"
    )
    print(
        f"{'':18}{'formula':>9}{'planned':>9}{'peak':>9}{'of planned':>12}{'of formula':>12}"
        f"{'between':>9}{'tensors':>9}{'DeepSpeed: peak':>17}{'between':>9}"
        + "".join(f"{name:>13}" for name in peers_of(options) if name != PLAIN)
    )
    for precision in options.precision:
        for ranks in options.ranks:
            for stage in options.stages:
                compare(precision, ranks, stage, options, has_deepspeed=has_deepspeed)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--precision", nargs="+", choices=("32", "bf16"), default=["32", "bf16"])
    parser.add_argument("--width", type=int, default=512, help="8 x width^2 parameters a block")
    parser.add_argument("--depth", type=int, default=32, help="blocks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches")
    parser.add_argument("--fp32-sums", action="store_true")
    parser.add_argument("--default-buffers", action="store_true")
    return parser.parse_args()


def peers_of(options: argparse.Namespace) -> dict[str, Sharded]:
    """Name the ways to run DeepSpeed that were asked for."""
    peers = {PLAIN: Sharded()}
    if options.fp32_sums:
        peers["sums in fp32"] = Sharded(is_summed_in_fp32=True)
    if options.default_buffers:
        peers["its buffers"] = Sharded(has_small_buffers=False)
    return peers


def compare(
    precision: str, ranks: int, stage: int, options: argparse.Namespace, *, has_deepspeed: bool
) -> None:
    problem = Problem(
        width=options.width,
        depth=options.depth,
        is_bf16=precision == "bf16",
        loss_scale=0.01,
        lr=1e-5,  # so small that bf16's rounding does not decide where a deep network goes
    )
    numel = problem.num_parameters
    arguments = (stage, problem, options.accumulate)
    ours: Weights = run_ranks(weigh_ours, ranks, *arguments, timeout_s=TIMEOUT_S)[0]
    assert ours.planned is not None
    formula = FORMULAS[precision][stage](ranks)
    planned = ours.planned.peak.host / numel
    peak = ours.peak / numel
    line = (
        f"{precision:>4} N={ranks} stage {stage}  {formula:9.2f}{planned:9.2f}{peak:9.2f}"
        f"{peak / planned:12.3f}{peak / formula:12.3f}{ours.between / numel:9.2f}"
        f"{sum(ours.kinds.values()) / numel:9.2f}"
    )
    if has_deepspeed:
        for name, setting in peers_of(options).items():
            line += weigh_peer(name, setting, ranks, *arguments, ours)
    print(line, flush=True)


def weigh_peer(
    name: str,
    setting: Sharded,
    ranks: int,
    stage: int,
    problem: Problem,
    accumulate: int,
    ours: Weights,
) -> str:
    """Measure DeepSpeed, and return its part of the line."""
    if setting.is_summed_in_fp32 and not problem.is_bf16:
        return f"{'the same':>13}"
    arguments = (stage, problem, accumulate, setting)
    try:
        its = run_ranks(weigh_deepspeed, ranks, *arguments, timeout_s=TIMEOUT_S)[0]
    except RankFailure as failure:
        return f"  failed: {str(failure).strip().splitlines()[-1]}"
    check_losses(ours, its, problem)
    numel = problem.num_parameters
    if name == PLAIN:
        return f"{its.peak / numel:17.2f}{its.between / numel:9.2f}"
    return f"{its.peak / numel:13.2f}"


def check_losses(ours: Weights, its: Weights, problem: Problem) -> None:
    for number, (mine, other) in enumerate(zip(ours.losses, its.losses, strict=True)):
        if abs(mine / other - 1) > (2e-2 if problem.is_bf16 else 1e-4):
            print(f"losses differ in micro-batch {number}: {mine:.6f} and {other:.6f}")
            break


if __name__ == "__main__":
    main()
