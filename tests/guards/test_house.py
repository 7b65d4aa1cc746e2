"""Figures of the structure that were reached stay reached; `make house` prints all of them."""

import ast
from textwrap import dedent

import pytest

from tests.guards.house import ROOT, Figure, Module, figures, source_modules

MOST = {
    "strategies-files": 265,
    "strategies-lines": 71_150,
    "strategies-longest": 520,
    "tui-files": 124,
    "tui-longest": 520,
    "deep-classes": 0,
    "shared-private": 0,
    "class-names-twice-inside": 0,
    "axis-tuples": 0,
    "os-exits": 1,
    "one-importer": 100,
    "one-importer-small": 0,
}


@pytest.fixture(scope="module")
def measured():
    return figures()


@pytest.mark.parametrize("name", MOST)
def test_a_figure_stays_within_its_limit(measured, name):
    found = measured[name]
    assert found.value <= MOST[name], found.items


PLANTED = {
    "boltmesh.strategies.bases": """
        class Base:
            def run(self):
                self._of_child()

            def _of_base(self): ...

        class Second(Base):
            _of_child = None

        class Third(Second): ...
    """,
    "boltmesh.strategies.lower": """
        import os
        from boltmesh.strategies.bases import Third
        from boltmesh.strategies.twice import one

        class Fourth(Third):
            def run(self):
                self._of_base()

        class _Fifth(Fourth): ...

        def many(self, a, b, c, d, e, f, g):
            os._exit(1)
    """,
    "boltmesh.strategies.twice": """
        class Fifth: ...

        ALL = frozenset({"tensor", "data", "pipeline"})
        AXES = ["context", "data", "x", "expert"]
        TWO = ("pipeline", "data", "world")

        def fewer(a, b, c, d, e, f): ...
    """,
    "boltmesh.tui.large": "\n" * 40,
}
"""Sources with what each figure counts."""


@pytest.fixture(scope="module")
def planted():
    sources = {name: dedent(text) for name, text in PLANTED.items()}
    return figures(
        Module(
            name,
            folder=(folder := name.split(".")[1]),
            path=ROOT / folder / f"{name.rpartition('.')[2]}.py",
            tree=ast.parse(text),
            num_lines=text.count("\n"),
        )
        for name, text in sources.items()
    )


@pytest.mark.parametrize(
    ("name", "found"),
    {
        "deep-classes": ["boltmesh.strategies.lower._Fifth (5)"],
        "shared-private": [
            "boltmesh.strategies.bases.Base: _of_child",
            "boltmesh.strategies.lower.Fourth: _of_base",
        ],
        "class-names-twice-inside": [
            "strategies: Fifth x2: strategies/lower.py:10, strategies/twice.py:2"
        ],
        "axis-tuples": ["strategies/twice.py:4", "strategies/twice.py:5"],
        "os-exits": ["strategies/lower.py:13"],
        "one-importer": [
            "boltmesh.strategies.bases (11) <- boltmesh.strategies.lower",
            "boltmesh.strategies.twice (8) <- boltmesh.strategies.lower",
        ],
        "many-arguments": ["strategies/lower.py:12 many (7)"],
    }.items(),
)
def test_a_figure_finds_what_it_counts(planted, name, found):
    assert planted[name] == Figure(len(found), planted[name].goal, found)


def test_sizes_are_those_of_the_folder(planted):
    names = ("strategies-files", "strategies-lines", "strategies-longest", "tui-longest")
    assert [planted[name].value for name in names] == [3, 32, 13, 40]


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
