"""``boltmesh plan auto``: the best layouts of a model on a cluster, with reasons."""

import json

from boltmesh.errors import ConfigError
from boltmesh.planner.machine import accelerator_named, build_cluster, parse_network
from boltmesh.planner.report import as_data, report_lines
from boltmesh.planner.search import search
from boltmesh.planner.transformer import transformer_named

TOKENS = 2**22
"""Tokens of a step where no batch is given, as large models are trained with."""
DTYPES = ("bf16", "fp8", "fp4")


def plan_auto(
    *,
    model: str,
    gpu: str,
    devices: int,
    nodes: int | None,
    network: str | None,
    batch: int | None,
    seq: int | None,
    dtype: str,
    count: int,
    as_json: bool,
) -> int:
    """Print the best layouts; return the exit code, 1 if none fits.

    Raises:
        ConfigError: For a name that is not known, and sizes that contradict each other.
    """
    sizes = transformer_named(model, seq=seq)
    accelerator = accelerator_named(gpu)
    if dtype not in accelerator.flops:
        raise ConfigError(
            f"--dtype {dtype}: {accelerator.name} has no matrix products in {dtype}. "
            f"Use {' or '.join(accelerator.flops)}."
        )
    rate = None if network is None else parse_network(network)
    cluster = build_cluster(accelerator, num_devices=devices, num_nodes=nodes, network_rate=rate)
    if batch is None:
        batch = devices * max(1, round(TOKENS / sizes.seq / devices))
    found = search(sizes, cluster, sequences=batch, dtype=dtype)
    if not found.num_layouts:
        raise ConfigError(
            f"--batch {batch} is divided by no layout of {devices} devices: every replica gets the "
            f"same number of sequences. Use a multiple of {devices}."
        )
    print(json.dumps(as_data(found, count)) if as_json else "\n".join(report_lines(found, count)))
    return 0 if found.candidates else 1
