"""Figures of the structure that were reached stay reached; `make house` prints all of them."""

import ast

import pytest

from tests.guards.house import figures, source_modules

MOST = {
    "strategies-longest": 520,
    "tui-files": 134,
    "tui-longest": 520,
    "mro": 4,
    "shared-private": 0,
    "class-names-twice-inside": 0,
    "axis-tuples": 1,
    "os-exits": 1,
    "one-importer-small": 0,
}


@pytest.fixture(scope="module")
def measured():
    return figures()


@pytest.mark.parametrize("name", MOST)
def test_a_figure_stays_within_its_limit(measured, name):
    found = measured[name]
    assert found.value <= MOST[name], found.items


def test_modules_stay_large_enough(measured):
    assert measured["strategies-median"].value >= 180


def test_nothing_seeds_the_generators_of_all_devices():
    found = [
        f"{module.path}:{node.lineno}"
        for module in source_modules()
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in {"torch.manual_seed", "torch.random.manual_seed"}
    ]
    assert not found, "seed_torch of strategies/random_state.py seeds one device"
