"""Finds the line of the user's code that is running, for messages."""

import contextlib
import inspect
import os
from collections.abc import Sequence

import torch

OF_TORCH = (os.path.dirname(torch.__file__) + os.sep, contextlib.__file__)
"""Paths of torch and of ``contextlib``, through which torch is called."""

MACHINERY = (*OF_TORCH, os.path.dirname(os.path.abspath(__file__)) + os.sep)
"""These and the strategies."""


def line_outside(machinery: Sequence[str] = MACHINERY) -> str:
    """Return file and line of the innermost frame outside of some paths, given by prefixes."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(tuple(machinery)):
            break
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
