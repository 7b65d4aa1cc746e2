"""What a batch takes and what the device can do, as Lightning's ThroughputMonitor reads them."""

import math
import warnings

from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer

from boltmesh.telemetry.recording.lightning_compat import compute_dtype


def flops_per_batch(module: LightningModule) -> float | None:
    """Return ``module.flops_per_batch``, an attribute or a property; None where it has none.

    A property is the user's code, so what it raises and what is no number count as none.
    """
    try:
        found = getattr(module, "flops_per_batch", None)
        number = float(found) if found is not None else math.nan
    except Exception:  # noqa: BLE001 - telemetry never stops training
        return None
    return number if math.isfinite(number) and number > 0 else None


def peak_flops(trainer: Trainer) -> float | None:
    """Return what this rank's device can do at the run's precision, by its data sheet.

    None on a CPU, and for devices that Lightning has no data sheet of.
    """
    device = trainer.strategy.root_device
    if device.type == "cpu":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of devices that it does not know
        try:
            found = get_available_flops(device, compute_dtype(trainer))
        except Exception:  # noqa: BLE001 - it parses the names of devices
            return None
    return float(found) if found else None
