"""How much state an optimizer keeps, by its name."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

STATE_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "SGD": 0}
"""Tensors of a parameter's size that torch's optimizers keep as they come."""


def optimizer_copies(
    config: "DictConfig", name: str | None, arguments: Mapping[str, Any]
) -> tuple[int, tuple[str, ...]]:
    """Tensors of a parameter's size that an optimizer keeps, and what is assumed where unknown.

    Args:
        config: Whose own optimizer comes before the model's.
        name: Of the class that the model makes; None where it makes it beside a Trainer only.
        arguments: Of it.
    """
    if config.optimizer.class_path is not None:
        name = re.split(r"[.:]", config.optimizer.class_path)[-1]
        arguments = config.optimizer.init_args
    if name not in STATE_COPIES:
        who = (
            "the optimizer is made beside a Trainer only" if name is None else f"{name} is unknown"
        )
        return 2, (f"{who}: two tensors of state for each parameter are assumed, as Adam has",)
    copies = STATE_COPIES[name]
    copies += bool(arguments.get("amsgrad")) + (name == "SGD" and bool(arguments.get("momentum")))
    return copies, ()
