"""Adapters of peft on stacked parameters (``target_parameters`` of its ``LoraConfig``).

They are matrices of all experts: the rows of ``lora_A`` are grouped by expert, the columns of
``lora_B`` are interleaved over experts.
"""

import sys
from typing import Any

from torch.nn import Module, Parameter


def adapter_type() -> Any:
    """Return the class of modules that adapt a stack; an empty tuple if peft is not loaded."""
    return getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())


def without_adapters(module: Module) -> dict[str, Parameter]:
    """Return the parameters below a module, without those of adapters, by name."""
    adapters = tuple(_adapters_of(module))
    return {n: p for n, p in module.named_parameters() if not n.startswith(adapters)}


def adapters_by_columns(module: Module) -> list[str]:
    """Return the names of adapters below a module with columns interleaved over experts."""
    columns = tuple(f"{prefix}B." for prefix in _adapters_of(module))
    return [name for name, _ in module.named_parameters() if name.startswith(columns)]


def fault_of_adapters(module: Module, name: str, num_experts: int) -> str | None:
    """Return why adapters below a module cannot be divided by experts; None if they can.

    Args:
        module: The experts.
        name: Name of the module within the model.
        num_experts: Number of its experts.
    """
    for prefix, number in _adapters_of(module).items():
        if number != num_experts:  # peft takes a matrix, such as biases, for one expert
            return f"{name}.{prefix}A adapts no stack of its {num_experts} experts"
    return None


def _adapters_of(module: Module) -> dict[str, int]:
    """Return the number of experts of the adapters below a module, by prefix of their names."""
    kind, named = adapter_type(), module.named_modules()
    return {f"{n}.lora_".lstrip("."): m.num_experts for n, m in named if isinstance(m, kind)}
