"""The wheel and the sdist hold all that runs, and a wheel works where there is no checkout."""

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

from tests.packaging.environments import Environment, copy_checkout, is_inside, make_environment

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Built:
    checkout: Path
    wheel: Path
    sdist: Path


def build(checkout: Path, folder: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(folder)]
    done = subprocess.run([*command, str(checkout)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    checkout = copy_checkout(folder / "checkout")
    build(checkout, folder, "--wheel", "--sdist")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(checkout, wheel, sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = make_environment(tmp_path_factory.mktemp("wheel") / "venv")
    environment.install(built.wheel)
    return environment


def shipped_files(checkout: Path) -> dict[str, Path]:
    """Name in the wheel to file in the checkout, for everything that runs."""
    project = tomli.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {"boltmesh": "boltmesh", **project["tool"]["setuptools"]["package-dir"]}
    files = {}
    for name, folder in folders.items():
        for path in (checkout / folder).rglob("*"):
            inside = path.relative_to(checkout / folder)
            is_link = name == "boltmesh" and (checkout / folder / inside.parts[0]).is_symlink()
            if path.is_file() and not is_link and "__pycache__" not in inside.parts:
                files["/".join((*name.split("."), *inside.parts))] = path
    return files


def test_the_wheel_holds_every_file_that_runs_and_nothing_else(built: Built) -> None:
    expected = shipped_files(built.checkout)
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == set(expected)
        for name, path in expected.items():
            assert wheel.read(name) == path.read_bytes(), name
    assert {"boltmesh/configs/ddp.yaml", "boltmesh/py.typed"} <= names
    assert any(name.endswith(".tcss") for name in names)


def test_the_sdist_holds_the_same_files_where_the_project_has_them(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {
        str(path.relative_to(built.checkout)) for path in shipped_files(built.checkout).values()
    }
    assert sources <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("boltmesh/configs/")]


@pytest.mark.full
def test_a_wheel_made_from_the_sdist_is_the_same(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build(unpacked, tmp_path / "dist", "--wheel")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert contents(wheel) == contents(built.wheel)


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("RECORD")}


@pytest.mark.full
def test_a_checkout_without_the_links_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout", with_links=False)
    build(checkout, tmp_path / "dist", "--wheel")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert contents(wheel) == contents(built.wheel)


def test_the_console_script_and_the_module_run_outside_the_checkout(
    installed: Environment, tmp_path: Path
) -> None:
    version = installed.run("boltmesh", "--version", cwd=tmp_path).stdout
    where = installed.run(
        installed.python, "-c", "import boltmesh; print(boltmesh.__file__)", cwd=tmp_path
    ).stdout.strip()
    assert "0.1.0" in version
    assert is_inside(where, installed.folder)
    usage = installed.run(installed.python, "-m", "boltmesh", "--help", cwd=tmp_path).stdout
    for command in ("fit", "validate", "test", "predict", "top", "jobs", "check"):
        assert command in usage


@pytest.mark.full
def test_a_recipe_is_found_by_name_and_can_be_built(installed: Environment, tmp_path: Path) -> None:
    merged = installed.run("boltmesh", "fit", "ddp", "--print-config", cwd=tmp_path).stdout
    assert "bolt_ddp" in merged
    installed.run("boltmesh", "fit", "ddp", "--dry-run", cwd=tmp_path)
    assert not list(tmp_path.glob("runs/**/*.ckpt"))


@pytest.mark.full
def test_lightning_finds_the_names(installed: Environment, tmp_path: Path) -> None:
    code = """
import boltmesh
from lightning.pytorch.strategies import StrategyRegistry
print(*StrategyRegistry.available_strategies())
"""
    output = installed.run(installed.python, "-c", code, cwd=tmp_path).stdout
    assert "bolt_ddp" in output.split()
