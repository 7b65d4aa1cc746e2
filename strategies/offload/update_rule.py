"""Update rules: how a step changes a chunk of flat fp32 state, by kind of optimizer.

``AdamRule`` is for Adam and AdamW: torch's fused kernel, a correction of its step, and its reverse.
The kernel reads and writes each element once, at memory bandwidth; torch's default for CPU tensors
takes 2.4 to 28 times as long. The results equal those of ``AdamW(fused=True)``.

``ElementwiseRule`` is for any other optimizer that treats each element by itself: its own code,
run on ranges of host state. Whether it does is found by trying it (``optimizer_probe``), also in
two flat parts. Equal results mean that it may be run on any range of a parameter: SGD, RMSprop,
Adagrad and their kind. LBFGS, which uses all elements, is refused.

``WholeRule`` is for Adafactor, Muon or LAMB, which use rows or the whole of a parameter: their
steps and states are not in chunks (``whole_steps``).
"""

import copy
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.buckets import Piece, Slot
from boltmesh.strategies.optimizer_probe import mixes_elements
from boltmesh.strategies.optimizer_trial import initial_state, inner_optimizers
from boltmesh.strategies.torch_compat.optimizers import bare_copy, fused_adam, step_without_hooks
from boltmesh.strategies.torch_compat.tensors import tree_map_only


@dataclass(frozen=True)
class PieceGradient:
    """A range of one parameter and its gradient, flat, on the device of the state."""

    piece: Piece
    gradient: Tensor


@dataclass(frozen=True)
class Update:
    """Settings and number of one parameter's next step."""

    settings: Any
    """Hyper-parameters; equal ones compare equal."""
    step: int
    """1 for the first step."""


@dataclass(frozen=True)
class ChunkStep:
    """Everything that a step of one chunk reads and writes."""

    state: tuple[Tensor, ...]
    """The chunk's tensors, fp32 ``(chunk_numel,)``: parameters, then ``UpdateRule.state_names``."""
    offset: int
    """Start of the chunk in its bucket, in elements."""
    pieces: Sequence[PieceGradient]
    """The ranges to step; elements without a gradient are left out and do not change."""
    updates: Mapping[Slot, Update]
    """By slot."""


class UpdateRule(ABC):
    """An optimizer's arithmetic on a chunk's flat tensors."""

    state_names: tuple[str, ...] = ()
    """The keys in ``optimizer.state[p]`` of a chunk's tensors after the first."""

    @abstractmethod
    def settings(self, group: Mapping[str, Any]) -> Any:
        """Return the present hyper-parameters of a group."""

    def is_reversible(self, settings: Any) -> bool:
        """Whether ``correct`` and ``undo`` work for these settings."""
        return False

    @abstractmethod
    def apply(self, chunk: ChunkStep, coefficient: float) -> None:
        """Step with ``coefficient`` times the gradients, which may be overwritten."""

    def correct(self, chunk: ChunkStep, coefficient: float) -> None:
        """Turn a finished step into one with ``coefficient`` times the gradients."""
        raise NotImplementedError

    def undo(self, chunk: ChunkStep) -> None:
        """Undo a finished step."""
        raise NotImplementedError

    def advance(self, groups: Sequence[dict[str, Any]]) -> None:  # noqa: B027 - Adam has none
        """Write into the groups what a step writes there. Called after reading their settings."""

    def scalars(self, slot: Slot) -> dict[str, Any]:
        """Return the entries of ``optimizer.state[p]`` other than flat tensors and ``step``."""
        return {}

    def load_scalars(  # noqa: B027 - Adam has none
        self, slot: Slot, scalars: Mapping[str, Any] | None, starts: Sequence[int]
    ) -> None:
        """Load such entries for the pieces that begin at ``starts``; None removes them."""


BLOCK_NUMEL = 1 << 20
"""Corrections take several passes, over blocks that stay in the cache."""


@dataclass(frozen=True)
class AdamSettings:
    """The hyper-parameters of one group of parameters at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    has_amsgrad: bool
    is_maximizing: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], *, is_adamw: bool) -> "AdamSettings":
        """Read a group of a user's optimizer.

        Raises:
            ConfigError: When it sets ``differentiable``.
        """
        if group.get("differentiable"):
            raise ConfigError(
                "The optimizer has differentiable=True, and an offloaded step runs outside of "
                "autograd. Leave differentiable out, or set strategy.offload_optimizer=null."
            )
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            is_decoupled=bool(group.get("decoupled_weight_decay", is_adamw)),
            has_amsgrad=bool(group["amsgrad"]),
            is_maximizing=bool(group["maximize"]),
        )


@dataclass(frozen=True)
class AdamRun:
    """Ranges of state with the same settings, and the step number of each."""

    settings: AdamSettings
    states: tuple[tuple[Tensor, ...], ...]
    """Parameter, first and second moment, and for amsgrad the maximum: flat, fp32."""
    gradients: tuple[Tensor, ...]
    steps: tuple[int, ...]
    """1 for the first step."""

    def apply(self, coefficient: float = 1.0) -> None:
        """Step once with ``coefficient`` times the gradients.

        A coefficient other than 1 scales the gradients in place: do not read them afterwards.
        """
        settings = self.settings
        columns = [list(column) for column in zip(*self.states, strict=True)]
        parameters, first, second = columns[:3]
        device = parameters[0].device
        scale: dict[str, Tensor] = {}
        if coefficient != 1.0:
            # The kernel divides by it. A coefficient of 0, from an infinite norm, leaves 0 or
            # NaN, as the multiplication does.
            inverse = 1.0 / coefficient if coefficient else math.inf
            scale = {
                "grad_scale": _scalar(inverse, device),
                "found_inf": _scalar(0.0, device),
            }
        fused_adam(is_decoupled=settings.is_decoupled)(
            parameters,
            list(self.gradients),
            first,
            second,
            columns[3] if settings.has_amsgrad else [],
            [_scalar(float(step), device) for step in self.steps],
            lr=settings.lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=settings.has_amsgrad,
            maximize=settings.is_maximizing,
            **scale,
        )

    def correct(self, coefficient: float) -> None:
        """Turn a step with the gradients into one with ``coefficient`` times them.

        Exact in algebra and without saved state: the step is undone, the moments are moved by the
        difference of the gradients, and the step is repeated. Decoupled decay does not depend on
        the gradient and stays. In floating point the second moment loses digits by cancellation
        when the squared gradient dominates it, as in the first steps of a run.
        """
        settings = self.settings
        sign = -1.0 if settings.is_maximizing else 1.0
        less = (1 - settings.beta1) * (1 - coefficient) * sign
        less_square = (1 - settings.beta2) * (1 - coefficient * coefficient)
        for (p, m, v), g, rate, root in self._blocks():
            _move(p, m, v, rate, root, settings.eps)
            m.add_(g, alpha=-less)
            # Not clamp_min_, which would hide a NaN.
            v.addcmul_(g, g, value=-less_square).relu_()
            _move(p, m, v, -rate, root, settings.eps)

    def undo(self) -> None:
        """Undo a step with the gradients: exact up to rounding, not bitwise."""
        settings = self.settings
        sign = -1.0 if settings.is_maximizing else 1.0
        shrink = 1 - settings.lr * settings.weight_decay if settings.is_decoupled else 1.0
        for (p, m, v), g, rate, root in self._blocks():
            _move(p, m, v, rate, root, settings.eps)
            p.div_(shrink)
            m.add_(g, alpha=-(1 - settings.beta1) * sign).div_(settings.beta1 or 1.0)
            v.addcmul_(g, g, value=-(1 - settings.beta2)).relu_().div_(settings.beta2 or 1.0)

    def _blocks(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor, float, float]]:
        settings = self.settings
        for state, gradient, step in zip(self.states, self.gradients, self.steps, strict=True):
            rate = settings.lr / (1 - settings.beta1**step)
            root = math.sqrt(1 - settings.beta2**step)
            for start in range(0, gradient.numel(), BLOCK_NUMEL):
                block = slice(start, start + BLOCK_NUMEL)
                yield tuple(each[block] for each in state[:3]), gradient[block], rate, root


def _move(p: Tensor, m: Tensor, v: Tensor, rate: float, root: float, eps: float) -> None:
    p.addcdiv_(m, v.sqrt().div_(root).add_(eps), value=rate)


class AdamRule(UpdateRule):
    """The rule of torch's Adam or AdamW."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._is_adamw = isinstance(optimizer, AdamW)
        self.state_names = ("exp_avg", "exp_avg_sq")
        if any(group["amsgrad"] for group in optimizer.param_groups):
            self.state_names += ("max_exp_avg_sq",)

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """Whether this is torch's own Adam or AdamW; a derived class may step differently."""
        return type(optimizer) in {Adam, AdamW}

    @override
    def settings(self, group: Mapping[str, Any]) -> AdamSettings:
        settings = AdamSettings.of(group, is_adamw=self._is_adamw)
        if settings.has_amsgrad and len(self.state_names) == 2:
            raise ConfigError(
                "A parameter group turned amsgrad on after the first step was prepared, and its "
                "state has no maximum. Set amsgrad when the optimizer is made."
            )
        return settings

    @override
    def is_reversible(self, settings: AdamSettings) -> bool:
        # A step can then be corrected from its result and the gradient alone.
        return not settings.has_amsgrad and (settings.is_decoupled or not settings.weight_decay)

    @override
    def apply(self, chunk: ChunkStep, coefficient: float) -> None:
        for run in _runs(chunk):
            run.apply(coefficient)

    @override
    def correct(self, chunk: ChunkStep, coefficient: float) -> None:
        for run in _runs(chunk):
            run.correct(coefficient)

    @override
    def undo(self, chunk: ChunkStep) -> None:
        for run in _runs(chunk):
            run.undo()


def _runs(chunk: ChunkStep) -> list[AdamRun]:
    """Group pieces by settings; adjacent ones at the same step become one range."""
    stretches: dict[AdamSettings, list[_Stretch]] = {}
    for each in chunk.pieces:
        update = chunk.updates[each.piece.slot]
        stretch = _Stretch(each.piece, each.piece.start, update.step, each.gradient)
        of_settings = stretches.setdefault(update.settings, [])
        if not (of_settings and of_settings[-1].extend(stretch)):
            of_settings.append(stretch)
    return [
        AdamRun(
            settings,
            tuple(
                tuple(t[one.start - chunk.offset :][: one.gradient.numel()] for t in chunk.state)
                for one in each
            ),
            tuple(one.gradient for one in each),
            tuple(one.step for one in each),
        )
        for settings, each in stretches.items()
    ]


@dataclass
class _Stretch:
    piece: Piece
    """The last piece that it covers."""
    start: int
    step: int
    gradient: Tensor

    def extend(self, other: "_Stretch") -> bool:
        """Append the next range, if only padding (zero) is between.

        False where another parameter is between, or the gradients are laid out differently.
        """
        slot = self.piece.slot
        is_next = other.piece.slot is slot or other.start == slot.offset + slot.padded_numel
        if self.step != other.step or not is_next:
            return False
        before, after = self.gradient, other.gradient
        distance = other.start - self.start
        if before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
            return False
        if after.storage_offset() - before.storage_offset() != distance:
            return False
        numel = distance + after.numel()
        self.gradient = before.as_strided((numel,), (1,), before.storage_offset())
        self.piece = other.piece
        return True


def _scalar(value: float, device: torch.device) -> Tensor:
    """Return a float32 scalar. A kernel fills it; ``torch.tensor`` would synchronise a GPU."""
    return torch.full((), value, dtype=torch.float32, device=device)


class WholeRule(UpdateRule):
    """The rule of an optimizer that steps whole parameters: chunks only hold their values."""

    @override
    def settings(self, group: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    @override
    def apply(self, chunk: ChunkStep, coefficient: float) -> None:
        raise NotImplementedError


PROBE_SHAPE = (4, 6)
PROBE_SPLIT = 5
"""Not at the end of a row."""
PROBE_STEPS = 3

_NOT_HYPER_PARAMETERS = {"params", "param_names"}


class _Settings(dict[str, Any]):
    """A group without its parameters, with copies of its tensors: schedulers write into theirs."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        kept = {key: value for key, value in group.items() if key not in _NOT_HYPER_PARAMETERS}
        super().__init__(tree_map_only(Tensor, torch.clone, kept))


class ElementwiseRule(UpdateRule):
    """Runs a user's optimizer on views of a chunk. Slower than the fused kernel.

    Each piece begins with the same values of its group. What a step writes into a group, such as a
    count of steps, is found by stepping one element separately.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Try the optimizer, and refuse one that does not treat each element by itself."""
        self._step = step_without_hooks(optimizer)
        self._runner = bare_copy(optimizer)
        self._beside = bare_copy(optimizer)
        """Steps one element on the training thread, while the worker steps pieces."""
        self._states_beside: dict[int, dict[str, Any]] = {}
        self._scalars: dict[tuple[Slot, int], dict[str, Any] | None] = {}
        if mixes_elements(optimizer):
            raise _refused(optimizer, "it looks at more than one element at a time")
        if inner_optimizers(optimizer):
            raise _refused(optimizer, "it steps another optimizer")
        state_keys = [self._probe(optimizer, group) for group in optimizer.param_groups]
        own = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
        if any(vars(self._runner)[name] != value for name, value in own.items()):
            raise _refused(optimizer, "it counts steps in an attribute")
        self.state_names = tuple(dict.fromkeys(name for names in state_keys for name in names))

    @override
    def settings(self, group: Mapping[str, Any]) -> _Settings:
        return _Settings(group)

    @override
    def advance(self, groups: Sequence[dict[str, Any]]) -> None:
        for number, group in enumerate(groups):
            state = self._states_beside.get(number)
            written, self._states_beside[number] = self._step_beside(_Settings(group), state)
            for key, value in written.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _step_beside(
        self, settings: _Settings, state: dict[str, Any] | None
    ) -> tuple[_Settings, dict[str, Any]]:
        return self._run(torch.ones(1), torch.ones(1), settings, state, self._beside)

    @override
    def apply(self, chunk: ChunkStep, coefficient: float) -> None:
        for each in chunk.pieces:
            slot, start, stop = each.piece.slot, each.piece.start, each.piece.stop
            gradient = each.gradient.mul_(coefficient) if coefficient != 1.0 else each.gradient
            own = slice(start - chunk.offset, stop - chunk.offset)
            views = [tensor[own] for tensor in chunk.state]
            key = (slot, start)
            stretches = dict(zip(self.state_names, views[1:], strict=True))
            # Before its first step, the optimizer creates the state itself.
            stored = self._scalars.get(key)
            given = None
            if stored is not None:
                given = stored | {k: v for k, v in stretches.items() if k not in stored}
            settings = chunk.updates[slot].settings
            _, after = self._run(views[0], gradient, settings, given, self._runner)
            for name, view in stretches.items():
                # Another group may have no such state, or None.
                if isinstance(after.get(name), Tensor):
                    value = after.pop(name)
                    if value.data_ptr() != view.data_ptr():
                        view.copy_(value)
                else:
                    after.setdefault(name, None)
            self._scalars[key] = after

    @override
    def scalars(self, slot: Slot) -> dict[str, Any]:
        of_slot = (v for (own, _), v in self._scalars.items() if own is slot and v)
        return copy.deepcopy(next(of_slot, {}))  # the worker continues to update its own

    @override
    def load_scalars(
        self, slot: Slot, scalars: Mapping[str, Any] | None, starts: Sequence[int]
    ) -> None:
        for start in starts:
            self._scalars[slot, start] = None if scalars is None else copy.deepcopy(dict(scalars))

    def _run(
        self,
        parameter: Tensor,
        gradient: Tensor,
        settings: _Settings,
        state: dict[str, Any] | None,
        runner: Optimizer,
    ) -> tuple[_Settings, dict[str, Any]]:
        """Step a tensor in place; return its group and its state after the step."""
        leaf = Parameter(parameter)
        leaf.grad = gradient
        group = {**_Settings(settings), "params": [leaf]}
        runner.param_groups = [group]
        runner.state = defaultdict(dict)
        if state is not None:
            runner.state[leaf] = state
        self._step(runner)
        after = dict(runner.state[leaf])
        runner.param_groups, runner.state = [], defaultdict(dict)
        return _Settings(group), after

    def _probe(self, optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
        settings = [_Settings(group)] * 4
        initial: Mapping[str, Any] = next(
            (optimizer.state[p] for p in group["params"] if optimizer.state.get(p)), {}
        )
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(PROBE_SHAPE, generator=generator)
        parts = [each.clone() for each in whole.flatten().tensor_split([PROBE_SPLIT])]
        tensors = [torch.ones(1), whole, *parts]
        states = [initial_state(initial, each) for each in tensors]
        try:
            for _ in range(PROBE_STEPS):
                gradient = torch.randn(PROBE_SHAPE, generator=generator)
                pieces = gradient.flatten().tensor_split([PROBE_SPLIT])
                for at, each in enumerate([torch.ones(1), gradient, *pieces]):
                    settings[at], states[at] = self._run(
                        tensors[at], each.clone(), settings[at], states[at], self._runner
                    )
        except Exception as error:
            raise _refused(
                optimizer, f"its step fails on a part of a parameter ({error})"
            ) from error
        if not torch.allclose(whole.flatten(), torch.cat(parts), rtol=1e-6, atol=0):
            raise _refused(optimizer, "it looks at more than one element at a time")
        if any(each != settings[0] for each in settings[1:]):
            raise _refused(optimizer, "it writes what it finds in gradients into its groups")
        whole_state = states[1] or {}
        names = []
        for name, value in whole_state.items():
            if isinstance(value, Tensor) and value.shape == whole.shape:
                names.append(name)
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise _refused(optimizer, f"its state {name!r} has another shape than a parameter")
        return tuple(names)


def _refused(optimizer: Optimizer, why: str) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        f"{name} cannot be offloaded: {why}, and offloaded state is stepped in parts. Use AdamW, "
        f"Adam, SGD or another elementwise optimizer, or set strategy.offload_optimizer=null."
    )
