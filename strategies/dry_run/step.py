"""Runs a user's step once, without logging, dropout or side effects.

``DryRunOutcome`` holds the results that ``comparison`` compares, everything that training would
use: the loss, every gradient, outputs of repeated blocks, and what the step leaves in attributes.

``full_float32`` keeps torch from computing fp32 products with fewer bits: TF32, and bf16 on CPUs.
``converted`` and ``floats_in`` give a model and its batch another precision for such a comparison,
``nudge`` moves parameters, which ``parameters_kept`` restores, and ``zeros_filled`` gives those
near zero usual values. Within ``rare_garbage_collection`` analyses take a tenth less time.
"""

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from boltmesh.strategies.dry_run.fake_optimizers import (
    fake_optimizers,
    manual_optimization_stub,
)
from boltmesh.strategies.dry_run.no_side_effects import (
    ParametersUnchanged,
    leaves_of,
    untraced,
)
from boltmesh.strategies.dry_run.unsupported import refuse_collective
from boltmesh.strategies.lightning_compat.trainer import trainer_of
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pytree import replace_tensors
from boltmesh.strategies.torch_compat.tensors import tree_leaves

Around = Callable[[], AbstractContextManager[Any]]
"""Returns the context in which a step of training or evaluation runs."""

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_FUNCTIONS = {
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "alpha_dropout_", "feature_dropout", "feature_dropout_", "feature_alpha_dropout",
    "feature_alpha_dropout_",
}  # fmt: skip

_NEW_OBJECTS = 50_000
"""As many as a step of a model of some dozens of layers makes, by order of magnitude."""


@dataclass
class DryRunOutcome:
    """Results of one run of a step."""

    values: list[Tensor] = field(default_factory=list)
    """Values that the step returned, such as the loss, and logged, in order; of any shape."""
    probed: dict[str, list[Tensor]] = field(default_factory=dict)
    """First tensor of the output of each call of a probe, of any shape, by name of the probe."""
    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    """Tensors and arrays that the step left in attributes, by name of module and attribute."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients, in the shapes of their parameters, by first name of the parameter."""


@dataclass(frozen=True)
class DryRun:
    """A step of a module with a batch of the user's data.

    Args:
        module: The module.
        step: Name of the method.
        args: Its arguments: a batch, and further ones.
        device: Where it runs.
        probes: Modules whose outputs are compared, by name.
        around: Context of the step, such as autocast. By default none.
    """

    module: LightningModule
    step: str
    args: tuple[Any, ...]
    device: torch.device
    probes: Mapping[str, Module] = field(default_factory=dict)
    around: Around = nullcontext

    @property
    def trains(self) -> bool:
        """Whether there are gradients."""
        return self.step == "training_step"

    def forward(self, module: Module) -> Any:
        """Run the step and return its result with its graph, for analyses of operators.

        The result includes what the step leaves in attributes of modules.

        Args:
            module: The same module, which analyses pass.
        """
        assert module is self.module
        with self._untraced(), torch.set_grad_enabled(self.trains):
            if self.trains:
                _let_draw(self.module)
            earlier = self._attributes()
            return self._call()[0], [each for _, each in self._new_attributes(earlier)]

    def run(self, *, has_backward: bool = True) -> DryRunOutcome:
        """Run the step, and its backward pass if it trains.

        Args:
            has_backward: False skips the backward pass and keeps nothing for it.
        """
        outcome = DryRunOutcome()
        trains = self.trains and has_backward
        parameters = dict(self.module.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        try:
            logged: list[Any] = []
            with self._untraced(), self._probed(outcome), torch.set_grad_enabled(trains):
                earlier = self._attributes()
                with patched(self.module, log=lambda name, value, *_, **__: logged.append(value)):
                    result, collected = self._call()
                for name, each in self._new_attributes(earlier):
                    is_array = isinstance(each, np.ndarray)
                    value = torch.from_numpy(each.astype(np.float64)) if is_array else each.detach()
                    outcome.kept.setdefault(name, []).append(value)
                outcome.values = _tensors_of([result, logged])
                if trains and self.module.automatic_optimization:
                    loss = result.get("loss") if isinstance(result, Mapping) else result
                    if isinstance(loss, Tensor) and loss.requires_grad:
                        loss.backward()  # type: ignore[no-untyped-call]
            names = {id(parameter): name for name, parameter in parameters.items()}
            outcome.gradients = {names[key]: gradient for key, gradient in collected.items()}
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    outcome.gradients[name] = parameter.grad
        finally:
            for name, parameter in parameters.items():
                parameter.grad = before[name]
        return outcome

    def run_nudged(self, *, has_backward: bool = True) -> DryRunOutcome:
        """Run the step with parameters that differ by little more than roundings."""
        with parameters_kept(self.module):
            nudge(self.module.parameters())
            return self.run(has_backward=has_backward)

    def _call(self) -> tuple[Any, dict[int, Tensor]]:
        step = getattr(self.module, self.step)
        args = copy.deepcopy(self.args)  # a step may change them in place
        if self.trains and not self.module.automatic_optimization:
            with self.around(), manual_optimization_stub(self.module) as collected:
                return step(*args), collected
        trainer = trainer_of(self.module)
        optimizers = fake_optimizers(trainer.strategy, self.module) if trainer else nullcontext()
        with self.around(), optimizers:
            return step(*args), {}

    def _attributes(self) -> dict[int, tuple[str, Tensor | np.ndarray[Any, Any]]]:
        """Return float tensors and arrays in attributes of modules with their names, by ``id``."""
        return {
            id(value): (f"{path}.{name}".lstrip("."), value)
            for path, module in self.module.named_modules()
            for name, attribute in vars(module).items()
            if name not in _TRAINED_OR_NESTED
            for value in leaves_of(attribute)
            if _has_floats(value)
            if not hasattr(module, f"{name}_orig")  # of which it is made, as by torch's pruning
        }

    def _new_attributes(self, earlier: Mapping[int, Any]) -> list[tuple[str, Any]]:
        return [each for key, each in self._attributes().items() if key not in earlier]

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        with (
            untraced(self.module, self.device),
            without_dropout(self.module.modules()),
            _WithoutCollectives(type(self.module).__name__),
            ParametersUnchanged(self.module),
        ):
            if not self.trains:  # Lightning does not change modes for training
                self.module.eval()
            yield

    @contextmanager
    def _probed(self, outcome: DryRunOutcome) -> Iterator[None]:
        with ExitStack() as stack:
            for name, probe in self.probes.items():
                keep = partial(_keep_output, outcome.probed.setdefault(name, []))
                stack.enter_context(probe.register_forward_hook(keep))
            yield


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Context in which Python seldom looks for reference cycles.

    For analyses of a model, which make so many objects that a tenth of the time went into the
    search, at times among all that libraries have made.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _NEW_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def without_dropout(modules: Iterable[Module]) -> Iterator[None]:
    """Context without dropout, within one that restores attributes of the modules."""
    for module in modules:
        if isinstance(module, _DROPOUTS):
            module.p = 0.0  # also if a block is recomputed, in another thread
    with WithoutDropout():
        yield


def _let_draw(module: Module) -> None:
    """Put modules in training mode, to see every module that may draw: a hook may do so later.

    Modules that are frozen and in evaluation mode stay so, with their children.
    """
    own = list(module.parameters())
    if own and not module.training and not any(parameter.requires_grad for parameter in own):
        return
    module.training = True
    for child in module.children():
        _let_draw(child)


_TRAINED_OR_NESTED = frozenset({"_parameters", "_modules"})
"""Attributes of a module that hold its parameters and its children."""


def _has_floats(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return np.issubdtype(value.dtype, np.floating)
    return (
        isinstance(value, Tensor)
        and not isinstance(value, Parameter | DTensor)
        and value.is_floating_point()
        and value.layout is torch.strided
        and not value.is_nested
    )


def _tensors_of(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor | float | int)]
    return [torch.as_tensor(leaf).detach() for leaf in leaves]


def _keep_output(values: list[Tensor], module: Module, args: Any, output: Any) -> None:
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if first is not None and first.is_floating_point():
        values.append(first.detach())


class WithoutDropout(TorchFunctionMode):
    """Disables torch's dropout functions: their random numbers depend on how a model is divided."""

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _FUNCTIONS:
            if "p" in given or len(args) < 2:
                given["p"] = 0.0
            else:
                args = (args[0], 0.0, *args[2:])
        elif name == "scaled_dot_product_attention":
            if len(args) > _DROPOUT_AT:
                args = (*args[:_DROPOUT_AT], 0.0, *args[_DROPOUT_AT + 1 :])
            else:
                given["dropout_p"] = 0.0
        return func(*args, **given)


class _WithoutCollectives(TorchFunctionMode):
    """Refuses collectives of the user's code; those of strategies name their group."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_collective(func, (*args, *kwargs.values()), self.place)
        return func(*args, **kwargs)


_DROPOUT_AT = 4
"""Index of the probability in the arguments of attention."""


NUDGE = 1e-5
"""Relative change of parameters in the third run: a hundred times a rounding, so that decisions
that a rounding may change do change."""


@contextmanager
def full_float32() -> Iterator[None]:
    """Context in which products and convolutions of fp32 tensors are computed in fp32.

    Each operator is set separately: torch raises if this interface, which can always be read, is
    mixed with ``set_float32_matmul_precision`` or ``allow_tf32`` for several operators.
    ``cudnn.flags``, which Hugging Face's CTC losses use, reads that of cuDNN: it is set too.
    """
    cudnn: Any = torch.backends.cudnn
    backends: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
        torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
    ]
    before = [backend.fp32_precision for backend in backends]
    try:
        is_allowed = cudnn.allow_tf32
    except RuntimeError:  # is mixed already
        is_allowed = None
    try:
        if is_allowed:
            cudnn.allow_tf32 = False
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        if is_allowed:
            cudnn.allow_tf32 = True
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@contextmanager
def converted(
    root: Module, device: torch.device, to: Callable[[torch.dtype], torch.dtype]
) -> Iterator[None]:
    """Context in which a model is on a device, with its floats in other dtypes."""
    tensors: list[Tensor] = [*root.parameters(), *root.buffers()]
    before = {tensor: tensor.data for tensor in tensors}
    try:
        for tensor in tensors:
            is_float = tensor.is_floating_point()
            tensor.data = tensor.data.to(device, to(tensor.dtype) if is_float else tensor.dtype)
        yield
    finally:
        for tensor, value in before.items():
            tensor.data = value


def floats_in(wide: torch.dtype, args: Any) -> Any:
    """Return arguments of a step with float tensors, of any shape, promoted to ``wide`` or more."""
    return replace_tensors(
        args,
        lambda tensor: (
            tensor.to(torch.promote_types(wide, tensor.dtype))
            if tensor.is_floating_point()
            else tensor
        ),
    )


@contextmanager
def parameters_kept(root: Module) -> Iterator[None]:
    """Return a context after which parameters, which shards replace in it, are restored."""
    before = {parameter: parameter.data for parameter in root.parameters()}
    try:
        yield
    finally:
        for parameter, value in before.items():
            parameter.data = value
            parameter.grad = None


MINUTE = 1e-3
"""Parameters whose largest value is smaller are zeros to a comparison."""

USUAL = 0.02
"""Standard deviation of the values in their place, as of the usual initialization."""


@contextmanager
def zeros_filled(root: Module) -> Iterator[None]:
    """Context in which trained parameters near zero have usual values, equal on all ranks.

    The sign of a value that is not zero is kept.

    A layer of zeros, such as the last one of a diffusion model's block or of an adapter, and a
    scale of 1e-6 behind each block of ConvNeXt, hide what lies before them: in the first step all
    gradients there are zero, or too small to be compared.
    """
    generator = torch.Generator().manual_seed(0)
    before = {
        each: each.data
        for each in root.parameters()
        if each.requires_grad and each.is_floating_point() and not each.is_meta and each.numel()
        if float(each.detach().abs().max()) < MINUTE
    }
    try:
        for parameter, value in before.items():
            noise = torch.empty(value.shape).normal_(0.0, USUAL, generator=generator).to(value)
            # A learned scale is positive.
            parameter.data = torch.where(value == 0, noise, noise.abs() * value.sign())
        yield
    finally:
        for parameter, value in before.items():
            parameter.data = value


def nudge(parameters: Iterable[Parameter]) -> None:
    """Change floating parameters by up to ``NUDGE`` of themselves, equally on all ranks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        if parameter.is_floating_point():
            noise = torch.empty(parameter.shape).uniform_(-NUDGE, NUDGE, generator=generator)
            parameter.data = parameter.data * (1 + noise.to(parameter.device))
