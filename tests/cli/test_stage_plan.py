"""``boltmesh plan`` and ``--dry-run`` of a pipeline: stages, what ranks keep, expected bubble."""

import json
from typing import Any

import pytest
import torch

from boltmesh import cli
from boltmesh.configs.classes import build
from boltmesh.configs.load import load
from boltmesh.plan.stage_model import describe_stages
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.schedules.registry import closed_form_bubble

PIPELINE = ("pipeline_1f1b", "data.init_args.batch_size=16")
TINY = ("model.init_args.n_embd=32", "model.init_args.n_layer=6")


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert cli.run_command(["plan", *PIPELINE, *TINY, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["pipeline"]
    return found


def test_stages_hold_all_layers_once_in_their_order(capsys, workplace) -> None:
    found = plan(capsys, "--devices", "3")
    units = [name for stage in found["stages"] for name in stage["units"]]
    blocks = [f"blocks.{number}" for number in range(6)]
    assert units == ["token_embedding", "position_embedding", *blocks, "norm", "head"]
    assert sum(stage["cost_share"] for stage in found["stages"]) == pytest.approx(1.0)
    assert [stage["in_flight"] for stage in found["stages"]] == [3, 2, 1]
    assert found["rows"] == [2] * 8


def test_the_bubble_is_the_published_one_where_stages_are_equal(capsys, workplace) -> None:
    found = plan(capsys, "--devices", "3")
    assert found["even_bubble"] == pytest.approx(
        closed_form_bubble("1f1b", num_ranks=3, num_microbatches=8, stages_per_rank=1)
    )
    assert found["bubble"] > found["even_bubble"]  # the last stage has the head as well
    assert found["bubble"] == pytest.approx(sum(each["idle"] for each in found["ranks"]) / 3)


def test_what_ranks_keep_is_what_the_built_model_has(capsys, workplace) -> None:
    found = plan(
        capsys, "model.init_args.tie_weights=true", "optimizer.class_path=torch.optim.Adam"
    )
    config = load("pipeline_1f1b", [*TINY])
    arguments = config.model.init_args
    embedding = arguments.vocab_size * arguments.n_embd
    arguments.tie_weights = True
    built = build(config.model, "model", source="config")
    whole = sum(each.numel() for each in built.parameters())
    # Parameter, gradient, two moments in fp32; the tied weight is on both ranks.
    assert sum(each["kept_bytes"] for each in found["ranks"]) == 16 * (whole + embedding)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_activations_are_those_that_autograd_keeps(workplace) -> None:
    config = load("pipeline_1f1b", [*TINY, *PIPELINE[1:], "model.init_args.n_layer=2"])
    options = PipelineOptions(schedule="gpipe", microbatches=4)
    made, _, _ = describe_stages(config, options, 2, source="config")
    module = build(config.model, "model", source="config")
    tokens = torch.zeros(4, config.model.init_args.block_size, dtype=torch.long)
    kept: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in own:
            kept[at] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        module.training_step((tokens, tokens), 0)
    told = sum(each.activation_bytes or 0 for each in made.stages)
    # What code outside of layers keeps, the loss's, belongs to no layer.
    assert 0.8 * sum(kept.values()) < told <= sum(kept.values())


def test_a_dry_run_shows_them_too(capsys, workplace) -> None:
    assert cli.run_command(["fit", *PIPELINE, *TINY, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "GPT in 2 stages on 2 ranks: 1f1b, 8 microbatches of 2 rows" in shown
    assert "expected bubble" in shown
    assert "blocks.5, norm, head" in shown or "... head" in shown


def test_a_pipeline_is_no_row_among_those_that_shard(capsys, workplace) -> None:
    assert cli.run_command(["plan", "ddp"]) == 0
    assert "pipeline" not in capsys.readouterr().out
    assert cli.run_command(["plan", "ddp", "--strategy", "pipeline"]) == 0
    assert "stages on 2 ranks: 1f1b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["strategy.stages=3"], "strategy.stages=3 was asked of a job with 2 ranks"),
        (["strategy.schedule=zbw"], "Did you mean 'zbv'"),
        (["--devices", "12", "strategy.microbatches=16"], "the model has 10 parts"),
        (["data.class_path=null"], "stages are found by running a batch"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, said, capsys, workplace) -> None:
    assert cli.run_command(["plan", *PIPELINE, *TINY, *arguments]) == 2
    assert said in capsys.readouterr().err
