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
        elementwise: Traffic of norms, activations and residuals, over the bytes that their tensors
            have.
        network: Share of the network of a node that collectives reach.
        onload_network: The same where processors of the host run the network's protocol.
        step_ms: Time of a step that is in no other term, milliseconds.
        straggler: Slowdown for each doubling of the nodes.
    """

    matmul: float
    elementwise: float
    network: float
    onload_network: float
    step_ms: float
    straggler: float


@cache
def default_rates() -> Rates:
    """Return the rates that come along."""
    table = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return Rates(**{each.name: float(table[each.name]) for each in fields(Rates)})
