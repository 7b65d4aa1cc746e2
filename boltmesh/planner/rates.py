"""The few rates of the step-time model that no data sheet states."""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import yaml  # type: ignore[import-untyped]

DATA = Path(__file__).with_name("rates.yaml")


@dataclass(frozen=True)
class Rates:
    """Shares of a machine's peaks that software reaches, fitted to published runs.

    Attributes:
        matmul: Share of the rate of large products that those of a training step reach.
        small_width: Width of a product at which half of its rate is lost.
        small_rows: Rows of a product at which half of its rate is lost.
        attention: Share of the peak that fused attention reaches.
        score_bytes: Traffic of unfused attention, bytes per score.
        elementwise_bytes: Traffic of norms, activations and residuals of a block, bytes per token
            and unit of width, forward.
        network: Share of the network of a node that collectives reach.
        gradient_overlap: Share of the gradients' reduction that the backward pass hides.
        gather_overlap: Share of ZeRO-3's gathers that can be hidden by computation.
        block_us: Time of a block's pass that is no computation (launches), microseconds.
        step_ms: Time of a step that is in no other term, milliseconds.
        straggler: Slowdown for each doubling of the nodes.
        calibration: Factor on the whole step, measured on a cluster.
    """

    matmul: float
    small_width: float
    small_rows: float
    attention: float
    score_bytes: float
    elementwise_bytes: float
    network: float
    gradient_overlap: float
    gather_overlap: float
    block_us: float
    step_ms: float
    straggler: float
    calibration: float = 1.0


@cache
def default_rates() -> Rates:
    """Return the rates that come along."""
    table = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return Rates(
        **{each.name: float(table[each.name]) for each in fields(Rates) if each.name in table}
    )
