"""What tensor parallelism would divide, before a rank is started.

``boltmesh plan`` and ``boltmesh fit --dry-run`` print it. What a run does beside that is to prove
the plan: it runs a batch both ways and compares.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from boltmesh.errors import ConfigError
from boltmesh.plan_text import size_text
from boltmesh.strategies.tensor.plan_table import write_plan

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from boltmesh.tensor_model import TensorSummary

TENSOR = "bolt_tensor"


def plan_tensor(
    config: "DictConfig", ranks_per_host: int, given: Mapping[str, Any], *, source: str
) -> "TensorSummary":
    """Find what a config's model gives each rank.

    Args:
        config: The whole.
        ranks_per_host: A layer is divided within one.
        given: Of the strategy's section.
        source: The config's file, for errors.

    Raises:
        ConfigError: When model or data cannot be built, or options do not fit.
    """
    from boltmesh.tensor_model import describe_division

    size = given.get("size") or ranks_per_host
    if ranks_per_host % size:
        raise ConfigError(
            f"{source}: strategy.size={size} does not divide the {ranks_per_host} ranks of a host, "
            f"and the ranks of a layer are on one host. Set strategy.size=null, or plan for other "
            f"ranks with --devices."
        )
    return describe_division(config, size, given, source=source)


def write_tensor(summary: "TensorSummary") -> str:
    """The plan as a table, and what it saves."""
    size = summary.plan.size
    kept = f"{size_text(summary.rank_bytes)} of {size_text(summary.whole_bytes)}"
    return "\n".join(
        [
            f"{summary.model} over {size} ranks: each keeps {kept} of parameters",
            "",
            write_plan(summary.plan),
            "",
            "A run proves this plan on a batch before its first step, and runs whole what fails.",
            *(f"{each}." for each in summary.notes),
        ]
    )
