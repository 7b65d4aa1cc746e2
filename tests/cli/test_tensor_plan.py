"""``boltmesh plan`` and ``--dry-run`` of tensor parallelism: what is divided, and why."""

import json
from typing import Any

import pytest

from boltmesh import cli
from boltmesh.configs.classes import build
from boltmesh.configs.load import load
from boltmesh.plan.tensor_plan import TensorSummary, write_tensor
from boltmesh.strategies.tensor.planning import make_plan
from tests.support.planned import analysed

TINY = ("model.init_args.n_embd=32", "model.init_args.n_layer=2", "data.init_args.batch_size=4")
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")


def summary() -> TensorSummary:
    made = make_plan(analysed("gpt_fused"), 2)
    return TensorSummary("GPT", made, 4000, 2000, notes=("a note that is a sentence",))


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert cli.run_command(["plan", "tensor", *TINY, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["tensor"]
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_what_a_rank_keeps_is_its_share_and_what_is_whole(capsys, workplace, size) -> None:
    found = plan(capsys, "--devices", str(size))
    built = build(load("tensor", [*TINY]).model, "model", source="config")
    sizes = {name: 4 * each.numel() for name, each in built.named_parameters()}
    divided = found["plan"]["sharded"]
    assert found["whole_bytes"] == sum(sizes.values())
    assert found["rank_bytes"] == sum(
        size_of / size if name in divided else size_of for name, size_of in sizes.items()
    )
    assert {name for name in sizes if name not in divided} == {
        each["name"] for each in found["plan"]["whole"]
    }
    assert "blocks.1.attention.qkv.weight" in divided
    assert "head.weight" in divided


@pytest.mark.full
def test_heads_that_do_not_divide_leave_attention_whole_and_say_so(capsys, workplace) -> None:
    found = plan(capsys, "--devices", "3", "model.init_args.n_embd=48")
    whole = {each["name"]: each["why"] for each in found["plan"]["whole"]}
    assert "4" in whole["blocks.0.attention.qkv.weight"]
    assert "3" in whole["blocks.0.attention.qkv.weight"]
    assert "blocks.0.up.weight" in found["plan"]["sharded"]


@pytest.mark.parametrize("size", ["-2", "0"])
def test_a_size_that_a_run_refuses_is_refused(capsys, workplace, size) -> None:
    assert cli.run_command(["plan", "tensor", *TINY, f"strategy.size={size}"]) == 2
    assert f"strategy.size={size} holds no rank" in capsys.readouterr().err


def test_a_dry_run_prints_the_table(capsys, workplace, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.run_command(["fit", "tensor", *TINY, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "GPT over 2 ranks: each keeps" in shown
    assert "blocks.*.attention.out.weight  row of dim 1: 4x8" in shown
    assert "layer_norm in blocks.*.norm_1 needs it whole" in shown
    assert all(len(line) <= 100 for line in shown.split("GPT over")[1].splitlines())
    assert not list(workplace.iterdir()), "looking writes nothing"


@pytest.mark.parametrize("columns", [200, 160, 120, 100, 80, 60, 40])
def test_the_table_is_no_wider_than_the_terminal(columns) -> None:
    shown = write_tensor(summary(), columns)
    assert max(map(len, shown.splitlines())) <= columns
    flat = " ".join(shown.split())
    for words in ("column of dim 0: 4x16 + 4x16 + 4x16", "sum backward", "sum forward", "whole",
                  "needs it whole", "blocks.*.attention.qkv.weight",
                  "192x64"):  # fmt: skip
        assert words in flat
    # What a step asks for is in the table where there is room, else below it; never twice.
    assert flat.count("in every step") == 1
    assert ("requested in every step:" in flat) == (columns < 140)


def test_the_terminal_decides_on_the_width(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert write_tensor(summary()) == write_tensor(summary(), 60)
    monkeypatch.setenv("COLUMNS", "7")
    assert write_tensor(summary()) == write_tensor(summary(), 40)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["strategy.size=3"], "strategy.size=3 does not divide the 2 ranks of a host"),
        (["strategy.plan={nothing.*: column}"], "nothing.*"),
        pytest.param(
            ["strategy.plan={blocks.*.up.weight: sideways}"], "'sideways'", marks=pytest.mark.full
        ),
        (["data.class_path=null"], "there is no batch"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(capsys, workplace, arguments, said) -> None:
    assert cli.run_command(["plan", "tensor", *TINY, *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_what_the_config_says_of_a_parameter_is_planned(capsys, workplace) -> None:
    found = plan(capsys, "strategy.plan={blocks.*.up.weight: whole}")
    assert "blocks.0.up.weight" not in found["plan"]["sharded"]
    assert "blocks.0.down.weight" not in found["plan"]["sharded"]
