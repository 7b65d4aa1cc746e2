"""A part of what ``three_axes.py`` runs: 2 x 2 x 2 ranks compute what one process computes."""

import pytest

from tests.parity.three_axes import Apart, Layout, measure

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.slow(75), pytest.mark.timeout(400)]

CASES = {
    "GPT": (Layout(1, offload="cpu"), Layout(3, "interleaved_1f1b", has_sequence=True)),
    "Llama": (Layout(2, "zbv", offload="nvme"),),
}


@pytest.mark.parametrize("model", CASES)
def test_three_axes_equal_one_process(model: str) -> None:
    for layout, found in measure(model, CASES[model], timeout_s=150):
        assert isinstance(found, Apart), found
        assert found.beyond == [], layout
        assert max(found.losses, found.norms) < 1e-5, layout
