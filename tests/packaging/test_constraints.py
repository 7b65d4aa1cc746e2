"""constraints.txt pins every package that an install brings, on every supported Python."""

import re
import sys
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def pins(python: str) -> dict[str, str]:
    """Package name to version for one Python on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    return {
        canonicalize_name(each.name): str(each.specifier)
        for each in CONSTRAINTS
        if each.marker is None or each.marker.evaluate(environment)
    }


def installed_closure(name: str, extras: set[str]) -> set[str]:
    """What ``pip install name[extras]`` brings here, by the metadata of what is installed."""
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while waiting:
        package, extra = waiting.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        for line in distribution(package).requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                child = canonicalize_name(needed.name)
                waiting += [(child, each) for each in ("", *needed.extras)]
    return {package for package, _ in seen} - {canonicalize_name(name)}


def test_every_line_is_one_exact_public_version() -> None:
    for each in CONSTRAINTS:
        assert re.fullmatch(r"==[^*+,]+", str(each.specifier)), f"{each}: pin one public version"
        assert each.url is None


@pytest.mark.parametrize("python", PYTHONS)
def test_no_package_has_two_pins_on_one_python(python: str) -> None:
    environment = {"python_version": python}
    names = [
        canonicalize_name(each.name)
        for each in CONSTRAINTS
        if each.marker is None or each.marker.evaluate(environment)
    ]
    assert len(names) == len(set(names))


def test_everything_that_an_install_brings_is_pinned() -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    # What torch's CUDA builds bring is pinned by torch itself.
    missing = {
        name
        for name in installed_closure("boltmesh", {"dev"}) - set(pins(python))
        if not name.startswith(("nvidia-", "cuda-", "triton"))
    }
    assert missing == set(), "add them to constraints.txt"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_satisfy_what_the_project_asks_for(python: str) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    pinned = pins(python)
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name != "boltmesh":
            version = pinned[name].removeprefix("==")
            assert requirement.specifier.contains(version), f"{requirement} but {version}"
