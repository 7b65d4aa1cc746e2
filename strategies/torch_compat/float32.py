"""Switches of torch that let fp32 products be computed with fewer bits: TF32, and bf16 on CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Context in which products and convolutions of fp32 tensors are computed in fp32.

    Each operator is switched by itself: torch raises where this interface, which may be read
    always, is mixed with ``set_float32_matmul_precision`` or ``allow_tf32`` for several at once.
    """
    backends: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
        torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
    ]
    before = [each.fp32_precision for each in backends]
    try:
        for each in backends:
            each.fp32_precision = "ieee"
        yield
    finally:
        for each, precision in zip(backends, before, strict=True):
            each.fp32_precision = precision
