"""Says which line of the user's code is running, for messages."""

import contextlib
import inspect
import os
import traceback

import torch

MACHINERY = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    contextlib.__file__,
)
"""Where files lie of which no line belongs to a step."""


def line_of_step() -> str:
    """Return the file and line outside of torch and of this package that is running now."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(MACHINERY):
            break
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of(error: BaseException) -> str:
    """Return the file, line and function outside of torch that an error came from."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [each for each in frames if not each.filename.startswith(MACHINERY)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}"
