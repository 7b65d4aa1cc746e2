"""Numbers of bytes as people read them."""

import pytest

from boltmesh.strategies.offload.host_memory import describe_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (4096, "4 KiB"),
        (1000 << 10, "0.977 MiB"),
        (3 << 19, "1.5 MiB"),
        (5 << 30, "5 GiB"),
        (123_456 << 30, "123456 GiB"),
    ],
)
def test_sizes_have_three_digits(num_bytes: int, text: str) -> None:
    assert describe_bytes(num_bytes) == text
