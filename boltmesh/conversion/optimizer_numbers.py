"""Optimizer state as torch's optimizers keep it: parameters by number instead of by name."""

import warnings
from collections.abc import Mapping
from typing import Any

from boltmesh.strategies.checkpoint.optimizer_state import PARAMS, PENDING, is_named


def numbered_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one optimizer as its ``state_dict()`` would be in one process.

    torch counts the parameters through all groups; the names are stored in that order. Gradients
    that a run had not applied yet are no state of an optimizer, and are left out.
    """
    if not is_named(saved):
        return dict(saved)
    numbers: dict[str, int] = {}
    for group in saved["param_groups"]:
        for name in group[PARAMS]:
            numbers.setdefault(name, len(numbers))
    groups = [
        {**group, PARAMS: [numbers[name] for name in group[PARAMS]]}
        for group in saved["param_groups"]
    ]
    states = saved["state"]
    if any(PENDING in each for each in states.values()):
        warnings.warn(
            "The checkpoint holds a gradient that was not applied yet, as schedule="
            "'pipedream_2bw' leaves one. It is left out.",
            stacklevel=2,
        )
    state = {
        numbers[name]: {key: value for key, value in each.items() if key != PENDING}
        for name, each in states.items()
    }
    return {"state": dict(sorted(state.items())), "param_groups": groups}
