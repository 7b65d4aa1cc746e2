"""Families of models train by their plans as in one process; ``tensor_families.py`` has all."""

import pytest

from tests.parity.tensor_families import BF16, FP32, Case, measure

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks

SAMPLE: list[tuple[str, int, Case]] = [
    ("GPT, fused q, k, v", 2, (True, FP32)),  # its code names sizes: activations are DTensors
    ("T5", 2, (True, FP32)),  # two stacks, and attention from one to the other
    ("Llama", 4, (True, BF16)),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks", "case"), SAMPLE)
def test_gradients_losses_and_parameters_are_those_of_one_process(
    name: str, ranks: int, case: Case
) -> None:
    found = measure(name, ranks, [case])[case]
    assert not isinstance(found, str), found
    assert found.share > 0.9
    if case[1] == FP32:
        assert found.gradient < 1e-5
        assert found.loss < 2e-6
        assert found.parameter < 1e-5
    else:
        # As near to fp32 as one process in bf16: it rounds at other places, not more often by far.
        assert 2**-8 < found.error < 2 * found.own_error
        assert found.loss < 5e-3
