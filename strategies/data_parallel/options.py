"""Options of ``ZeROStrategy``, checked without a model or a device."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from boltmesh.errors import ConfigError
from boltmesh.strategies.cost_model.model import ShardingLayout

TIERS = ("cpu", "nvme")
"""Values of ``offload_optimizer`` and ``offload_parameters``."""

_PLACES = {None: "device", "cpu": "host", "nvme": "disk"}
"""Names of these tiers in the cost model; None is no offload."""

SHARES = ("host", "disk")
"""Keys of an ``offload_fraction`` that is a mapping."""

_BIAS_RATE = 1e-3
"""The rate of DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 4.2."""

ROWS_BYTES_FLOOR = 4096
"""Smaller tiles are not worth a collective."""


@dataclass(frozen=True)
class ZeroOptions:
    """The arguments of ``ZeROStrategy``; see there.

    Raises:
        ConfigError: When arguments contradict each other or a value does not exist.
    """

    stage: int = 3
    offload_optimizer: str | None = None
    offload_parameters: str | None = None
    offload_path: str | Path | None = None
    offload_fraction: float | Mapping[str, float] = 1.0
    tile_linear_bytes: int | None = None
    blocks: tuple[str, ...] | None = None
    shard_size: int | str | None = None
    expert: int | str | None = None
    """Ranks that have all experts together; None: experts are parameters like others."""
    expert_capacity: float | None = None
    """Rows of a rank's batch that an expert takes, relative to an even load; None: all."""
    expert_bias: str | float | None = None
    gather_for_generation: bool = False
    key: str = "stage"
    """The user's name of the stage argument, for messages."""

    @property
    def operand_divider(self) -> str | None:
        """The argument that makes ranks use a part of a layer's weight at a time, if any."""
        return None if self.tile_linear_bytes is None else "tile_linear_bytes"

    def __post_init__(self) -> None:
        if self.stage not in {1, 2, 3}:
            raise ConfigError(
                f"{self.key}={self.stage!r} is no ZeRO stage. Use 1 (optimizer state is "
                f"sharded), 2 (gradients too) or 3 (parameters too); without sharding use bolt_ddp."
            )
        self._check_tier("offload_optimizer", self.offload_optimizer)
        self._check_tier("offload_parameters", self.offload_parameters)
        self._check_offload()
        self._check_fraction()
        self._check_sizes()
        self._check_expert()
        self._check_generation()

    @property
    def expert_bias_rate(self) -> float | None:
        """Change of a router's correction bias per step; None: no change."""
        return _BIAS_RATE if self.expert_bias == "update" else self.expert_bias  # type: ignore[return-value]

    @property
    def has_offload(self) -> bool:
        """Whether anything leaves the device."""
        return self.offload_optimizer is not None or self.offload_parameters is not None

    @property
    def uses_disk(self) -> bool:
        """Whether anything goes to ``offload_path``."""
        return "nvme" in {self.offload_optimizer, self.offload_parameters}

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the optimizer state off the device, by tier: ``host``, ``disk``."""
        if self.offload_optimizer is None:
            return {}
        if isinstance(self.offload_fraction, Mapping):
            return {tier: float(share) for tier, share in self.offload_fraction.items()}
        tier = "disk" if self.offload_optimizer == "nvme" else "host"
        return {tier: float(self.offload_fraction)}

    def sharing(self, name: str | None = None) -> ShardingLayout:
        """Return these options as a layout of the cost model, by default with the stage's name."""
        return ShardingLayout(
            name or f"zero{self.stage}",
            self.stage,
            state_shares=self.shares,
            parameter_place=_PLACES[self.offload_parameters],
            tile_bytes=self.tile_linear_bytes,
        )

    def _check_generation(self) -> None:
        if not self.gather_for_generation:
            return
        if self.stage != 3:
            raise ConfigError(
                f"gather_for_generation=True keeps parameters gathered while text is generated, "
                f"and with {self.key}={self.stage} they always are. Leave it out, or use "
                f"{self.key}=3."
            )
        if self.tile_linear_bytes is not None or self.expert is not None:
            name = "expert" if self.tile_linear_bytes is None else "tile_linear_bytes"
            raise ConfigError(
                f"gather_for_generation=True gathers the whole model, and {name}="
                f"{getattr(self, name)!r} keeps parts of it divided. Leave one of the two out."
            )

    def _check_tier(self, name: str, value: str | None) -> None:
        if value is None or value in TIERS:
            return
        near = difflib.get_close_matches(str(value), TIERS, n=1, cutoff=0.3)
        hint = f"Did you mean {near[0]!r}?" if near else "Use 'cpu', 'nvme' or leave it out."
        raise ConfigError(f"{name}={value!r} does not exist. {hint}")

    def _check_offload(self) -> None:
        if self.offload_parameters is not None and self.stage != 3:
            raise ConfigError(
                f"offload_parameters={self.offload_parameters!r} streams parameters layer by "
                f"layer, and with {self.key}={self.stage} every rank keeps all of them gathered. "
                f"Use {self.key}=3, or leave offload_parameters out."
            )
        if self.offload_parameters is not None and self.offload_optimizer is None:
            raise ConfigError(
                f"offload_parameters={self.offload_parameters!r} without offload_optimizer would "
                f"leave the larger part, the optimizer state, on the device. "
                f"Set offload_optimizer={self.offload_parameters!r} too."
            )
        if self.uses_disk and self.offload_path is None:
            which = [
                f"{name}='nvme'"
                for name, value in (
                    ("offload_optimizer", self.offload_optimizer),
                    ("offload_parameters", self.offload_parameters),
                )
                if value == "nvme"
            ]
            raise ConfigError(
                f"{' and '.join(which)} writes to a disk, and offload_path does not say which. "
                f"Set offload_path to a folder on a fast local disk."
            )
        if self.offload_path is not None and not self.uses_disk:
            raise ConfigError(
                f"offload_path={str(self.offload_path)!r} is used by 'nvme' alone, and nothing is "
                f"offloaded there. Set offload_optimizer='nvme', or leave offload_path out."
            )

    def _check_fraction(self) -> None:
        fraction = self.offload_fraction
        if isinstance(fraction, Mapping):
            if unknown := sorted(set(fraction) - set(SHARES)):
                raise ConfigError(
                    f"offload_fraction has no tier {unknown[0]!r}. Use 'host' and 'disk'; the rest "
                    f"stays on the device."
                )
            shares = [float(share) for share in fraction.values()]
            if any(share < 0 for share in shares) or sum(shares) > 1 + 1e-9:
                raise ConfigError(
                    f"offload_fraction={dict(fraction)}: its values are fractions of the optimizer "
                    f"state, and their sum is at most 1."
                )
            if fraction.get("disk") and self.offload_optimizer != "nvme":
                raise ConfigError(
                    f"offload_fraction={dict(fraction)} puts state on a disk, and "
                    f"offload_optimizer={self.offload_optimizer!r} has none. "
                    f"Set offload_optimizer='nvme' and offload_path."
                )
        elif not 0 < float(fraction) <= 1:
            raise ConfigError(
                f"offload_fraction={fraction} is no share that leaves the device. Use a number "
                f"above 0 and up to 1, which offloads all of it."
            )
        if fraction != 1.0 and self.offload_optimizer is None:
            raise ConfigError(
                f"offload_fraction={fraction} divides offloaded optimizer state, and nothing is "
                f"offloaded. Set offload_optimizer='cpu', or leave offload_fraction out."
            )

    def _check_sizes(self) -> None:
        tile = self.tile_linear_bytes
        if tile is not None and self.stage != 3:
            raise ConfigError(
                f"tile_linear_bytes={tile} gathers a layer tile by tile, and with "
                f"{self.key}={self.stage} layers stay gathered. Use {self.key}=3."
            )
        if tile is not None and tile < ROWS_BYTES_FLOOR:
            raise ConfigError(
                f"tile_linear_bytes={tile} would gather a layer in crumbs. Use at least "
                f"{ROWS_BYTES_FLOOR}; 256 MiB is {256 << 20}."
            )
        if isinstance(self.shard_size, str) and self.shard_size != "node":
            raise ConfigError(
                f"shard_size={self.shard_size!r} is no number of ranks. Use a number, or 'node' "
                f"for the ranks of one host."
            )
        if isinstance(self.shard_size, int) and self.shard_size < 1:
            raise ConfigError(f"shard_size={self.shard_size} holds no rank. Use 1 or more.")

    def _check_expert(self) -> None:
        expert = self.expert
        for name in ("expert_capacity", "expert_bias"):
            value = getattr(self, name)
            if value is not None and expert is None:
                raise ConfigError(
                    f"{name}={value!r} is about experts that are divided. Set expert too, or leave "
                    f"{name} out."
                )
            is_right = isinstance(value, int | float) and value > 0
            if value is not None and not is_right and (name, value) != ("expert_bias", "update"):
                instead = "'update', or a step above 0" if name == "expert_bias" else "1.25"
                raise ConfigError(f"{name}={value!r} does not exist. Use {instead}.")
        if expert is None:
            return
        if isinstance(expert, str) and expert != "node":
            raise ConfigError(
                f"expert={expert!r} is no number of ranks. Use a number, or 'node' for the ranks "
                f"of one host."
            )
        if isinstance(expert, int) and expert < 1:
            raise ConfigError(f"expert={expert} holds no rank. Use 2 or more, or leave it out.")
        if self.tile_linear_bytes is not None:
            raise ConfigError(
                f"expert={expert!r} keeps experts on their ranks, and tile_linear_bytes="
                f"{self.tile_linear_bytes} is not possible beside it yet. Leave one of the two out."
            )
