"""The hundred causal language models of ``tensor_models.py`` with their sequence divided."""

import pytest

from tests.parity.tensor_models import AT_ONCE, Way, measure
from tests.support.causal_lms import SHIPPED

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

REFUSED: dict[str, str] = {
    "bailing_hybrid": "__setitem__ writes in place into a tensor whose sequence is divided",
    "kimi_linear": "__setitem__ writes in place into a tensor whose sequence is divided",
    "longcat_flash": "index_add_ writes in place into a tensor whose sequence is divided",
    "phimoe": "something else than whole: it gives an output",  # its router draws experts by chance
}
"""What its step does that cannot be divided, by model."""

GROUPS = [SHIPPED[at : at + AT_ONCE] for at in range(0, len(SHIPPED), AT_ONCE)]


@pytest.mark.sample("llama")
@pytest.mark.parametrize("names", [["llama"], *GROUPS], ids=lambda names: "-".join(names))
def test_losses_and_parameters_are_those_of_one_process_or_a_model_is_refused(
    names: list[str],
) -> None:
    # A small rate: where activations are large, SGD makes more of roundings in each step.
    for row in measure(names, Way(divides_context=True, rate=0.01)):
        assert REFUSED.get(row.name, "") in row.refused, row
        assert bool(row.refused) == (row.name in REFUSED), row
        assert row.loss < 2e-6, row
        assert row.parameter < 1e-6, row
