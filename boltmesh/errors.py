"""The errors that boltmesh raises on purpose.

::

    BoltMeshError
    ├── ConfigError(ValueError)        exit 2   a config, an argument or a command line is wrong
    │   └── UnsupportedError           exit 2   a strategy cannot run something that the model does
    ├── LayoutError(ValueError)        exit 2   ranks, axes and sizes do not fit together
    ├── CheckpointError(RuntimeError)  exit 1   a checkpoint cannot be written, read or trusted
    │   └── UnsafeCheckpointError      exit 2   loading a checkpoint could run code
    ├── OffloadError(OSError)          exit 1   memory or disk for offloading is missing or failed
    ├── DivergenceError(RuntimeError)  exit 1   ranks run different layers of one sharded model
    ├── PipelineError(RuntimeError)    exit 1   a stage failed, or stages do not fit together
    ├── LossError                      exit 1   training ended with a loss that is not finite
    ├── TelemetryError(RuntimeError)   exit 1   telemetry cannot be read; training never sees it
    └── RankError(RuntimeError)        exit 1   a rank failed or died and took the job with it

A message is one or two sentences: what was asked, what is true, what to write instead.
"""

from collections.abc import Sequence
from typing import ClassVar


class BoltMeshError(Exception):
    """Base of everything that boltmesh raises on purpose."""

    exit_code: ClassVar[int] = 1
    is_restarted: ClassVar[bool] = True
    """Whether ``run.restarts`` starts the ranks again after it; never where ``exit_code`` is 2."""


class ConfigError(BoltMeshError, ValueError):
    """A config, an argument or a command line that the user can correct."""

    exit_code = 2


class UnsupportedError(ConfigError):
    """Something that a model, a callback or an optimizer does and a strategy cannot run.

    The message names it and the alternative, and ends with the page that lists what is supported.
    """

    PAGE: ClassVar[str] = "docs/support.md lists what each strategy supports."

    def __init__(self, message: str) -> None:
        # An error that is unpickled, from another rank, has the page already.
        super().__init__(message if message.endswith(self.PAGE) else f"{message} {self.PAGE}")


class LayoutError(BoltMeshError, ValueError):
    """Ranks, axes and sizes that do not fit together."""

    exit_code = 2


class CheckpointError(BoltMeshError, RuntimeError):
    """A checkpoint that cannot be written, read or trusted."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint that names classes or functions which are not known to be safe."""

    exit_code = 2


class OffloadError(BoltMeshError, OSError):
    """Memory or disk for offloading that is missing or failed."""


class DivergenceError(BoltMeshError, RuntimeError):
    """Ranks of one model that ran different layers, or a step with a loss on some ranks only."""


class PipelineError(BoltMeshError, RuntimeError):
    """A stage of a pipeline that failed, on any rank, or does not fit its neighbour."""


class LossError(BoltMeshError):
    """A training run whose last losses are infinite or NaN."""

    is_restarted = False


class TelemetryError(BoltMeshError, RuntimeError):
    """Telemetry that cannot be read."""


class RankError(BoltMeshError, RuntimeError):
    """A rank that failed or died and took the job with it."""


def first_of(names: Sequence[object], most: int = 3) -> str:
    """Return ``a, b, c and 4 more``, for messages."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")
