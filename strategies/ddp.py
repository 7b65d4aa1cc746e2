"""``DDPStrategy``: every rank holds the whole model, and gradients are averaged."""

import difflib
import warnings
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.data_parallel.ddp import COMPRESSIONS, DdpAxis, DdpOptions
from boltmesh.strategies.engine import MeshStrategy


class DDPStrategy(MeshStrategy):
    """Data parallelism over torch's ``DistributedDataParallel``.

    Results are those of one process with a batch that is larger by the number of ranks. Memory per
    rank: the whole model, its gradients and its optimizer state. Traffic per optimizer step and
    rank: one all-reduce of the gradients, however many batches are accumulated.

    Args:
        bucket_cap_mb: Gradients are reduced in buckets of this size, MiB, as the backward pass
            makes them: larger ones use the links better, smaller ones start earlier.
        static_graph: Promise that every step uses the same parameters in the same order. Allows
            reentrant activation checkpointing and finds unused parameters by itself.
        find_unused_parameters: Search each step's graph for parameters that it does not use.
            Needed when a step leaves some out; costs a walk over the graph.
        gradient_as_bucket_view: Make ``.grad`` views of the buckets that are reduced. Saves a copy
            and, unless batches are accumulated, 4 bytes per fp32 parameter. Each backward pass then
            overwrites the memory of earlier ``.grad``, so by default it is used only if no user
            code can read gradients: with automatic optimisation, without hooks between the
            backward pass and the step.
        gradient_compression: None sends gradients as they are; ``"bf16"`` sends them in bf16, half
            the bytes of fp32 and 8 bits of mantissa; ``"powersgd"`` sends low-rank factors with
            error feedback. Both are torch's own hooks, and both change the numbers.
        powersgd_rank: Rank of the factors: a higher one is closer to the gradient, and larger.
        powersgd_start_step: Uncompressed steps before PowerSGD begins, at least 2.
        **kwargs: As for ``MeshStrategy``: ``timeout_s``, ``telemetry``, ``seed``,
            ``activation_checkpointing``, ``process_group_backend``, ``start_method`` and
            Lightning's own.

    Raises:
        ConfigError: When options contradict each other or do not exist.

    Source: PowerSGD, Vogels et al. 2019, https://arxiv.org/abs/1905.13727
    """

    strategy_name = "bolt_ddp"

    def __init__(
        self,
        *,
        bucket_cap_mb: float = 25.0,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool | None = None,
        gradient_compression: str | None = None,
        powersgd_rank: int = 1,
        powersgd_start_step: int = 1000,
        **kwargs: Any,
    ) -> None:
        options = DdpOptions(
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            gradient_compression=gradient_compression,
            powersgd_rank=powersgd_rank,
            powersgd_start_step=powersgd_start_step,
        )
        _check(options)
        self.options = options
        super().__init__(axes=[DdpAxis(options)], **kwargs)

    @property  # type: ignore[explicit-override]
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        scaler = getattr(precision_plugin, "scaler", None)
        if (
            isinstance(precision_plugin, MixedPrecision)
            and scaler is not None
            and self.options.gradient_compression == "powersgd"
        ):
            raise ConfigError(
                "gradient_compression='powersgd' keeps what it could not send for the next step, "
                "and with precision='16-mixed' one overflow would stay in there for good. "
                "Use precision='bf16-mixed'."
            )
        MeshStrategy.precision_plugin.fset(self, precision_plugin)  # type: ignore[attr-defined]

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only, **kwargs)
        if self.is_fitting and self.options.gradient_compression == "powersgd":
            warnings.warn(
                f"{checkpoint_path} does not hold what PowerSGD had not sent yet: its error "
                f"feedback and its {self.options.powersgd_start_step} uncompressed steps start "
                f"again, so this run differs a little from one that was never stopped.",
                stacklevel=2,
            )
        return checkpoint


# Lightning's rules for its own DDP strategy, applied by class alone (compiled modules, automatic
# samplers), hold for this one, which runs the same DistributedDataParallel.
LightningDDPStrategy.register(DDPStrategy)


def _check(options: DdpOptions) -> None:
    chosen = options.gradient_compression
    if chosen is not None and chosen not in COMPRESSIONS:
        near = difflib.get_close_matches(str(chosen), COMPRESSIONS, n=1, cutoff=0.3)
        hint = f"Did you mean {near[0]!r}?" if near else f"Use {' or '.join(COMPRESSIONS)}."
        raise ConfigError(f"gradient_compression={chosen!r} does not exist. {hint}")
    if options.bucket_cap_mb <= 0:
        raise ConfigError(
            f"bucket_cap_mb={options.bucket_cap_mb} holds no gradient. Use 25, torch's default."
        )
    if options.static_graph and options.find_unused_parameters:
        raise ConfigError(
            "static_graph=True finds unused parameters by itself, and find_unused_parameters=True "
            "would search for them in every step in vain. Drop find_unused_parameters."
        )
    if chosen != "powersgd":
        return
    if options.powersgd_rank < 1:
        raise ConfigError(f"powersgd_rank={options.powersgd_rank} sends nothing. Use 1 or more.")
    if options.powersgd_start_step < 2:
        raise ConfigError(
            f"powersgd_start_step={options.powersgd_start_step} is too early: DDP rebuilds its "
            f"buckets in the first step, and error feedback needs them fixed. Use 2 or more."
        )
