"""Runs a user's step once, without logging, dropout or side effects, and compares two such runs.

``DryRunOutcome`` holds the results that are compared, everything that training would use: the loss,
every gradient, the outputs of the repeated blocks, and what the step leaves in attributes.

``difference`` does not depend on how sums are distributed: gradients are compared relative to their
own size, but at least to a thousandth of the largest one, because gradients of key biases are zero
up to rounding. A rounding may decide which expert a token goes to. A third run, of the whole model
with parameters that differ by little more than roundings, shows how far apart two right runs can
be.

``full_float32`` keeps torch from computing fp32 products with fewer bits: TF32, and bf16 on CPUs.
``converted`` and ``floats_in`` give a model and its batch another precision for such a comparison,
and ``nudge`` moves parameters, which ``parameters_kept`` restores.
"""

import copy
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

from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.dry_run.fake_optimizers import (
    fake_optimizers,
    manual_optimization_stub,
)
from boltmesh.strategies.dry_run.no_side_effects import (
    ParametersUnchanged,
    members_of,
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
                    outcome.kept.setdefault(name, []).append(torch.as_tensor(each).detach())
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
            for value in members_of(attribute, depth=2)
            if _has_floats(value)
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


def _has_floats(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f"
    return (
        isinstance(value, Tensor)
        and not isinstance(value, Parameter | DTensor)
        and value.is_floating_point()
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


TOLERANCE = 1e-4
"""For fp32 sums in another order: prototypes differed by up to 2.2e-5 over 27 models."""

ROUGH = 0.05
"""For sums in bf16: about six roundings."""

PART = 2**24
"""Number of elements that are compared at once, so that fp64 copies of large gradients fit."""

NUDGE = 1e-5
"""Relative change of parameters in the third run: a hundred times a rounding, so that decisions
that a rounding may change do change."""

_TIMES = 10
"""Allowed difference relative to that of the third run: about ``TOLERANCE`` without discrete
decisions, more if a token was routed elsewhere."""

_MOST = 0.1
"""Larger differences are errors, whatever roundings decide."""

_SMALL = 1e-3
"""Size relative to the largest gradient, below which gradients may be rounding alone."""


def difference(
    whole: DryRunOutcome,
    planned: DryRunOutcome,
    divided: Mapping[str, DimDivision],
    nudged: DryRunOutcome | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> str | None:
    """Return a message about the first difference of a planned run; None without one.

    Args:
        whole: Outcome of the whole model.
        planned: Outcome by the plan.
        divided: This rank's division of each divided parameter.
        nudged: Outcome of the whole model with parameters ``NUDGE`` from its own, which shows how
            far apart right runs can be.
        tolerance: Relative distance that is always allowed.
    """
    nudged = nudged or whole

    def allowed(one: Tensor, third: Tensor, least: float) -> float:
        return min(max(tolerance, _TIMES * _apart(one, third, least)), _MOST)

    if len(whole.values) != len(planned.values):
        return f"gives {len(planned.values)} values for {len(whole.values)}"
    triples = zip(whole.values, planned.values, nudged.values, strict=True)
    for place, (one, other, third) in enumerate(triples):
        if one.shape != other.shape:
            return f"gives a value of shape {tuple(other.shape)} for {tuple(one.shape)}"
        apart = _apart(one, other, 0.0)
        if not apart <= allowed(one, third, 0.0):
            return f"gives a value (the {_ordinal(place)}) that is {apart:.2g} off"
    comparable = _comparable(whole, planned, nudged)
    if not (comparable or whole.values or whole.gradients):
        return "gives nothing that could be compared: it returns and logs nothing"
    for name, one, other, third in comparable:
        apart = _apart(one, other, 0.0)
        if not apart <= allowed(one, third, 0.0):
            return f"gives an output of {name} that is {apart:.2g} off"
    for name, one, other, third in _kept(whole, planned, nudged):
        if one.shape != other.shape:
            return f"leaves {tuple(other.shape)} for {tuple(one.shape)} in the attribute {name}"
        apart = _apart(one, other, 0.0)
        if not apart <= allowed(one, third, 0.0):
            return f"leaves a value in the attribute {name} that is {apart:.2g} off"
    if whole.gradients.keys() != planned.gradients.keys():
        name = min(whole.gradients.keys() ^ planned.gradients.keys())
        return f"gives {'no' if name in whole.gradients else 'a'} gradient of {name}"
    sizes = (
        float(gradient.abs().max()) for gradient in whole.gradients.values() if gradient.numel()
    )
    largest = max(sizes, default=0.0)
    for name, one in whole.gradients.items():
        expected = divided[name].cut(one) if name in divided else one
        apart = _apart(expected, planned.gradients[name], _SMALL * largest)
        if not apart <= allowed(one, nudged.gradients.get(name, one), _SMALL * largest):
            return f"gives a gradient of {name} that is {apart:.2g} off"
    return None


def _comparable(
    whole: DryRunOutcome, planned: DryRunOutcome, nudged: DryRunOutcome
) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Return the outputs of blocks that have the same shape in all runs; others are parts."""
    return [
        (name, one, other, third)
        for name, several in whole.probed.items()
        for one, other, third in zip(
            several, planned.probed.get(name, []), nudged.probed[name], strict=False
        )
        if one.shape == other.shape
    ]


def _kept(
    whole: DryRunOutcome, planned: DryRunOutcome, nudged: DryRunOutcome
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield what both runs left in attributes, and what the third run did."""
    for name, several in whole.kept.items():
        third = nudged.kept.get(name, several)
        for each in zip(several, planned.kept.get(name, []), third, strict=False):
            yield name, *each


def _apart(one: Tensor, other: Tensor, least: float) -> float:
    """Return the largest difference relative to the size of the first tensor, or to ``least``."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    size = max(float(one.abs().max()), least, torch.finfo(torch.float32).tiny)
    parts = zip(*(torch.split(tensor.flatten(), PART) for tensor in (one, other)), strict=True)
    # torch's maximum propagates NaN, which fails every comparison.
    return float(torch.stack([_most_apart(*pair) for pair in parts]).max()) / size


def _most_apart(one: Tensor, other: Tensor) -> Tensor:
    is_same = (one == other) | (one.isnan() & other.isnan())
    return (one.double() - other.double()).abs().masked_fill(is_same, 0.0).max()


def _ordinal(place: int) -> str:
    return "first" if place == 0 else f"{place + 1}th"


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


def nudge(parameters: Iterable[Parameter]) -> None:
    """Change floating parameters by up to ``NUDGE`` of themselves, equally on all ranks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        if parameter.is_floating_point():
            noise = torch.empty(parameter.shape).uniform_(-NUDGE, NUDGE, generator=generator)
            parameter.data = parameter.data * (1 + noise.to(parameter.device))
