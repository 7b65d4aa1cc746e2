"""Private state of modules: parameters, buffers and hooks."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module, MultiheadAttention, Parameter
from torch.nn.utils.stateless import _reparametrize_module
from typing_extensions import override

from boltmesh.strategies.torch_compat.tensors import tree_leaves, tree_map_only


def buffers_of(module: Module) -> list[Tensor]:
    """Return ``module.buffers()`` in another order, the same for equal models.

    Takes half the time and runs in every step: 0.14 ms for a model of 360 modules.
    """
    modules = {module: None}
    buffers: dict[Tensor, None] = {}
    pending = [module]
    while pending:
        owner = pending.pop()
        if owner._buffers:
            buffers.update(
                (buffer, None) for buffer in owner._buffers.values() if buffer is not None
            )
        for child in owner._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                pending.append(child)
    return list(buffers)


class ParametersInPlace(Collection[Parameter]):
    """Some parameters of a module by their names: those registered at the moment.

    Sharding registers unsharded parameters and shards alternately, which are different objects.
    """

    def __init__(self, module: Module, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._places: list[tuple[dict[str, Any], str]] = []
        for name in self._names:
            owner, _, key = name.rpartition(".")
            self._places.append((module.get_submodule(owner)._parameters, key))

    def named(self) -> dict[str, Parameter]:
        """Return the registered parameters by name."""
        return dict(zip(self._names, self, strict=True))

    @override
    def __iter__(self) -> Iterator[Parameter]:
        for parameters, key in self._places:
            yield parameters[key]

    @override
    def __len__(self) -> int:
        return len(self._places)

    @override
    def __contains__(self, parameter: object) -> bool:
        return any(registered is parameter for registered in self)


@contextmanager
def swapped_state(module: Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Context in which a module has other parameters and buffers, by dotted name; ties are kept.

    A module that has two names is changed once. torch's own search for ties would change it under
    each name, and restore the tensor of the first change at the end. Tensors that a module also
    holds in a plain list or dictionary are replaced there too (cells of ncps compute with those).
    """
    new = {_held(module, name): value for name, value in tensors.items()}
    swapped = {
        f"{path}.{key}" if path else key: new[old]
        for path, owner in module.named_modules()
        for held in (owner._parameters, owner._buffers)
        for key, old in held.items()
        if old is not None and old in new
    }
    places = [(vars(owner), key, vars(owner)[key]) for owner, key in holders_of(module, new.keys())]
    try:
        for attributes, key, value in places:
            attributes[key] = tree_map_only(Tensor, lambda each: new.get(each, each), value)
        with _reparametrize_module(module, swapped), parameters_in_place(module):
            yield
    finally:
        for attributes, key, value in places:
            attributes[key] = value


MOST_HELD = 4096
"""Longer lists are data of the user's, and are not searched for parameters."""


def holders_of(root: Module, tensors: Container[object]) -> list[tuple[Module, str]]:
    """Return where modules hold some tensors beside the registered ones: module and attribute.

    Searched are plain lists, tuples and dictionaries, nested ones too.
    """
    return [
        (module, key)
        for module in root.modules()
        for key, value in vars(module).items()
        if type(value) in {list, tuple, dict} and key not in _REGISTERED
        if len(value) <= MOST_HELD
        if any(isinstance(each, Tensor) and each in tensors for each in tree_leaves(value))
    ]


_REGISTERED = {"_parameters", "_buffers", "_modules"}


@contextmanager
def parameters_in_place(module: Module) -> Iterator[None]:
    """Restore tensors in the place of parameters that a call has registered as buffers.

    ``torch.nn.utils.parametrize`` removes a parameter from its module and restores it, as adapters
    of peft do in each call; a tensor that is no ``Parameter`` is restored as a buffer.
    """
    before = [(each, dict(each._parameters)) for each in module.modules()]
    try:
        yield
    finally:
        for owner, parameters in before:
            if list(owner._parameters) != list(parameters):
                for name in parameters.keys() - owner._parameters.keys():
                    owner._buffers.pop(name, None)
                owner._parameters.clear()
                owner._parameters.update(parameters)


def _held(module: Module, name: str) -> Tensor:
    owner, _, key = name.rpartition(".")
    held: Tensor = getattr(module.get_submodule(owner), key)
    return held


def is_compiled(module: Module) -> bool:
    """Whether ``torch.compile`` runs a module, by its method or as a wrapper of it."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def set_parameter(module: Module, name: str, value: Tensor) -> None:
    """Register a tensor as a module's parameter, even if it is not a leaf."""
    module._parameters[name] = value  # type: ignore[assignment]


def has_full_backward_hooks(module: Module) -> bool:
    """Whether a module has hooks for the gradients of its inputs and outputs."""
    hooks = module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) and module._is_full_backward_hook is not False


def has_hooks(module: Module) -> bool:
    """Whether a module has hooks around its forward pass or for its gradients."""
    return any(vars(module).get(name) for name in (*_FORWARD_HOOKS, *_BACKWARD_HOOKS))


_FORWARD_HOOKS = "_forward_pre_hooks", "_forward_hooks"
_BACKWARD_HOOKS = "_backward_pre_hooks", "_backward_hooks"


def has_foreign_hooks(module: Module) -> bool:
    """Whether a module has hooks of others than FSDP2 and boltmesh."""
    hooks = [*hooks_of(module, on_outputs=True), *hooks_of(module, on_outputs=False)]
    return not all(_module_of(hook).startswith(_OWN) for hook in hooks)


_OWN = "boltmesh.", "torch.distributed."


def _module_of(hook: Callable[..., Any]) -> str:
    while isinstance(hook, partial) or hasattr(hook, "__wrapped__"):
        hook = hook.func if isinstance(hook, partial) else hook.__wrapped__
    return getattr(hook, "__module__", None) or ""


def hooks_of(module: Module, *, on_outputs: bool) -> list[Callable[..., Any]]:
    """Return a module's hooks on outputs and gradients, or those before its forward."""
    kinds = ("_forward_hooks", *_BACKWARD_HOOKS) if on_outputs else ("_forward_pre_hooks",)
    return [hook for kind in kinds for hook in (vars(module).get(kind) or {}).values()]


@contextmanager
def results_unwatched(modules: Iterable[Module]) -> Iterator[None]:
    """Context in which forward hooks of modules do not run."""
    hooks = [each._forward_hooks for each in modules if each._forward_hooks]
    aside = [each.copy() for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, members in zip(hooks, aside, strict=True):
            each.update(members)


def refuse_fused_attention(
    module: MultiheadAttention, set_attribute: Callable[[Module, str, object], None]
) -> None:
    """Keep ``TransformerEncoder`` from reading a ``MultiheadAttention``'s weights itself.

    In evaluation it passes them to one kernel, or makes nested tensors for it, unless the
    projection has three inputs of different widths. Attention's own forward reads that flag, too.
    """
    set_attribute(module, "_qkv_same_embed_dim", False)


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Context in which ``torch.distributions`` do not check their arguments' values.

    A stage runs code of earlier stages with placeholders, whose values fail every check.
    """
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


@contextmanager
def needless_conversions_skipped() -> Iterator[None]:
    """Context in which ``Module.to`` leaves alone a module that it would not change.

    NLLB-MoE converts its router in each forward pass, mostly to the dtype that it has. Torch cannot
    replace parameters without data.
    """
    original = Module._apply

    def apply(module: Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        with torch.no_grad():
            tensors = [*module.parameters(recurse), *module.buffers(recurse)]
            if all(convert(each) is each for each in tensors):
                return module
        converted: Module = original(module, convert, recurse)  # type: ignore[no-untyped-call]
        return converted

    Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module._apply = original  # type: ignore[method-assign]


@contextmanager
def without_nested_batches() -> Iterator[None]:
    """Context in which ``nn.TransformerEncoder`` passes no nested tensors to its layers.

    It does so in evaluation with a padding mask, on torch's fast path. They hold the tokens that
    are not padding, and no stage can receive one. The layers then compute as in training.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def hooks_unchanged(modules: Iterable[Module]) -> Iterator[None]:
    """Context after which new forward hooks are removed: transformers adds some in a first call."""
    before = [(each._forward_hooks, set(each._forward_hooks)) for each in modules]
    try:
        yield
    finally:
        for hooks, known in before:
            for number in hooks.keys() - known:
                del hooks[number]
