"""A user's optimizer on small parameters of our own, to see what its step does.

The optimizer itself, its state and the random numbers of the run stay as they are.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.strategies.torch_compat import step_without_hooks


def can_be_tried(optimizer: Optimizer) -> bool:
    """Whether there is anything to try: torch's own are known.

    One that steps another one within cannot be tried without stepping that.
    """
    if type(optimizer).__module__.startswith("torch."):
        return False
    return not any(isinstance(each, Optimizer) for each in vars(optimizer).values())


def trial_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[Parameter]
) -> Callable[[], object]:
    """Return what steps other parameters as an optimizer would in its first steps.

    To be called where random numbers are forked; it raises what the optimizer's step does.

    Args:
        optimizer: As ``can_be_tried`` allows.
        group: Whose settings are taken, one of the optimizer's.
        parameters: Stepped by their ``grad``.
    """
    runner = object.__new__(type(optimizer))
    vars(runner).update(vars(optimizer))  # a copy by torch's rules has lost what is the class's own
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    runner.param_groups = [{**settings, "params": list(parameters)}]
    runner.state = defaultdict(dict)
    return lambda: step_without_hooks(optimizer)(runner)
