"""The strategies that a plan compares: by their names, and the config's own by its options."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from boltmesh.configs.advice import nearest
from boltmesh.errors import ConfigError
from boltmesh.strategies.data.shard_options import ShardOptions
from boltmesh.strategies.planner.layout import Sharing
from boltmesh.strategies.registry import Entry
from boltmesh.strategy_arguments import SHARED

PREFIX = "bolt_"


def options_of(entry: Entry, given: Mapping[str, Any]) -> ShardOptions | None:
    """The options of a ZeRO strategy; None for plain data parallelism."""
    if entry.class_name != "ZeROStrategy":
        return None
    known = {each.name for each in fields(ShardOptions)}
    chosen = {key: value for key, value in {**entry.arguments, **given}.items() if key in known}
    if chosen.get("blocks") is not None:
        chosen["blocks"] = tuple(chosen["blocks"])
    return ShardOptions(**chosen)


def own_options(entry: Entry, given: Mapping[str, Any], source: str) -> ShardOptions | None:
    """The config's own, whose mistakes are named as in the config."""
    if entry.class_name == "ZeROStrategy":
        known = ["name", *(each.name for each in fields(ShardOptions)), *SHARED]
        for key in given:
            if key not in known:
                guess = nearest(key, known)
                hint = f" Did you mean 'strategy.{guess}'?" if guess else ""
                raise ConfigError(f"{source}: unknown key 'strategy.{key}'.{hint}")
    try:
        return options_of(entry, given)
    except ConfigError as error:
        raise ConfigError(f"{source}: strategy.{error}") from error


def sharing_of(name: str, entry: Entry, given: Mapping[str, Any]) -> Sharing:
    """What a strategy's name and options mean for the planner."""
    short = name.removeprefix(PREFIX)
    options = options_of(entry, given)
    if options is None:
        return Sharing(short, 0, keeps_in_buckets=given.get("gradient_as_bucket_view"))
    places = {None: "device", "cpu": "host", "nvme": "disk"}
    return Sharing(
        short,
        options.stage,
        state_shares=options.shares,
        parameter_place=places[options.offload_parameters],
        tile_bytes=options.tile_linear_bytes,
    )
