"""Class paths and arguments: what is found, what is built, and the line for each mistake."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from boltmesh.configs.classes import build, check_class_path, find_class
from boltmesh.errors import ConfigError, OffloadError

CODE = """
from collections import OrderedDict

class Pair:
    def __init__(self, left: int, right: float = 0.5, *, inner=None):
        if right < 0:
            raise ValueError("right is negative\\nand that is bad")
        self.left, self.right, self.inner = left, right, inner

    class Nested:
        pass

class Anything:
    def __init__(self, **options):
        self.options = options

class Refusing:
    def __init__(self):
        from boltmesh.errors import OffloadError
        raise OffloadError("no disk")

def function():
    pass
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A folder with modules, on the path as the working directory would be."""
    name = f"code_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\nclass A: ...\n")
    (tmp_path / "unfinished.py").write_text("class A:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def section(class_path: str, **init_args):
    return OmegaConf.create({"class_path": class_path, "init_args": init_args})


def line_of(function, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args, source="a.yaml")
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_class_is_found_by_module_and_by_file(code):
    by_module = find_class(f"{code}.Pair", "k", source="a.yaml")
    by_file = find_class(f"{code}.py:Pair", "k", source="a.yaml")
    assert by_module is by_file


def test_a_class_inside_a_class_is_found(code):
    assert find_class(f"{code}.Pair.Nested", "k", source="a.yaml").__name__ == "Nested"


def test_a_file_inside_a_package_is_imported_as_part_of_it(tmp_path):
    package = tmp_path / f"package_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text("class Base: ...\n")
    (package / "model.py").write_text(f"from {package.name}.base import Base\nclass M(Base): ...\n")
    found = find_class(f"{package}/model.py:M", "k", source="a.yaml")
    assert found.__module__ == f"{package.name}.model"


def test_sections_inside_arguments_are_built_first(code):
    inner = {"class_path": f"{code}.Pair", "init_args": {"left": 2}}
    made = build(
        section(f"{code}.Pair", left=1, inner=[inner, {"class_path": "kept", "other": 1}]),
        "model",
        source="a.yaml",
    )
    assert made.inner[0].left == 2
    assert made.inner[1] == {"class_path": "kept", "other": 1}
    assert type(made.inner) is list


def test_a_class_that_takes_anything_gets_anything(code):
    made = build(section(f"{code}.Anything", x=[1], y={"z": 2}), "model", source="a.yaml")
    assert made.options == {"x": [1], "y": {"z": 2}}
    assert type(made.options["y"]) is dict


@pytest.mark.parametrize(
    ("class_path", "message"),
    [
        ("{code}.Piar", "{code} has no 'Piar'. Did you mean {code}.Pair?"),
        ("{code}.py:Piar", "{folder}/{code}.py has no 'Piar'. Did you mean {code}.py:Pair?"),
        ("{code}.Zzz", "{code} has no 'Zzz'. It has Anything, OrderedDict, Pair and Refusing."),
        ("lightning.pytorch.callbacks.Timr", ("lightning.pytorch.callbacks has no 'Timr'. "
         "Did you mean lightning.pytorch.callbacks.Timer?")),
        ("lightning.pytorch.callback.Timer", ("lightning.pytorch has no 'callback'. "
         "Did you mean lightning.pytorch.callbacks.Timer?")),
        ("lightnin.pytorch.Trainer", ("there is no module 'lightnin'. "
         "Did you mean lightning.pytorch.Trainer?")),
        ("qqq_no_such.Model", ("there is no module 'qqq_no_such'. "
         "Install it, or give path/to/file.py:Class.")),
        ("no_such.py:Model", ("there is no file no_such.py. Give a file by its path from here or "
         "from the config, or an installed class as k=package.module.Class.")),
        ("brokn.py:A", "there is no file brokn.py. Did you mean broken.py?"),
    ],
)  # fmt: skip
def test_a_class_that_is_not_there_names_the_nearest(code, tmp_path, class_path, message):
    places = {"code": code, "folder": str(tmp_path)}
    path = class_path.format(**places)
    assert line_of(find_class, path, "k") == f"a.yaml: k={path}: {message.format(**places)}"


@pytest.mark.parametrize(
    ("class_path", "message"),
    [
        ("{code}.function", "a.yaml: k={code}.function is a function, not a class."),
        ("Model", ("a.yaml: k=Model names no module. Write package.module.Model, "
         "or path/to/file.py:Model.")),
        ("broken.A", ("a.yaml: k: importing broken failed with ModuleNotFoundError: "
         "No module named 'nothing_of_that_name'.")),
        ("broken.py:A", ("a.yaml: k: importing {folder}/broken.py failed with "
         "ModuleNotFoundError: No module named 'nothing_of_that_name'.")),
        ("unfinished.py:A", "a.yaml: k: {folder}/unfinished.py:1: expected an indented block"),
    ],
)  # fmt: skip
def test_code_that_is_wrong_is_told_apart(code, tmp_path, class_path, message):
    places = {"code": code, "folder": str(tmp_path)}
    found = line_of(find_class, class_path.format(**places), "k")
    assert found.startswith(message.format(**places))


@pytest.mark.parametrize(
    ("init_args", "message"),
    [
        ({"left": 1, "rihgt": 2}, ("a.yaml: unknown key 'model.init_args.rihgt': Pair does not "
         "take it. Did you mean 'model.init_args.right'?")),
        ({"left": 1, "zzz": 2}, ("a.yaml: unknown key 'model.init_args.zzz': Pair does not take "
         "it. It takes left, right and inner.")),
        ({}, ("a.yaml: model.init_args.left is missing: Pair needs it. "
         "Add model.init_args.left=1.")),
        ({"left": 1, "right": -1}, ("a.yaml: model cannot be built: Pair raised ValueError: "
         "right is negative and that is bad.")),
    ],
)  # fmt: skip
def test_arguments_that_a_class_does_not_take_are_refused(code, init_args, message):
    assert line_of(build, section(f"{code}.Pair", **init_args), "model") == message


def test_an_error_of_boltmesh_keeps_its_type(code):
    with pytest.raises(OffloadError, match="no disk"):
        build(section(f"{code}.Refusing"), "model", source="a.yaml")


def test_looking_at_a_class_path_runs_no_code(tmp_path):
    path = tmp_path / "loud.py"
    path.write_text("raise SystemExit('imported')\nclass Model: ...\n")
    check_class_path(f"{path}:Model", "k", source="a.yaml")
    assert "has no 'Modle'" in line_of(check_class_path, f"{path}:Modle", "k")


def test_a_star_import_hides_names_so_looking_does_not_judge(tmp_path):
    path = tmp_path / "stars.py"
    path.write_text("from pathlib import *\n")
    check_class_path(f"{path}:Path", "k", source="a.yaml")
    assert find_class(f"{path}:Path", "k", source="a.yaml") is Path


def test_a_file_whose_name_is_taken_is_refused_by_name(tmp_path):
    path = tmp_path / "json.py"
    path.write_text("class Model: ...\n")
    message = line_of(find_class, f"{path}:Model", "k")
    assert "another module has the name 'json'" in message
    assert message.endswith("Rename the file.")
