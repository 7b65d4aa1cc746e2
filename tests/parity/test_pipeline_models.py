"""Models of nine families train in a pipeline as in one process; ``pipeline_models.py`` has all."""

import pytest

from tests.parity.pipeline_models import measure
from tests.support.pipeline_zoo import ZOO

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ON_TWO = [("zbv", "32-true"), ("1f1b", "bf16-mixed")]
ON_FOUR = [("1f1b", "32-true"), ("interleaved_1f1b", "bf16-mixed")]
FOUR_RANKS = ["GPT-2, tied", "T5", "U-Net"]
"""A tied weight, an encoder's output and skips, each over boundaries that are not neighbours."""


@pytest.mark.sample("U-Net-2-0")
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in ZOO), *((name, 4) for name in FOUR_RANKS)],
)
def test_gradients_losses_and_parameters_are_those_of_one_process(
    name: str, ranks: int, number: int
) -> None:
    cases = [(ON_TWO if ranks == 2 else ON_FOUR)[number]]
    for (schedule, precision), apart in zip(cases, measure(name, ranks, cases), strict=True):
        if precision == "32-true":
            assert apart.gradient < 1e-5, schedule
            assert apart.loss < 2e-6, schedule
            assert apart.parameter < 1e-5, schedule
        else:  # a microbatch's gradients are rounded to 8 bits before they are added up
            assert apart.gradient < 2e-2, schedule
            assert apart.loss < 5e-3, schedule
