"""Models of Hugging Face train by plans of their own; ``tensor_models.py`` has a hundred."""

import pytest

from tests.parity.tensor_models import Way, measure

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHARES = {
    "deepseek_v3": 0.9,  # latent attention, and routed experts behind a layer without any
    "gemma2": 0.98,  # as many query heads to a key head as key heads, in code that repeats keys
    "gpt_neox": 0.98,  # q, k and v one after the other in each head
    "inkling_text": 0.6,  # experts that scale what is divided, and short convolutions
}
"""How much of each has to be divided, of its elements."""


@pytest.mark.full
def test_losses_and_parameters_are_those_of_one_process() -> None:
    rows = measure([*SHARES], Way())
    assert [row.refused for row in rows] == [""] * len(SHARES)
    assert {row.name: row.backends for row in rows} == dict.fromkeys(SHARES, "local"), rows
    for row in rows:
        assert row.share > SHARES[row.name], row.notes
        assert row.loss < 2e-6, row.name
        assert row.parameter < 1e-6, row.name
