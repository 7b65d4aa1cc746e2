"""``torch.save`` into an open file, with the error that the file gave."""

from typing import IO, Any

import torch


def save_into(value: Any, file: IO[bytes]) -> None:
    """Write ``value``; what the file raises, a full disk say, is raised as it is.

    torch ends its archive after a write has failed too, and says only that this failed.

    Raises:
        OSError: When the file could not be written.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        cause = error.__context__
    else:
        return
    raise cause
