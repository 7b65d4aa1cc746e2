"""Every small model by its plan against itself whole: the loss and all gradients of a step."""

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tensor_layers import MODELS
from tests.support.tensor_models import BY_HAND, HUGGING_FACE, NO_DTENSOR_RULES
from tests.support.tensor_runs import Difference, matrix

pytestmark = pytest.mark.ranks

WRITTEN = [
    name for name in (*BY_HAND, *MODELS) if name not in {"gpt_dropout", "gpt_drawing"}
]  # their draws differ from those of one rank on purpose; see test_dropout
NAMES_WHOLE_SIZES = {
    "gpt_fused", "gpt_grouped", "gpt_odd_vocabulary", "gpt_one_key_head", "gpt_one_key_head_norm",
    "gpt_separate", "gpt_tied", "vit_by_hand",
}  # fmt: skip
"""Their code names sizes that it takes from what is whole, so it cannot run on plain shards."""
FAMILIES_THAT_NAME_WHOLE_SIZES = {"bloom", "phi3"}


def _wanted(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Models and backends of the tests that are run and take this fixture, for they run as one."""
    found = [
        (str(each.callspec.params["name"]), str(each.callspec.params["backend"]))
        for each in request.session.items
        if isinstance(each, pytest.Function)
        and each.path == request.path
        and request.fixturename in each.fixturenames
    ]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def written(request: pytest.FixtureRequest) -> dict[tuple[str, str], Difference | str]:
    """In double precision, where nothing but a mistake is left of a difference."""
    return run_ranks(matrix, request.param, _wanted(request), torch.float64)[0]


@pytest.mark.sample(
    "2-gpt_separate-local",
    "2-gpt_tied-region",
    "2-gpt_grouped-region",
    "2-gpt_odd_vocabulary-local",
    "2-gpt_fused-region",
    "2-vit_by_hand-local",
    "2-gpt_local-local",
    "2-gpt_latent-region",
    "2-experts-local",
    "2-torch_layers-region",
    "2-convolutions-region",
)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "region"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_written_by_hand_equals_itself(
    written: dict[tuple[str, str], Difference | str], name: str, backend: str
) -> None:
    found = written[name, backend]
    if isinstance(found, str):
        assert backend == "local", found
        assert name in NAMES_WHOLE_SIZES, found
        return
    assert found.missing == []
    assert found.loss < 1e-12
    assert found.gradient < 1e-10, found.where


@pytest.fixture(scope="module", params=[2])
def families(request: pytest.FixtureRequest) -> dict[tuple[str, str], Difference | str]:
    return run_ranks(matrix, request.param, _wanted(request), torch.float32)[0]


@pytest.mark.sample(
    "2-llama-local",
    "2-llama_tied-region",
    "2-mistral-region",
    "2-gpt2-local",
    "2-bert-region",
    "2-t5-local",
    "2-vit-local",
    "2-falcon-local",
)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "region"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_model_of_hugging_face_equals_itself(
    families: dict[tuple[str, str], Difference | str], name: str, backend: str
) -> None:
    found = families[name, backend]
    if backend == "region" and name in NO_DTENSOR_RULES:
        pytest.skip(f"DTensor of torch {torch.__version__} has no rules for its code: {found}")
    if isinstance(found, str):
        assert backend == "local", found
        assert name in FAMILIES_THAT_NAME_WHOLE_SIZES, found
        return
    assert found.missing == []
    # A loss near five has a last bit of 5e-7, and is a mean of 32 of them.
    assert found.loss < 4e-6
    assert found.gradient < 1e-4, found.where


@pytest.mark.sample("2-gpt_local-local")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [("gpt_local", "local"), ("gpt_separate", "region"), ("gpt_fused", "region")],
)
def test_a_block_has_two_sums_forward_and_two_backward(
    written: dict[tuple[str, str], Difference | str], name: str, backend: str
) -> None:
    found = written[name, backend]
    assert isinstance(found, Difference)
    # Beside those of two blocks: one for the table, two for the cross entropy, none of logits.
    assert found.forward == {"all_reduce": 2 * 2 + 3}
    # The input of the head has one sum.
    assert found.backward == {"all_reduce": 2 * 2 + 1}
