"""pyproject.toml lists packages and data by hand because folders and import names differ."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).parents[1]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
LINKS = {ROOT.joinpath(*name.split(".")) for name in SETUPTOOLS["package-dir"]}
SCRIPTS = {"boltmesh.examples": "examples"}  # shipped as files beside the recipes, not imported
FOLDERS = {
    name: folder
    for name, folder in {"boltmesh": "boltmesh", **SETUPTOOLS["package-dir"]}.items()
    if name not in SCRIPTS
}

# What must start at once: the command line, the dashboard, its inputs, and the strategies' names.
LIGHT = (
    "boltmesh.cli",
    "boltmesh.configs.load",
    "boltmesh.plan.schedule",
    "boltmesh.strategies.registry",
    "boltmesh.telemetry.reader.reader",
    "boltmesh.tui.app",
    "boltmesh.tui.commands.top",
)
HEAVY = {"lightning", "torch"}
SECOND_COPIES = {"configs", "examples", "strategies", "tui"}


def _files(folder: str) -> list[Path]:
    # While another process compiles a module, its bytes lie in __pycache__ under a passing name.
    return [
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path not in LINKS and path.parent.name != "__pycache__"
    ]


def test_every_package_on_disk_is_shipped() -> None:
    found = {
        ".".join((name, *path.parent.relative_to(ROOT / folder).parts))
        for name, folder in FOLDERS.items()
        for path in _files(folder)
        if path.name == "__init__.py"
    }
    assert set(SETUPTOOLS["packages"]) == found | set(SCRIPTS)


def test_every_module_on_disk_can_be_imported() -> None:
    files = [path for folder in FOLDERS.values() for path in _files(folder)]
    modules = [path for path in files if path.suffix == ".py"]
    outside_a_package = [path for path in modules if not path.with_name("__init__.py").is_file()]
    hidden_by_a_package = [path for path in modules if path.with_suffix("").is_dir()]
    assert outside_a_package + hidden_by_a_package == []


def test_every_data_file_on_disk_is_shipped() -> None:
    for name, folder in FOLDERS.items():
        patterns = SETUPTOOLS["package-data"].get(name, [])
        shipped = {path for pattern in patterns for path in (ROOT / folder).glob(pattern)}
        data = {path for path in _files(folder) if path.suffix != ".py"}
        assert data <= shipped, f"{name}: add a package-data pattern for {data - shipped}"


def test_scripts_are_shipped_whole() -> None:
    for folder in SCRIPTS.values():
        assert set(_files(folder)) == set((ROOT / folder).glob("*.py")), (
            "setuptools ships *.py of the top only"
        )


def test_the_links_show_every_import_package_to_static_tools() -> None:
    for name, folder in FOLDERS.items():
        if name != "boltmesh":
            link = ROOT.joinpath(*name.split("."))
            assert link.is_symlink()
            assert not link.readlink().is_absolute()
            assert link.resolve() == ROOT / folder


def _loaded_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_light_modules_load_no_training_library_and_no_second_copy() -> None:
    assert _loaded_by(*LIGHT) & (HEAVY | SECOND_COPIES) == set()


@pytest.mark.parametrize("module", ["boltmesh", "boltmesh.cli"])
def test_the_command_line_loads_no_terminal_library_either(module: str) -> None:
    assert _loaded_by(module) & (HEAVY | {"rich", "textual"}) == set()


def test_the_command_is_there() -> None:
    assert callable(entry_points(group="console_scripts")["boltmesh"].load())


def test_no_other_program_loads_boltmesh() -> None:
    # Lightning adds callbacks of entry points to every Trainer, and names the package in the log.
    assert "entry-points" not in PROJECT["project"]


def test_the_version_is_that_of_the_package() -> None:
    import boltmesh

    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "boltmesh.__version__"}
    assert boltmesh.__version__.count(".") == 2
