"""Describes a config's model without its memory: built from fake tensors, run once for a batch.

Fake tensors have shapes and types and no data, so a model of any size is built in seconds by its
own code, and its ``training_step`` shows what autograd would keep.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import Self

from boltmesh.configs.classes import build
from boltmesh.errors import ConfigError
from boltmesh.launch.log_filters import quiet_lightning
from boltmesh.plan.dry_step import DryStep, StepCounts, put_stand_ins, short_error
from boltmesh.plan.equal_blocks import equal_blocks
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing, Recompute
from boltmesh.strategies.cost_model.model import (
    Activations,
    ModelShape,
    TensorShape,
    UnitShape,
    widths_of,
)
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.units import find_units, full_precision_modules
from boltmesh.strategies.dry_run.step import rare_garbage_collection
from boltmesh.strategies.lightning_compat.trainer import (
    module_keeps_gradients,
    module_reads_gradients,
)
from boltmesh.strategies.torch_compat.modules import swapped_state
from boltmesh.strategies.torch_compat.tensors import (
    FakeTensorMode,
    fake_tensors,
    make_fake,
    tree_leaves,
    tree_map,
)

T = TypeVar("T")

_DTYPES = {
    "16": torch.float16,
    "32": torch.float32,
    "64": torch.float64,
    "bf16": torch.bfloat16,
}
"""Dtype of autocast by the beginning of a precision's name."""


@dataclass(frozen=True)
class NumberTypes:
    """Types in which a model's numbers are stored and computed."""

    stored: torch.dtype
    """Type of parameters, and of the floats of a batch."""
    cast: torch.dtype | None
    """Type in which autocast computes; None without autocast."""

    @classmethod
    def of(cls, precision: str) -> Self:
        """Return the types of a Trainer's ``precision``.

        Raises:
            ConfigError: Where they depend on more than its name.
        """
        is_autocast = widths_of(precision).is_autocast
        named = _DTYPES[precision.partition("-")[0]]
        return cls(torch.float32, named) if is_autocast else cls(named, None)

    @property
    def is_autocast(self) -> bool:
        """Whether parameters are computed in another type than they are stored in."""
        return self.cast is not None


def describe_model(
    config: DictConfig,
    options: ZeroOptions | None,
    *,
    source: str,
    recompute: Recompute | None = None,
) -> tuple[ModelShape, Optimizer | None, tuple[str, ...]]:
    """Build the model without memory, and describe it.

    Args:
        config: The whole.
        options: Options of a ZeRO strategy; None for another strategy.
        source: The config's file, for errors.
        recompute: Operators that blocks compute again in the backward pass.

    Returns:
        The model; the optimizer that it makes, None where it makes it only beside a Trainer; and
        what was assumed or not found out.

    Raises:
        ConfigError: When the model's class or arguments are wrong.
    """
    quiet_lightning()
    types = NumberTypes.of(config.trainer.precision)
    batch, complaint = first_batch(config, source)
    key = "fake model", OmegaConf.to_yaml(config.model, resolve=True), types
    mode, module, missing = kept(key, lambda: _built_in_mode(config, types, source))
    notes = [*missing]
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module without a Trainer
        equal = equal_blocks(module)
        recomputation = ActivationCheckpointing(recompute)
        recomputation.put_on(module)
        blocks = {str(at): each for at, each in enumerate(recomputation.blocks)}
        selective = blocks if recompute == "selective" else ()
        measured = DryStep(selective=selective, equal=equal)
        if complaint is None:
            fake_batch = tree_map(faked(mode, types.stored), batch)
            with measured.attributing(blocks):
                complaint = measured.run(module, fake_batch, types.cast)
        recomputation.take_off()
        for each in module.parameters():
            each.grad = None
        optimizer = own_optimizer(module)
    if complaint is not None:
        notes.append(f"activations are not known: {complaint}")
    how = "counted by running training_step on one batch of the data, without memory"
    counts = measured.counts if complaint is None else None
    return shape_of_model(module, options, types, counts, how), optimizer, tuple(notes)


def count_on_fakes(
    measured: DryStep, module: LightningModule, batch: Any, types: NumberTypes
) -> str | None:
    """Count a step with fake tensors in place of a module's own, see ``DryStep.run``."""
    mode = fake_tensors()
    named = [*module.named_parameters(), *module.named_buffers()]
    swapped = {name: make_fake(each, mode) for name, each in named}
    with mode, swapped_state(module, swapped):
        return measured.run(module, tree_map(faked(mode, types.stored), batch), types.cast)


def shape_of_model(
    module: LightningModule,
    options: ZeroOptions | None,
    types: NumberTypes,
    counts: StepCounts | None,
    how: str = "counted",
) -> ModelShape:
    """Describe a module by the counts of its step.

    Args:
        module: The module.
        options: Options of a ZeRO strategy; None for another strategy.
        types: Types of its numbers.
        counts: Counts of a batch; None where it cannot be run.
        how: How it was counted, as text.
    """
    known = counts or StepCounts()
    activations = Activations(known.saved_bytes, known.transient_bytes, how, known.elsewhere)
    return ModelShape(
        type(module).__name__,
        _shapes_of_units(module, options, known.cast_names, is_autocast=types.is_autocast),
        buffer_bytes=sum(each.numel() * each.element_size() for each in module.buffers()),
        activations=None if counts is None else activations,
        forward_flops=None if counts is None else known.flops,
        work=None if counts is None else known.work,
        chosen_widths=known.chosen_widths,
        reads_gradients=module_reads_gradients(module),
        keeps_gradients=module_keeps_gradients(module),
    )


@dataclass(frozen=True)
class StandInModel:
    """A config's model of almost no memory, with a batch of its data."""

    module: LightningModule
    batch: Any
    types: NumberTypes
    notes: list[str]


@contextlib.contextmanager
def stand_in_model(config: DictConfig, source: str, *, needs: str) -> Iterator[StandInModel]:
    """Build a model of stand-ins, and ignore within what a module without a Trainer warns of.

    Args:
        config: The whole.
        source: Its file, for errors.
        needs: What a batch is for, as in "experts are found".

    Raises:
        ConfigError: When the model cannot be built, or its data give no batch.
    """
    quiet_lightning()
    batch, complaint = first_batch(config, source)
    if complaint is not None:
        raise ConfigError(f"{source}: {needs} by a batch, and {complaint}.")
    types = NumberTypes.of(config.trainer.precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fake_tensors():
            module, notes = build_fake(config, types, source)
        put_stand_ins(module)
        yield StandInModel(module, batch, types, notes)


def _shapes_of_units(
    module: LightningModule,
    options: ZeroOptions | None,
    multiplied: Collection[str],
    *,
    is_autocast: bool,
) -> tuple[UnitShape, ...]:
    """Return the units that the strategy gathers: those that it finds, then the rest as one."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    taken: set[Parameter] = set()
    owned: dict[str, list[Parameter]] = {}
    adopted: list[Parameter] = []
    cast = set()
    found = find_units(module, None if options is None else options.blocks)
    for name, unit in reversed(found.items()):  # from the inside out
        own = [each for each in unit.parameters() if each not in taken]
        if is_autocast:
            whole = {
                parameter
                for each in full_precision_modules(unit)
                for parameter in each.parameters(recurse=False)
            }
            if any(each not in whole for each in own):
                cast.add(name)
                adopted += [each for each in own if each in whole]
                own = [each for each in own if each not in whole]
        owned[name] = own
        taken.update(own)
    layers = _tiling_layers(module)
    kept = set(adopted)
    root = [each for each in names if each not in taken and each not in kept]

    def unit_of(name: str, parameters: Sequence[Parameter]) -> UnitShape:
        tensors = tuple(
            _shape(names[each], each, multiplied, layers.get(each, ())) for each in parameters
        )
        return UnitShape(name, tensors, is_autocast=name in cast, stays_gathered=name == "")

    units = [unit_of(name, owned[name]) for name in found if owned[name]]
    return (*units, unit_of("", [*root, *adopted]))


def _tiling_layers(module: LightningModule) -> dict[Parameter, tuple[str, ...]]:
    """Which layers could gather a weight in tiles: all that use it have to be of these."""
    kinds: dict[Parameter, list[str]] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            kind = {nn.Linear: "product", nn.Embedding: "lookup"}.get(type(each), "")
            kinds.setdefault(parameter, []).append(kind if name == "weight" else "")
    return {parameter: tuple(each) for parameter, each in kinds.items() if all(each)}


def _shape(
    name: str, parameter: Parameter, multiplied: Collection[str], layers: tuple[str, ...]
) -> TensorShape:
    return TensorShape(
        name,
        tuple(parameter.shape),
        is_trained=parameter.requires_grad,
        element_bytes=parameter.element_size(),
        layers=layers,
        is_multiplied=name in multiplied and parameter.dim() > 1,
    )


def build_fake(
    config: DictConfig, types: NumberTypes, source: str
) -> tuple[LightningModule, list[str]]:
    """Build the model, and return notes on parts that are missing. Called among fake tensors."""
    with default_dtype(types.stored):  # as Lightning converts a module: fake ones cannot be
        module: LightningModule = build(config.model, "model", source=source)
        return module, configure(module)


def _built_in_mode(
    config: DictConfig, types: NumberTypes, source: str
) -> tuple[FakeTensorMode, LightningModule, list[str]]:
    """Return the model with the mode that its tensors are of."""
    with fake_tensors() as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mode, *build_fake(config, types, source)


def configure(module: LightningModule) -> list[str]:
    """Make the layers that a module makes in ``configure_model``; return notes on failures."""
    try:
        module.configure_model()
    except Exception as error:  # noqa: BLE001 - it may read anything from a missing Trainer
        return [f"what configure_model makes is not counted: {short_error(error)}"]
    return []


def own_optimizer(module: LightningModule) -> Optimizer | None:
    """Return the optimizer that a module makes without a Trainer."""
    try:
        made = module.configure_optimizers()
    except Exception:  # noqa: BLE001 - most often it reads the Trainer's number of steps
        return None
    return next((each for each in tree_leaves(made) if isinstance(each, Optimizer)), None)


_kept: ContextVar[dict[Hashable, Any] | None] = ContextVar("batches and models", default=None)


@contextlib.contextmanager
def keeping_models() -> Iterator[None]:
    """Within, equal data give the same first batch, read once, and ``kept`` makes things once.

    For plans of many layouts.
    """
    token = _kept.set({})
    try:
        with rare_garbage_collection():
            yield
    finally:
        _kept.reset(token)


def first_batch(config: DictConfig, source: str) -> tuple[Any, str | None]:
    """One batch of the training data, or why there is none."""
    if config.data.class_path is None:
        return None, "data.class_path is not given, so there is no batch to run"
    found: tuple[Any, str | None] = kept(
        ("batch", OmegaConf.to_yaml(config.data, resolve=True)),
        lambda: _read_batch(config, source),
    )
    return found


def kept(key: Hashable, make: Callable[[], T]) -> T:
    """Return the value for a key within ``keeping_models``; make it if there is none."""
    found = _kept.get()
    if found is None:
        return make()
    if key not in found:
        found[key] = make()
    made: T = found[key]
    return made


def is_keeping() -> bool:
    """Whether ``kept`` shares its values, which then must not be changed."""
    return _kept.get() is not None


def _read_batch(config: DictConfig, source: str) -> tuple[Any, str | None]:
    try:
        data: LightningDataModule = build(config.data, "data", source=source)
        data.prepare_data()
        data.setup("fit")
        return next(iter(data.train_dataloader())), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the rest can still be planned
        return None, f"the data gives no batch: {short_error(error)}"


def faked(mode: Any, dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that makes a batch fake, with its floats in the type of a precision."""

    def fake(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        made = mode.from_tensor(each)
        return made.to(dtype) if made.is_floating_point() else made

    return fake


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within, new floating point tensors are of another type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
