"""The section ``alerts``: what it takes, what it refuses, and how it reaches who watches."""

import pytest
from omegaconf import OmegaConf

from boltmesh.configs.load import load
from boltmesh.errors import ConfigError
from boltmesh.telemetry.snapshot import AlertThresholds
from tests.cli.conftest import TINY


def thresholds(*overrides):
    return AlertThresholds(**load(TINY, overrides).alerts)


def test_a_config_that_says_nothing_has_the_thresholds_of_a_script():
    assert thresholds() == AlertThresholds()


def test_the_section_has_every_threshold_and_no_other_key():
    assert set(load(TINY).alerts) == set(AlertThresholds.__struct_fields__)


def test_each_threshold_can_be_set_and_switched_off():
    changed = thresholds(
        "alerts.loss_not_finite=false",
        "alerts.throughput_drop=0.25",
        "alerts.memory_share=null",
        "alerts.temperature_celsius=85",
        "alerts.stall_s=null",
        "alerts.job_failed=false",
    )
    assert changed == AlertThresholds(
        loss_not_finite=False,
        throughput_drop=0.25,
        memory_share=None,
        temperature_celsius=85.0,
        stall_s=None,
        job_failed=False,
    )


def test_a_file_can_set_them(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"{TINY.read_text()}\nalerts: {{stall_s: 600, throughput_drop: null}}\n")
    found = load(path).alerts
    assert (found.stall_s, found.throughput_drop, found.memory_share) == (600, None, 0.97)


def test_the_printed_config_shows_them():
    text = OmegaConf.to_yaml(load(TINY, ["alerts.stall_s=30"]))
    assert "alerts:\n  loss_not_finite: true\n" in text
    assert "  stall_s: 30.0\n" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "alerts.throughput_drop=50",
            (
                "alerts.throughput_drop=50 is not a number or null, at least 0.01 and at most 1. "
                "Write for example alerts.throughput_drop=0.5."
            ),
        ),
        (
            "alerts.memory_share=0",
            (
                "alerts.memory_share=0 is not a number or null, at least 0.01 and at most 1. "
                "Write for example alerts.memory_share=0.97."
            ),
        ),
        (
            "alerts.stall_s=.nan",
            (
                "alerts.stall_s=nan is not a number or null, at least 1. "
                "Write for example alerts.stall_s=120."
            ),
        ),
        (
            "alerts.stall_s=2m",
            "alerts.stall_s=2m is not a number or null. Write for example alerts.stall_s=120.",
        ),
        (
            "alerts.job_failed=null",
            (
                "alerts.job_failed=null is not true or false. "
                "Write for example alerts.job_failed=true."
            ),
        ),
        (
            "alerts.temperature=80",
            "unknown key 'alerts.temperature'. Did you mean 'alerts.temperature_celsius'?",
        ),
        ("alert.stall_s=80", "unknown key 'alert.stall_s'. Did you mean 'alerts.stall_s'?"),
        (
            "alerts=off",
            (
                "alerts=false is not a section. Set a key of it, for example "
                "alerts.loss_not_finite=true."
            ),
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_what_can(override, message):
    with pytest.raises(ConfigError) as caught:
        load(TINY, [override])
    assert str(caught.value) == f"command line: {message}"


def test_they_reach_the_strategy_which_tells_who_watches():
    from boltmesh.launch.placement import place_ranks
    from boltmesh.launch.rank import Rank
    from boltmesh.launch.stopping import StopSwitch
    from boltmesh.run import RunBuilder

    config = load(TINY, ["alerts.stall_s=7", "devices=1"])
    rank = Rank(None, None, StopSwitch())
    builder = RunBuilder(config, "fit", place_ranks(config), rank, source="tiny")
    strategy = builder.build_strategy()
    assert strategy.alerts == AlertThresholds(stall_s=7.0)
    # So does every other value of the config that is set, by its whole key.
    assert strategy.settings["data.class_path"] == config.data.class_path
    assert strategy.settings["trainer.max_steps"] == config.trainer.max_steps
    assert not [key for key in strategy.settings if key.startswith(("alerts.", "run.name"))]
