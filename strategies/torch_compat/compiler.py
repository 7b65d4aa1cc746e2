"""torch's compiler: requirements on this machine, and errors. Importing it takes seconds."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

RecompileLimitError = FailOnRecompileLimitHit
"""A function was compiled ``recompile_limit`` times and needs another compilation."""

CompilerError = TorchDynamoException


@contextmanager
def recompile_limit_raises() -> Iterator[None]:
    """Context in which too many recompilations raise, instead of running uncompiled."""
    with config.patch(fail_on_recompile_limit_hit=True):
        yield


def missing_for(device: torch.device) -> str | None:
    """Return what this machine lacks to compile for a device; None if nothing is missing."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler such as g++ (or name one by the variable CXX)"
        return None
    from torch.utils._triton import has_triton

    if not has_triton():
        return "triton is not installed, or does not know this device"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "triton needs a C compiler such as gcc"
    return None
