"""A part of what ``three_axes.py`` runs: 2 x 2 x 2 ranks compute what one process computes."""

import pytest

from tests.parity.three_axes import Apart, Layout, measure

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.slow(30), pytest.mark.timeout(1800)]

CASES = [
    ("GPT", Layout(1, offload="cpu")),
    pytest.param("GPT", Layout(3, "interleaved_1f1b", has_sequence=True), marks=pytest.mark.full),
    pytest.param("Llama", Layout(2, "zbv", offload="nvme"), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_three_axes_equal_one_process(model: str, layout: Layout) -> None:
    ((_, found),) = measure(model, [layout])
    assert isinstance(found, Apart), found
    assert found.beyond == []
    assert max(found.losses, found.norms) < 1e-5
