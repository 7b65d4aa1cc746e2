"""The names that a Trainer and a config know."""

import subprocess
import sys

import pytest
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import StrategyRegistry

import boltmesh
import boltmesh.strategies
from boltmesh.strategies.registry import STRATEGIES, build_strategy


@pytest.mark.full
@pytest.mark.parametrize(
    "imports",
    [
        "import boltmesh; import lightning.pytorch",
        pytest.param("import lightning.pytorch; import boltmesh", marks=pytest.mark.full),
        pytest.param("import boltmesh; import lightning", marks=pytest.mark.full),
        pytest.param(
            "import boltmesh.errors; from lightning.pytorch import Trainer", marks=pytest.mark.full
        ),
    ],
)
def test_names_are_known_in_every_order_of_imports(imports: str) -> None:
    code = (
        f"{imports}\nimport sys; assert 'boltmesh.strategies.ddp' not in sys.modules\n"
        "from lightning.pytorch.strategies import StrategyRegistry as R\n"
        "print(type(R.get('bolt_ddp')).__name__, [n for n in R if n.startswith('bolt_')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"DDPStrategy {list(STRATEGIES)}"


def test_every_name_builds_a_strategy_and_passes_arguments_on() -> None:
    for name, entry in STRATEGIES.items():
        strategy = build_strategy(name, timeout_s=7.0)
        assert type(strategy).__name__ == entry.class_name
        assert strategy.timeout_s == 7.0
        assert StrategyRegistry[name]["description"] == entry.description


def test_every_public_name_resolves() -> None:
    for package in (boltmesh, boltmesh.strategies):
        assert list(package.__all__) == sorted(package.__all__)
        for name in package.__all__:
            assert getattr(package, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'DDPStratgy'"):
        boltmesh.DDPStratgy  # noqa: B018


def test_lightning_treats_it_as_one_of_its_own() -> None:
    assert isinstance(boltmesh.DDPStrategy(), LightningDDPStrategy)
