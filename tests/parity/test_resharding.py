"""Eight ranks on three axes and other layouts go on from each other's checkpoints."""

from pathlib import Path

import pytest

from tests.parity.resharding import TOLERANCE, Matrix, distance, read
from tests.support.layouts import PLAIN

pytestmark = [pytest.mark.ranks, pytest.mark.slow(30), pytest.mark.full]
"""Each two of the axes go on from others, and others from them, in files of their own."""

THREE_AXES, DDP, SHARDS = "2 x 2 x 2, ZeRO-1", "DDP, 2", "ZeRO-3 on the CPU, 2"


def test_three_axes_go_on_from_others_and_others_from_them(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path)
    with pytest.raises(ValueError, match="epoch is 0 and not 1"):
        distance(read(tmp_path / "whole" / "epoch=0.ckpt"), matrix.wanted)
    matrix.save([PLAIN, SHARDS, THREE_AXES])
    found = {
        THREE_AXES: matrix.resume([PLAIN, SHARDS], THREE_AXES),
        DDP: matrix.resume([THREE_AXES], DDP),
        SHARDS: matrix.resume([THREE_AXES], SHARDS),
        PLAIN: matrix.resume([THREE_AXES], PLAIN),
    }
    for layout, column in found.items():
        for source, apart in column.items():
            assert not isinstance(apart, str), f"{source} to {layout}: {apart}"
            assert apart <= TOLERANCE, f"{source} to {layout}: {apart:.1e}"
