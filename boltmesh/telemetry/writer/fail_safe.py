"""Keeps the failures of a recorder away from training: one warning, and telemetry is off."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from boltmesh.errors import TelemetryError

Method = TypeVar("Method", bound=Callable[..., None])


class Guarded(Protocol):
    """What has methods that may fail, and can be turned off."""

    is_on: bool

    def turn_off(self, error: Exception) -> None:
        """Stop, and say so once."""


def warn_off(error: Exception) -> None:
    """Say, once, why nothing is recorded from here on."""
    text = str(error) if isinstance(error, TelemetryError) else f"{type(error).__name__}: {error}"
    warnings.warn(
        f"boltmesh telemetry is off for this process: {text}", RuntimeWarning, stacklevel=3
    )


def guarded(method: Method) -> Method:
    """Make a method do nothing once telemetry is off, and turn it off when it fails."""

    @functools.wraps(method)
    def call(self: Guarded, *args: Any, **kwargs: Any) -> None:
        if self.is_on:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - telemetry never stops training
                self.turn_off(error)

    return cast("Method", call)
