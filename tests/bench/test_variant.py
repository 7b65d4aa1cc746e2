"""What may be compared, and what is added to the command line for it."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from boltmesh.bench.variant import parse_variants
from boltmesh.errors import ConfigError


def config(name: str = "bolt_zero3", **arguments: Any) -> Any:
    return OmegaConf.create({"strategy": {"name": name, **arguments}})


def test_strategies_have_arguments_conditions_and_other_keys() -> None:
    text = "bolt_ddp, bolt_ddp:no_p2p,bolt_pipeline+microbatches=8+stages=[1,2],one_process"
    ddp, no_p2p, pipeline, one = parse_variants(text)
    assert (ddp.label, ddp.strategy, ddp.settings) == ("bolt_ddp", "bolt_ddp", ())
    assert not ddp.environment
    assert no_p2p.environment == {"NCCL_P2P_DISABLE": "1"}
    assert pipeline.settings == ("strategy.microbatches=8", "strategy.stages=[1,2]")
    assert (one.strategy, one.settings) == ("bolt_ddp", ("trainer.devices=1",))
    (wide,) = parse_variants("bolt_zero2+trainer.devices=4+data.init_args.batch_size=2")
    assert wide.settings == ("trainer.devices=4", "data.init_args.batch_size=2")


def test_arguments_of_the_config_are_those_of_its_own_strategy() -> None:
    given = ["strategy.blocks=[a]", "max_steps=3"]
    loaded = config(stage=3, timeout_s=60, activation_checkpointing="full")
    own, other = parse_variants("bolt_zero3,bolt_ddp+bucket_cap_mb=1")
    assert own.overrides(loaded, given) == [*given, "strategy.telemetry=true"]
    assert other.overrides(loaded, given) == [
        "max_steps=3",
        "strategy.name=bolt_ddp",
        "strategy.activation_checkpointing=full",
        "strategy.timeout_s=60",
        "strategy.bucket_cap_mb=1",
        "strategy.telemetry=true",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bolt_dpp", "there is no strategy 'bolt_dpp'. Did you mean bolt_ddp?"),
        ("bolt_ddp:p2p", "':p2p' is not known. Write :no_p2p"),
        ("bolt_ddp+fast", "'fast' is no KEY=VALUE"),
        ("bolt_ddp++", "cannot be read"),
        (" , ", "names none"),
        ("bolt_ddp,bolt_ddp", "names bolt_ddp twice. Use --rounds"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_variants(text)
    assert words in str(refused.value)


def test_what_these_devices_cannot_do_is_known_before() -> None:
    plain, no_p2p, replicated = parse_variants("bolt_ddp,bolt_ddp:no_p2p,replicated")
    assert plain.obstacle("cpu", 1) is None
    assert "the ranks are on the CPU" in str(no_p2p.obstacle("cpu", 2))
    assert "there is one" in str(no_p2p.obstacle("cuda", 1))
    assert no_p2p.obstacle("cuda", 2) is None
    assert "this is the CPU" in str(replicated.obstacle("cpu", 2))
    assert "one CUDA device" in str(replicated.obstacle("cuda", 1))
    assert replicated.obstacle("cuda", 2) is None
    assert replicated.overrides(config(), ["max_steps=3"], [2, 3]) == [
        "max_steps=3",
        "strategy.name=bolt_replicated",
        "trainer.devices=[2]",
        "strategy.devices=[2,3]",
        "strategy.telemetry=true",
    ]


def test_a_recipe_stands_for_several_rows() -> None:
    found = parse_variants("bolt_zero3,peer_to_peer")
    assert [each.label for each in found] == [
        "bolt_zero3", "replicated", "bolt_ddp", "bolt_ddp:no_p2p"
    ]  # fmt: skip
