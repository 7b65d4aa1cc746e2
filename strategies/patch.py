"""Replaces attributes of objects, for a ``with`` block or until the change is undone.

``patched`` is for one object and a block of code, ``Changes`` for modules to which a feature
is applied and later removed; ``wrapped`` wraps a method. Attributes go into the ``__dict__`` of
instances. There they are found before methods of the class and before parameters of a ``Module``,
whose ``__setattr__`` is bypassed; classes and parameters do not change. A wrapper around
``forward`` is used instead of hooks where inputs and outputs are changed: it also runs where
activation checkpointing repeats a block, and is left if the block raises.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

Around = Callable[..., Any]
"""Called with the method that it wraps and the arguments of the call."""

Original = tuple[Module, str, object]
"""A module, the name of an attribute, and its value."""

_ABSENT = object()


@contextmanager
def patched(owner: Any, /, **attributes: Any) -> Iterator[None]:
    """Context in which an object has other attributes; restores or removes them afterwards.

    Args:
        owner: An instance or a Python module; no attribute may be a property of its class.
        attributes: Values by name.
    """
    own = vars(owner)
    before = {name: own.get(name, _ABSENT) for name in attributes}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                del own[name]
            else:
                own[name] = value


@contextmanager
def members_replaced(values: Iterable[Original]) -> Iterator[None]:
    """Context in which modules hold other parameters, buffers or lists of them.

    They are set with ``setattr``, in order; a module may be one that was set before.
    """
    before: list[Original] = []
    try:
        for module, name, value in values:
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):  # lists before what is in them
            setattr(module, name, value)


class Changes:
    """A list of changes to modules, undone in reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Module, str, Any]] = []

    def wrap(self, module: Module, around: Around, method: str = "forward") -> None:
        """Call ``around(method, *args, **kwargs)`` where ``method(*args, **kwargs)`` is called.

        A copy of the module calls the copy's method: ``around`` may hold the module only in ways
        that ``copy.deepcopy`` follows.
        """
        self.set(module, method, wrapped(getattr(module, method), around))

    def set(self, module: Module, name: str, value: object) -> None:
        """Set an attribute of an instance that is neither parameter, buffer nor module."""
        self._before.append((module, name, vars(module).get(name, _ABSENT)))
        vars(module)[name] = value

    def modules(self) -> frozenset[Module]:
        """Return the modules that have changes."""
        return frozenset(module for module, _, _ in self._before)

    def originals_of(self, block: Module) -> list[Original]:
        """Return what a block's modules had before the first change of each attribute."""
        inside = set(block.modules())
        originals: dict[tuple[Module, str], object] = {}
        for module, name, before in self._before:
            if module in inside:
                originals.setdefault((module, name), before)
        return [(module, name, before) for (module, name), before in originals.items()]

    def undo(self) -> None:
        """Undo all changes. Changes that others made since then have to be undone before."""
        _restore(reversed(self._before))
        self._before.clear()


@contextmanager
def originals_restored(originals: Iterable[Original]) -> Iterator[None]:
    """Context in which modules have attributes as they were before changes."""
    originals = list(originals)
    changed = [(module, name, vars(module).get(name, _ABSENT)) for module, name, _ in originals]
    _restore(originals)
    try:
        yield
    finally:
        _restore(changed)


def _restore(values: Iterable[Original]) -> None:
    for module, name, value in values:
        if value is not _ABSENT:
            vars(module)[name] = value
        else:
            vars(module).pop(name, None)


class _Wrapped:
    """A method and the function that is called in its place."""

    def __init__(self, around: Callable[..., Any], method: Callable[..., Any]) -> None:
        self.around, self.method = around, method

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.method, *args, **kwargs)


def wrapped(method: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls ``around(method, *args, **kwargs)`` in the place of a method."""
    # A bound method: of a forward on an instance, torch's compiler compares the function alone, so
    # that modules with equal wrappers share compiled code. Lightning reads its code to see whether
    # a step is overridden.
    return _Wrapped(around, method).call


def _wrapper(method: Callable[..., Any]) -> _Wrapped | None:
    wrapper = getattr(method, "__self__", None)
    return wrapper if isinstance(wrapper, _Wrapped) else None


def compiled(
    method: Callable[..., Any], compile_: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a compiled method; a wrapper with ``is_compiled = False`` stays outside."""
    inner_wrapper = _wrapper(method)
    if inner_wrapper is None or getattr(inner_wrapper.around, "is_compiled", True):
        return compile_(method)
    return wrapped(compiled(inner_wrapper.method, compile_), inner_wrapper.around)


def unwrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method without any wrapper of ``wrapped``."""
    outermost = _wrapper(method)
    return method if outermost is None else unwrapped(outermost.method)


def rewrapped(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``inner`` within all wrappers that ``wrapped`` has put around a method."""
    wrapper = _wrapper(method)
    return inner if wrapper is None else wrapped(rewrapped(wrapper.method, inner), wrapper.around)
