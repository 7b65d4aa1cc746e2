"""Strategies that are compared: their names, with arguments and other conditions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from boltmesh.configs.advice import name_choices, nearest
from boltmesh.configs.load import without_section
from boltmesh.errors import ConfigError
from boltmesh.strategies.registry import STRATEGIES
from boltmesh.strategy_arguments import KEPT_KEYS

NO_P2P = "no_p2p"
ONE_PROCESS = "one_process"
REPLICATED = "replicated"
OWN_NAMES = {ONE_PROCESS: "bolt_ddp", REPLICATED: "bolt_replicated"}
"""Rows that go by names of their own, and their strategies."""

RECIPES = {"peer_to_peer": f"{REPLICATED},bolt_ddp,bolt_ddp:{NO_P2P}"}
"""Names for several rows at once."""
PLANNED = "planned"
"""The name for the three best layouts of ``boltmesh plan auto``."""

REPLICATED_STRATEGY = OWN_NAMES[REPLICATED]

_NAME = re.compile(r"(?P<name>[^:+]+)(:(?P<condition>[^:+]*))?(?P<settings>(\+[^+]+)*)")


@dataclass(frozen=True)
class Variant:
    """One row."""

    label: str
    """As the user wrote it."""
    strategy: str
    settings: tuple[str, ...] = ()
    """``key=value``; keys without a section are arguments of the strategy."""
    without_p2p: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = False
    """``settings`` are all ``key=value``, those of the user that hold for it among them."""

    def overrides(
        self, config: Any, given: Sequence[str], devices: Sequence[int] = (0,)
    ) -> list[str]:
        """Return the arguments that are added to the command line of ``boltmesh fit``.

        Args:
            config: As it is loaded with ``given``.
            given: ``key=value`` of the user, for the config's own strategy.
            devices: Devices of the ranks in the config.
        """
        if self.is_whole:
            return [*self.settings, "strategy.telemetry=true"]
        if self.strategy == config.strategy.name:
            own = list(given)
        else:
            own = without_section(given, "strategy")
            own.append(f"strategy.name={self.strategy}")
            kept = {key: config.strategy.get(key) for key in KEPT_KEYS}
            own += [f"strategy.{key}={value}" for key, value in kept.items() if value is not None]
        if self.strategy == REPLICATED_STRATEGY:
            copies = ",".join(map(str, devices))
            own += [f"trainer.devices=[{devices[0]}]", f"strategy.devices=[{copies}]"]
        return [*own, *self.settings, "strategy.telemetry=true"]

    def obstacle(self, accelerator: Literal["cpu", "cuda"], num_devices: int) -> str | None:
        """Why this cannot be on these devices, where that is known before anything is started."""
        if self.strategy == REPLICATED_STRATEGY and (accelerator == "cpu" or num_devices < 2):
            devices = "the CPU" if accelerator == "cpu" else "one CUDA device"
            return f"one process over several devices needs CUDA devices, and this is {devices}"
        if self.without_p2p and accelerator == "cpu":
            return "peer-to-peer transfers are between CUDA devices, and the ranks are on the CPU"
        if self.without_p2p and num_devices < 2:
            return "peer-to-peer transfers need two devices, and there is one"
        return None


def parse_variants(text: str) -> list[Variant]:
    """Read ``bolt_ddp,bolt_ddp:no_p2p,bolt_pipeline+microbatches=8``.

    Raises:
        ConfigError: For a name that there is not, or a form that cannot be read.
    """
    names = [each.strip() for each in _split(text) if each.strip()]
    variants = [
        _parse(one)
        for each in names
        for one in (RECIPES[each].split(",") if each in RECIPES else [each])
    ]
    if not variants:
        raise ConfigError("--strategies names none. Write --strategies bolt_ddp,bolt_zero3.")
    labels = [each.label for each in variants]
    if twice := next((each for each in labels if labels.count(each) > 1), None):
        raise ConfigError(f"--strategies names {twice} twice. Use --rounds to repeat them all.")
    return variants


def _parse(text: str) -> Variant:
    found = _NAME.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--strategies: {text!r} cannot be read. Write NAME, NAME:{NO_P2P} or NAME+KEY=VALUE."
        )
    name, condition = found["name"], found["condition"]
    if text == PLANNED:
        return Variant(label=text, strategy=text)
    if name not in STRATEGIES and name not in OWN_NAMES:
        known = [*STRATEGIES, *OWN_NAMES, *RECIPES, PLANNED]
        guess = nearest(name, known)
        hint = f"Did you mean {guess}?" if guess else f"Use {name_choices(known)}."
        raise ConfigError(f"--strategies: there is no strategy '{name}'. {hint}")
    if condition not in {None, NO_P2P}:
        raise ConfigError(f"--strategies: {text}: ':{condition}' is not known. Write :{NO_P2P}.")
    settings = [each for each in found["settings"].split("+") if each]
    for each in settings:
        key, equals, _ = each.partition("=")
        if not (key and equals):
            raise ConfigError(f"--strategies: {text}: {each!r} is no KEY=VALUE.")
    named = [each if "." in each.partition("=")[0] else f"strategy.{each}" for each in settings]
    if name == ONE_PROCESS:
        named = ["trainer.devices=1", *named]
    return Variant(
        label=text,
        strategy=OWN_NAMES.get(name, name),
        settings=tuple(named),
        without_p2p=condition == NO_P2P,
        environment={"NCCL_P2P_DISABLE": "1"} if condition == NO_P2P else {},
    )


def _split(text: str) -> list[str]:
    """At commas that are in no brackets, as values may be lists."""
    return re.split(r",(?![^\[\]{}]*[\]}])", text)
