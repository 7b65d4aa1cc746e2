"""The environment's way to turn telemetry off."""

import os
from typing import Final

SWITCH_VARIABLE: Final = "BOLTMESH_TELEMETRY"


def is_switched_off() -> bool:
    """Tell whether the environment says that nothing is to be recorded."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() in {"0", "false", "off", "no"}
