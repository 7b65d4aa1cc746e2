"""Every shipped recipe loads, explains itself, and can start."""

import re

import pytest

from boltmesh.configs.load import load, recipes
from boltmesh.launch.placement import place_ranks
from boltmesh.launch.rank import Rank
from boltmesh.launch.stopping import StopSwitch
from boltmesh.preflight import check_config


@pytest.mark.parametrize("name", recipes())
def test_every_key_of_a_recipe_is_explained(name):
    """By a comment on its line or on the line above."""
    lines = recipes()[name].read_text().splitlines()
    plain = {
        "init_args:",
        "model:",
        "data:",
        "strategy:",
        "trainer:",
        "run:",
        "checkpoint:",
        "alerts:",
    }
    obvious = {"logger", "enable_model_summary", "weight_decay", "n_layer"}
    for before, line in zip(["", *lines], lines, strict=False):
        key = re.match(r"\s*(\w+):", line)
        if key is None or line.strip() in plain or key[1] in obvious:
            continue
        explained = "#" in line or before.strip().startswith("#") or key[1] == "class_path"
        assert explained, f"{name}: {line.strip()}"


@pytest.mark.parametrize("name", recipes())
def test_every_command_in_a_recipe_is_one_that_works(name):
    for line in recipes()[name].read_text().splitlines():
        found = re.match(r"#\s+boltmesh (?:fit|validate) (\S+)((?: [\w.]+=\S+)*)", line)
        if found:
            load(found[1], found[2].split())


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_can_start(name, tmp_path, monkeypatch):
    from boltmesh.run import RunBuilder, describe

    monkeypatch.chdir(tmp_path)
    config = load(name)
    placement = check_config(config, source=name, is_fit=True, for_show=True)
    assert placement == place_ranks(config)
    rank = Rank(None, None, StopSwitch())
    built = RunBuilder(config, "fit", placement, rank, source=name).build(for_show=True)
    shown = describe(built, config, "fit", placement)
    assert f"boltmesh: fit {config.run.name} can start" in shown
    assert not list(tmp_path.iterdir()), "looking writes nothing"
