"""Files, recipes and overrides become one config; a mistake is one line that helps."""

import contextlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from boltmesh.configs.advice import show
from boltmesh.configs.load import load, recipes
from boltmesh.configs.merge import all_keys, example_of
from boltmesh.configs.schema import Config, TrainerSection
from boltmesh.errors import ConfigError

MINIMAL = "model: {class_path: package.module.Model, init_args: {width: 4, sizes: [1, 2]}}\n"


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def line_of(name_or_path, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(name_or_path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_what_a_file_leaves_out_has_the_default_of_the_schema(config_file):
    config = load(config_file)
    assert config.trainer.max_steps == -1
    assert config.strategy == {"name": "bolt_ddp"}
    assert config.run.seed == 1


def test_a_run_is_named_after_its_file_unless_it_has_a_name(config_file):
    assert load(config_file).run.name == "mine"
    assert load(config_file, ["run.name=other"]).run.name == "other"


@pytest.mark.parametrize("name", recipes())
def test_a_printed_recipe_is_a_config_that_means_the_same(name, tmp_path):
    config = load(name, ["max_steps=7", "trainer.callbacks=[a.B]"])
    printed = write(tmp_path / "printed.yaml", OmegaConf.to_yaml(config))
    assert load(printed) == config


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.max_steps=3", "trainer.max_steps", 3),
        ("max_steps=3", "trainer.max_steps", 3),
        ("devices=[0,2]", "trainer.devices", [0, 2]),
        ("resume=auto", "run.resume", "auto"),
        ("checkpoint.every_n_steps=5", "run.checkpoint.every_n_steps", 5),
        ("gradient_clip_val=1e-3", "trainer.gradient_clip_val", 0.001),
        ("gradient_clip_val=2", "trainer.gradient_clip_val", 2),
        ("run.seed=null", "run.seed", None),
        ("run.seed=", "run.seed", None),
        ("deterministic=warn", "trainer.deterministic", "warn"),
        ("model.init_args.width=5", "model.init_args.width", 5),
        ("model.init_args.new.deep=5", "model.init_args.new.deep", 5),
        ("model.init_args={width: 6}", "model.init_args", {"width": 6, "sizes": [1, 2]}),
        ("model.init_args.sizes=[3]", "model.init_args.sizes", [3]),
        ("strategy.bucket_cap_mb=5", "strategy", {"name": "bolt_ddp", "bucket_cap_mb": 5}),
        ("max_time='\"01:00:00:00\"'", "trainer.max_time", "01:00:00:00"),
        ("max_steps=${run.seed}", "trainer.max_steps", 1),
    ],
)
def test_an_override_sets_what_it_names(config_file, override, key, value):
    config = load(config_file, [override.replace("'\"", '"').replace("\"'", '"')])
    found = OmegaConf.select(config, key)
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value


WITH_CLASSES = """
model: {class_path: a.Model, init_args: {width: 4}}
data: {class_path: a.Data, init_args: {size: "${model.init_args.width}"}}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.1}
  scheduler: {class_path: a.Scheduler, init_args: {gamma: 0.5}}
trainer: {max_steps: 3}
"""


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["data=null"], "data", {"class_path": None, "init_args": {}}),
        (["data="], "data", {"class_path": None, "init_args": {}}),
        (["data.class_path=null"], "data", {"class_path": None, "init_args": {}}),
        (["optimizer=null"], "optimizer.class_path", None),
        (["optimizer=null"], "optimizer.init_args", {}),
        (["optimizer=null"], "optimizer.scheduler.class_path", None),
        (["optimizer.scheduler=null"], "optimizer.scheduler.init_args", {}),
        (["optimizer.scheduler=null"], "optimizer.init_args", {"lr": 0.1}),
        (["optimizer.class_path=a.B", "optimizer=null"], "optimizer.class_path", None),
        (["optimizer=null", "optimizer.class_path=a.B"], "optimizer.class_path", "a.B"),
        (["optimizer.init_args=null"], "optimizer.init_args", {}),
        (["strategy=null", "strategy.name=bolt_ddp"], "strategy", {"name": "bolt_ddp"}),
        (["strategy=null"], "strategy", {}),
    ],
)
def test_null_leaves_out_what_the_file_has(tmp_path, overrides, key, value):
    config = load(write(tmp_path / "a.yaml", WITH_CLASSES), overrides)
    found = OmegaConf.select(config, key)
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value


@pytest.mark.parametrize("section", ["trainer", "run", "alerts", "model", "run.checkpoint"])
def test_null_for_a_section_that_is_always_there_is_refused(config_file, section):
    with pytest.raises(ConfigError, match=rf"command line: {section}=null is not a section\. Set"):
        load(config_file, [f"{section}=null"])


@pytest.mark.parametrize("word", ["010", "1_0", "1e3", "0x10", "1:30", "7"])
def test_a_text_that_looks_like_a_number_is_as_it_is_written(tmp_path, config_file, word):
    path = write(tmp_path / "other.yaml", f"model: {{class_path: a.B}}\nrun: {{dir: {word}}}\n")
    assert load(path).run.dir == word
    assert load(config_file, [f"run.dir={word}"]).run.dir == word
    assert load(config_file, ["max_time=00:12:00:00"]).trainer.max_time == "00:12:00:00"


def test_the_last_override_of_a_key_wins(config_file):
    assert load(config_file, ["max_steps=1", "max_steps=2"]).trainer.max_steps == 2


def test_the_environment_is_read_by_omegaconfs_own_resolver(config_file, monkeypatch):
    monkeypatch.setenv("STEPS_OF_A_TEST", "12")
    config = load(config_file, ["max_steps=${oc.decode:${oc.env:STEPS_OF_A_TEST}}"])
    assert config.trainer.max_steps == 12
    assert "STEPS_OF_A_TEST" in OmegaConf.to_yaml(config)


def test_another_class_drops_the_arguments_of_the_old_one_in_any_order(config_file):
    config = load(config_file, ["model.init_args.depth=2", "model.class_path=other.Model"])
    assert OmegaConf.to_container(config.model) == {
        "class_path": "other.Model",
        "init_args": {"depth": 2},
    }


def test_another_strategy_drops_the_arguments_of_the_old_one(tmp_path):
    path = write(tmp_path / "a.yaml", MINIMAL + "strategy: {name: one, bucket_cap_mb: 5}\n")
    assert load(path, ["strategy=two", "strategy.stage=3"]).strategy == {"name": "two", "stage": 3}
    assert load(path, ["strategy.name=two"]).strategy == {"name": "two"}
    assert load(path, ["strategy.name=one"]).strategy == {"name": "one", "bucket_cap_mb": 5}


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("stage=3", "strategy.stage"),
        ("batch_siz=8", "data.init_args.batch_size"),
        ("batch_size=8", "data.init_args.batch_size"),
        ("data.batch_size=8", "data.init_args.batch_size"),
    ],
)
def test_arguments_that_the_file_gives_are_suggested_too(tmp_path, override, meant):
    text = MINIMAL + "strategy: {name: one, stage: 1}\ndata: {init_args: {batch_size: 4}}\n"
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        load(write(tmp_path / "a.yaml", text), [override])


def test_callbacks_are_a_list_whose_items_can_be_changed(config_file):
    given = "trainer.callbacks=[{class_path: a.B, init_args: {x: 1}}, c.D]"
    config = load(config_file, [given, "trainer.callbacks.0.init_args.x=2"])
    assert OmegaConf.to_container(config.trainer.callbacks) == [
        {"class_path": "a.B", "init_args": {"x": 2}},
        {"class_path": "c.D", "init_args": {}},
    ]


def test_a_file_of_code_is_looked_for_beside_the_config_that_names_it(tmp_path):
    code = write(tmp_path / "code.py", "class Model: ...\n")
    path = write(tmp_path / "a.yaml", "model: {class_path: code.py:Model}\n")
    assert load(path).model.class_path == f"{code}:Model"
    override = load(path, ["model.class_path=code.py:Other"])
    assert override.model.class_path == "code.py:Other", "the command line starts where one stands"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_step=3", "unknown key 'max_step'. Did you mean 'trainer.max_steps'?"),
        ("trainer.max_step=3", "unknown key 'trainer.max_step'. Did you mean 'trainer.max_steps'?"),
        ("run.max_steps=3", "unknown key 'run.max_steps'. Did you mean 'trainer.max_steps'?"),
        ("save_top_k=3", "unknown key 'save_top_k'. Did you mean 'run.checkpoint.save_top_k'?"),
        ("strategi.name=x", "unknown key 'strategi.name'. Did you mean 'strategy.name'?"),
        (
            "optimizer.schedular.class_path=x",
            (
                "unknown key 'optimizer.schedular.class_path'. "
                "Did you mean 'optimizer.scheduler.class_path'?"
            ),
        ),
        (
            "zzz=1",
            (
                "unknown key 'zzz'. "
                "The sections are model, data, trainer, strategy, optimizer, run and alerts."
            ),
        ),
        (
            "optimizer.zzz=1",
            (
                "unknown key 'optimizer.zzz'. "
                "optimizer has the keys class_path, init_args and scheduler."
            ),
        ),
        ("max_steps", "'max_steps' is not key=value. Write for example trainer.max_steps=1000."),
        ("=3", "'=3' is not key=value. Write for example max_steps=10."),
        (
            "max_steps=[1",
            (
                "max_steps=[1 is not valid YAML: did not find expected ',' or ']'. "
                "Quote a text with special characters, twice: max_steps='\"...\"'."
            ),
        ),
        (
            "max_steps=ten",
            (
                "trainer.max_steps=ten is not a whole number. "
                "Write for example trainer.max_steps=1000."
            ),
        ),
        (
            "max_steps=1.5",
            (
                "trainer.max_steps=1.5 is not a whole number. "
                "Write for example trainer.max_steps=1000."
            ),
        ),
        (
            "max_steps=true",
            (
                "trainer.max_steps=true is not a whole number. "
                "Write for example trainer.max_steps=1000."
            ),
        ),
        (
            "num_nodes=0",
            (
                "trainer.num_nodes=0 is not a whole number, at least 1. "
                "Write for example trainer.num_nodes=1."
            ),
        ),
        (
            "gradient_clip_val=high",
            (
                "trainer.gradient_clip_val=high is not a number or null. "
                "Write for example trainer.gradient_clip_val=1.0."
            ),
        ),
        (
            "enable_progress_bar=5",
            (
                "trainer.enable_progress_bar=5 is not true or false or null. "
                "Write for example trainer.enable_progress_bar=true."
            ),
        ),
        (
            "accelerator=cuda0",
            (
                "trainer.accelerator=cuda0 is not one of auto, cpu, cuda, gpu. "
                "Write for example trainer.accelerator=cuda."
            ),
        ),
        (
            "deterministic=wran",
            (
                "trainer.deterministic=wran is not true or false, warn or null. "
                "Write for example trainer.deterministic=warn."
            ),
        ),
        (
            "devices=0",
            (
                "trainer.devices=0 is not a number of ranks up to 65536, auto, or a list "
                "of devices. "
                "Write for example trainer.devices=2."
            ),
        ),
        (
            "devices=two",
            (
                "trainer.devices=two is not a number of ranks up to 65536, auto, or a list "
                "of devices. "
                "Write for example trainer.devices=2."
            ),
        ),
        (
            "max_time=12:00:00",
            (
                "trainer.max_time=12:00:00 is not days:hours:minutes:seconds in quotes. "
                "Write for example trainer.max_time=00:12:00:00."
            ),
        ),
        (
            "val_check_interval=0",
            (
                "trainer.val_check_interval=0 is not a number above 0, or a time in quotes. "
                "Write for example trainer.val_check_interval=500."
            ),
        ),
        (
            "run.checkpoint.filename='\"{step}-{val/loss}\"'",
            (
                "run.checkpoint.filename=\"{step}-{val/loss}\" is not a name without '/': "
                "resume=auto does not look into folders. "
                "Write for example run.checkpoint.filename='{epoch}-{step}'."
            ),
        ),
        (
            "run.name=a/b",
            (
                "run.name=a/b is not a name of letters, digits, '-', '_', '.'. "
                "Write for example run.name=my-run."
            ),
        ),
        (
            "trainer=3",
            "trainer=3 is not a section. Set a key of it, for example trainer.accelerator=cpu.",
        ),
        (
            "max_steps.more=3",
            (
                "unknown key 'trainer.max_steps.more'. "
                "trainer.max_steps is a single value: trainer.max_steps=1000."
            ),
        ),
        (
            "model.init_args.width.more=3",
            (
                "unknown key 'model.init_args.width.more'. "
                "model.init_args.width is a single value: model.init_args.width=4."
            ),
        ),
        (
            "model.init_args=3",
            "model.init_args=3 is not a mapping. Write for example model.init_args={}.",
        ),
        (
            "trainer.callbacks=[3]",
            (
                "trainer.callbacks.0=3 names no class. Write for example "
                "trainer.callbacks='[{class_path: lightning.pytorch.callbacks.Timer}]'."
            ),
        ),
        (
            "trainer.callbacks=[{class_path: a.B, init_arg: {}}]",
            (
                "unknown key 'trainer.callbacks.0.init_arg'. "
                "Did you mean 'trainer.callbacks.0.init_args'?"
            ),
        ),
        (
            "trainer.callbacks.0.init_args.x=3",
            (
                "unknown key 'trainer.callbacks.0.init_args.x': trainer.callbacks is empty. "
                "Set the whole list with trainer.callbacks='[{class_path: package.module.Class}]'."
            ),
        ),
        (
            "trainer.logger=false",
            "trainer.logger=false is not a list or null. Write for example trainer.logger=[].",
        ),
    ],
)
def test_a_wrong_override_is_one_line_with_the_nearest_right_one(config_file, override, message):
    assert line_of(config_file, [override]) == f"command line: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  class_path: a.B\n   init_args: {}\n", ":3:13: not valid YAML: mapping values"),
        ("model: {class_path: a.B\n", ":2:1: not valid YAML: "),
        ("model: {class_path: a.B}\nmodel: {}\n", ":2:1: not valid YAML: "),
        ("- a\n", " holds a list, but a config is a mapping with the sections model, data,"),
        (
            "model: {class_path: a.B}\ntrainer: {max_stpes: 3}\n",
            ": unknown key 'trainer.max_stpes'. Did you mean 'trainer.max_steps'?",
        ),
        (
            "model: {class_path: a.B}\ntrainer: {max_steps: many}\n",
            (
                ": trainer.max_steps=many is not a whole number. "
                "Write for example trainer.max_steps=1000."
            ),
        ),
        (
            "trainer: {max_steps: 3}\n",
            (
                ": model.class_path is missing. Write it into the file, or add "
                "model.class_path=package.module.Class."
            ),
        ),
        ("", ": model.class_path is missing. "),
        (
            "model: {class_path: a.B}\ntrainer: {max_steps: '${run.sede}'}\n",
            (
                ": trainer.max_steps cannot be resolved: Interpolation key 'run.sede' not found. "
                "Write a value instead, for example trainer.max_steps=1000."
            ),
        ),
        (
            "model: {class_path: a.B}\ntrainer: {max_steps: '${oc.env:NO_SUCH_VARIABLE}'}\n",
            ": trainer.max_steps cannot be resolved: ",
        ),
        ("model: {class_path: a.B}\nrun: {name: '???'}\n", ": run.name is missing. "),
        (
            "model: {class_path: a.B}\ntrainer: {max_steps: '${run.dir}'}\n",
            ": trainer.max_steps cannot be resolved: ",
        ),
        (
            "model: {class_path: a.B, init_args: {x: '${nothing:3}'}}\n",
            ": model.init_args.x cannot be resolved: Unsupported interpolation type nothing. ",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_begins_with_its_path(tmp_path, text, message):
    path = write(tmp_path / "wrong.yaml", text)
    assert line_of(path).startswith(f"{path}{message}")


def test_a_recipe_that_does_not_exist_names_the_nearest():
    names = line_of("dpp")
    assert names.startswith("There is no recipe 'dpp'. Did you mean 'ddp'?")


def test_a_file_that_does_not_exist_names_the_nearest_beside_it(config_file):
    missing = config_file.with_name("mien.yaml")
    assert line_of(missing) == (f"There is no config file {missing}. Did you mean {config_file}?")


def test_a_folder_is_no_config(config_file):
    assert line_of(config_file.parent) == (
        f"{config_file.parent} is a folder, not a config file. The folder has mine.yaml."
    )


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00model")
    assert line_of(path).startswith(f"{path} cannot be read: ")


def test_the_example_of_every_key_is_a_value_that_works(config_file):
    """The errors advise these values."""
    for key in all_keys():
        example = example_of(key)
        if example in {"...", "None", "null"}:
            continue
        text = f'"{example}"' if example.count(":") == 3 else example
        load(config_file, [f"{key}={text}"])


def test_every_key_says_what_it_is():
    import ast

    import boltmesh.configs.schema as schema

    tree = ast.parse(Path(schema.__file__).read_text())
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for before, after in zip(section.body, [*section.body[1:], None], strict=True):
            if isinstance(before, ast.AnnAssign) and "Section)" not in ast.unparse(before):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert said, f"{section.name}.{ast.unparse(before.target)} has no docstring"


def test_no_key_is_both_of_the_trainer_and_of_the_run():
    config = OmegaConf.structured(Config)
    assert not set(config.trainer) & set(config.run)


def test_every_argument_of_lightnings_trainer_is_a_key_or_left_out_for_a_reason():
    import inspect

    from lightning.pytorch import Trainer

    left_out = {
        "strategy": "a section of its own",
        "enable_checkpointing": "run.checkpoint.enabled",
        "default_root_dir": "run.dir and run.name",
        "plugins": "the strategy brings its own; precision is a key",
        "barebones": "takes away what the run's summary and checkpoints stand on",
        "model_registry": "uploads to Lightning's cloud",
    }
    arguments = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert arguments - {each.name for each in fields(TrainerSection)} == set(left_out)


def test_values_are_shown_as_they_are_written():
    assert [show(each) for each in (None, True, 1.5, "a")] == ["null", "true", "1.5", "a"]


@pytest.mark.parametrize(
    "text",
    [
        "{a: " * 400 + "1" + "}" * 400,
        "[" * 600 + "]" * 600,
        "9" * 5000,
        '"${oc.nope:1}"',
        "'${oc.decode:\"[1\"}'",
        "${run}",
    ],
    ids=["deep mapping", "deep list", "long number", "resolver", "decoded", "section"],
)
@pytest.mark.parametrize("key", ["run.name", "model.init_args.x", "strategy.name"])
def test_values_that_cannot_be_read_raise_nothing_else(tmp_path, config_file, key, text):
    inside = text
    for name in reversed(key.split(".")):
        inside = f"{{{name}: {inside}}}"
    for path, overrides in (
        (write(tmp_path / "other.yaml", inside), []),
        (config_file, [f"{key}={text}"]),
    ):
        with contextlib.suppress(ConfigError):  # some are texts
            load(path, overrides)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("strategy.name={a: 1}", "strategy.name={'a': 1} is not the name of a strategy. Write"),
        ("strategy={name: [bolt_ddp]}", "strategy.name=['bolt_ddp'] is not the name of a"),
        ("run.name='${oc.nope:1}'", "run.name cannot be resolved: Unsupported interpolation"),
        ("model.init_args.x=" + "[" * 600 + "]" * 600, "nested too deeply to be read"),
        ("max_steps=" + "9" * 5000, "Exceeds the limit (4300"),
        ("trainer.callbacks.²=1", "trainer.callbacks is empty"),
        ("run.name=\ud800", "surrogates not allowed"),
    ],
)
def test_odd_overrides_are_refused_with_the_reason(config_file, override, said):
    assert said in line_of(config_file, [override])


@pytest.mark.parametrize(
    ("text", "override", "found"),
    [
        ("strategy: {name: '???', stage: 2}", "strategy=bolt_ddp", {"name": "bolt_ddp"}),
        ("strategy: {name: '${oc.env:NO_SUCH}'}", "strategy=bolt_ddp", {"name": "bolt_ddp"}),
        ("strategy: {name: bolt_ddp}", "strategy.name=bolt_zero1", {"name": "bolt_zero1"}),
    ],
)
def test_an_open_name_is_overridden(tmp_path: Path, text: str, override: str, found: Any) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"model: {{class_path: '${{oc.env:NO_SUCH}}'}}\n{text}\n")
    config = load(path, ["model.class_path=a.B", override])
    assert config.model.class_path == "a.B"
    assert config.strategy == found
