"""A checkpoint of layers in tiles is one of whole layers, and the other way round."""

from pathlib import Path

import pytest

from tests.parity.resuming import Layout, Run, differences, go_on, train

pytestmark = pytest.mark.ranks

OTHER_ORDER = 2e-4
"""Other numbers of ranks add gradients in another order; Adam amplifies what that changes."""
RUN = Run({"width": 65}, trainer={"gradient_clip_val": 0.5})
TILED = Layout(2, {"stage": 3, "tile_linear_bytes": 4096})
WHOLE = Layout(4, {"stage": 2})


@pytest.mark.full
def test_a_tiled_run_goes_on_bit_by_bit_and_in_whole_layers(tmp_path: Path) -> None:
    ended = train(TILED, RUN, tmp_path)
    saved = tmp_path / "epoch=0.ckpt"
    assert differences(ended, go_on(TILED, RUN, saved, tmp_path / "same")) == []
    other = go_on(WHOLE, RUN, saved, tmp_path / "other")
    assert differences(ended, other, tolerance=OTHER_ORDER) == []


@pytest.mark.full
def test_a_run_of_whole_layers_goes_on_in_tiles(tmp_path: Path) -> None:
    ended = train(WHOLE, RUN, tmp_path)
    other = go_on(TILED, RUN, tmp_path / "epoch=0.ckpt", tmp_path / "other")
    assert differences(ended, other, tolerance=OTHER_ORDER) == []
