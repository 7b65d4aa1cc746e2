"""``ExpertAxis``: divides the experts of a model over ranks with different batches.

It folds the ranks of a stage, those of the data, context and tensor axes: groups of adjacent ranks
have all experts together, and ranks at the same index of such groups have the same ones. Beside a
pipeline these are the experts of a stage, and rows are exchanged for each microbatch. The other
axes handle the rest of the model. Ranks of a context group have different positions, and send the
rows of these. Ranks of a tensor group have the same rows: each sends a part of them to whole
experts, or all of them to its part of the layers of each expert.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from typing_extensions import override

from boltmesh.axes import AXES, divisors
from boltmesh.errors import ConfigError, LayoutError, first_of
from boltmesh.strategies.deferred_initialization.materialize import (
    made_for_now,
    own_modules,
    values_in_calls,
)
from boltmesh.strategies.dry_run.sample import sample_batch
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.engine.axis import Axis
from boltmesh.strategies.engine.data_axis import OwnedRows
from boltmesh.strategies.expert.divided import DividedExperts, OnRows, by_rows
from boltmesh.strategies.expert.exchange import EqualRows
from boltmesh.strategies.expert.expected_traffic import ExchangeShape, exchange_traffic
from boltmesh.strategies.expert.find import Experts, Findings, find_experts
from boltmesh.strategies.expert.module_list import DividedList, divide
from boltmesh.strategies.expert.router_bias import RouterBiases, find_biases
from boltmesh.strategies.expert.verify import kind_of, prove
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.lightning_compat.trainer import autocast_dtype
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.patch import rewrapped
from boltmesh.strategies.torch_compat.autograd import is_in_backward
from boltmesh.strategies.torch_compat.modules import is_compiled
from boltmesh.telemetry.traffic import CONTROL, ExpectedTraffic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

_CPU = torch.device("cpu")
_FOLDED = tuple(axis for axis in AXES if axis != "pipeline")
"""The axes of the ranks of a stage."""


class ExpertAxis(Axis):
    """Keeps each expert on some of the ranks, and sends rows to it.

    Args:
        asked: Ranks that have all experts together, or ``"node"``.
        capacity: Most rows of a rank's batch for an expert in training, relative to an even load.
            None: no limit.
        bias_rate: Change of a router's correction bias in a step. None: no correction.
        on_rows: Calls experts with this rank's rows of a sequence that a context axis divides.
        divides_layers: Whether the tensor plan divides the layers of each expert.
    """

    name = "expert"
    folds = "data"
    shares_batches = False
    operand_divider = "expert"

    def __init__(
        self,
        asked: int | str,
        capacity: float | None = None,
        bias_rate: float | None = None,
        on_rows: OnRows | None = None,
        *,
        divides_layers: bool = False,
    ) -> None:
        self._on_rows = on_rows
        self._divides_layers = divides_layers
        self._folded = [axis for axis in _FOLDED if axis != "tensor" or not divides_layers]
        """Axes over whose ranks experts are divided."""
        self.asked, self.capacity, self.bias_rate = asked, capacity, bias_rate
        self._biases: RouterBiases | None = None
        self._hooks: list[RemovableHandle] = []
        self._found: tuple[list[Experts], Findings] = [], Findings()
        """Experts of a module that is about to be divided, agreed on by all ranks."""
        self.divided: dict[str, DividedExperts] = {}
        """Divided experts by name of the module."""
        self._module: LightningModule | None = None
        """The LightningModule that has them."""
        self._replicas: ProcessGroup | None = None
        """The ranks that have the same experts."""

    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks make their own groups.
        return {**vars(self), "_replicas": None, "coupled": None}

    # Set-up.

    @property
    @override
    def size(self) -> int:
        return self._size_in(self.strategy.layout)

    def _size_in(self, layout: MeshLayout) -> int:
        if isinstance(self.asked, int):
            return self.asked
        num_ranks = math.prod(layout.size(name) for name in self._folded)
        return min(self.strategy.num_processes or num_ranks, num_ranks)

    @override
    def check_layout(self, layout: MeshLayout) -> None:
        size = self._size_in(layout)
        sizes = {name: layout.size(name) for name in self._folded}
        num_ranks = math.prod(sizes.values())
        if num_ranks % size:
            fitting = divisors(num_ranks)
            several = {n: s for n, s in sizes.items() if s > 1 or n == "data"}
            named = " x ".join(f"{name}={n}" for name, n in several.items())
            of_axes = f" ({named})" * (len(several) > 1)
            raise LayoutError(
                f"expert={size} needs a multiple of {size} ranks, and there are {num_ranks}"
                f"{of_axes}. Use {' or '.join(map(str, fitting))}."
            )

    def _groups(self) -> list[list[int]]:
        size = self.size
        return [
            ranks[start : start + size]
            for ranks in self._stages()
            for start in range(0, len(ranks), size)
        ]

    def _stages(self) -> list[list[int]]:
        return self.strategy.layout.groups(*self._folded)

    def _replica_groups(self) -> list[list[int]]:
        size = self.size
        return [ranks[start::size] for ranks in self._stages() for start in range(size)]

    @override
    def near_groups(self) -> dict[str, list[list[int]]]:
        if self.size in {1, self.strategy.layout.world_size}:
            return {}
        return {self.name: self._groups()}

    @override
    def build_groups(self) -> None:
        group = self.strategy.enumerated_group(self._groups(), self.name)
        assert group is not None
        self.strategy.groups[self.name] = group
        self._replicas = self.strategy.enumerated_group(self._replica_groups(), "replicas")
        if self.size > 1 and self.strategy.layout.pipeline > 1:
            self.coupled = self.strategy.enumerated_group(
                self._groups(), "expert control", backend="gloo"
            )

    @override
    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        if self.size == 1 or self._module is module:
            return
        for name, parameter in module.named_parameters():
            if parameter.is_meta and not module.automatic_optimization:
                raise ConfigError(
                    f"{name!r} has no values yet, and experts are found in a step, which needs all "
                    f"at once under manual optimization. Build the model without deferred_init."
                )
            if isinstance(parameter, DTensor):
                raise ConfigError(
                    f"{name!r} was sharded by another Trainer. Use that one for this run too, or "
                    f"build a new module and load a checkpoint."
                )
        for name, buffer in module.named_buffers():
            if buffer.is_meta and self.bias_rate is not None:
                raise ConfigError(
                    f"{name!r} has no values yet, and expert_bias= finds the bias of a router by "
                    f"what its values do. Build the model under deferred_init, which makes buffers."
                )
        for name, part in module.named_modules():
            if is_compiled(part):
                raise ConfigError(
                    f"{name!r} is compiled, and expert={self.asked!r} exchanges rows within "
                    f"layers, which torch.compile cannot trace. Leave torch.compile out, and set "
                    f"compile_blocks=True."
                )

    @override
    def look_at_whole(self, trainer: Trainer) -> None:
        strategy = self.strategy
        module = self.module
        if self.size == 1 or self._module is module:
            return
        step = strategy.step_name
        batch = sample_batch(trainer).batch
        around: Callable[[], AbstractContextManager[Any]] = nullcontext
        if autocast_dtype(strategy.precision_plugin) is not None:
            around = strategy.host_step_context(step)
        run = DryRun(module, step, (batch, *step_arguments(module, step)), _CPU, around=around)
        # Backward passes are part of the step under manual optimisation.
        has_backward = not module.automatic_optimization
        watched = partial(run.run, has_backward=has_backward)
        with values_in_calls(module):
            findings = find_experts(module, watched)
        experts = self._agreed(findings)
        self._found = experts, findings
        for layer in experts:
            # The context axis proves the whole step before this one.
            if self._on_rows is not None and layer.kind == "routed":
                part = module.get_submodule(layer.name)
                vars(part)["forward"] = by_rows(self._on_rows, part.forward)
        if self.bias_rate is not None:
            with values_in_calls(module):
                names = find_biases(module, experts, watched)
            self._biases = RouterBiases(self.bias_rate, names)
            without = next((layer.name for layer in experts if layer.name not in names), None)
            if without is not None:
                raise ConfigError(
                    f"expert_bias= was asked for, and the router of {without!r} has no buffer with "
                    f"a number for each expert that its choices are corrected by. Leave "
                    f"expert_bias out."
                )

    @override
    def kept_whole(self) -> Collection[str]:
        if self._divides_layers:
            return []
        return [name for layer in self._found[0] for name in (*layer.parameters, *layer.columns)]

    @override
    def place(self, trainer: Trainer) -> None:
        strategy = self.strategy
        module = self.module
        assert self._replicas is not None
        strategy.recorder.name_group(self._replicas, "data")
        if self.coupled is not None:
            strategy.recorder.name_group(self.coupled, CONTROL)
        if self.size == 1 or self._module is module:
            return
        for layer in self._found[0] if self._on_rows is not None else ():
            part = module.get_submodule(layer.name)
            if layer.kind == "routed":
                whole = partial(type(part).forward, part)
                vars(part)["forward"] = rewrapped(part.forward, whole)
        self._prove_and_divide(module, *self._found, strategy.step_name)
        self._found = [], Findings()
        self._module = module

    @override
    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        # The user's code runs with whole shapes of parameters that this rank has rows of.
        with ExitStack() as stack:
            for divided in self.divided.values():
                divided.take_off()
                stack.callback(divided.put_on)
                stack.enter_context(divided.whole_shapes())
            yield

    def _agreed(self, own: Findings) -> list[Experts]:
        """Return the experts that a rank has found and no rank contradicts. Collective.

        Records the reasons of the other ranks.
        """
        even = [layer for layer, _ in own.even]
        findings = gather_objects((own.experts, even, own.whole))
        experts: list[Experts] = []
        for layer in chain.from_iterable(of_rank for of_rank, _, _ in findings):
            if not all(layer in (*of_rank, *of_even) for of_rank, of_even, _ in findings):
                own.whole[layer.name] = "not all ranks have called it in the same way"
            elif layer not in experts:
                experts.append(layer)
        own.calls.update((layer.name, call) for layer, call in own.even if layer in experts)
        for _, _, whole in findings:
            own.whole.update(whole)
        if not experts and not own.whole:
            raise ConfigError(
                f"expert={self.asked!r} was asked for, and {self.strategy.step_name} calls no "
                f"experts: no module is given rows and, for each, which of several it has to go "
                f"through (from topk, argmax or sort), and has parameters that begin with as many. "
                f"Leave expert out."
            )
        for layer in experts:
            if layer.num_experts % self.size:
                num_ranks = len(self._stages()[0])
                fitting = [n for n in divisors(layer.num_experts)[1:] if num_ranks % n == 0]
                instead = f"Use {' or '.join(map(str, fitting))}" if fitting else "Leave it out"
                raise ConfigError(
                    f"expert={self.size} does not divide the {layer.num_experts} experts of "
                    f"{layer.name!r}. {instead}."
                )
        return experts

    def _prove_and_divide(
        self, module: LightningModule, experts: Sequence[Experts], findings: Findings, step: str
    ) -> None:
        """Divide proven experts; warn about experts that stay whole. Collective.

        Raises:
            ConfigError: All experts stay whole.
        """
        strategy, group = self.strategy, self.strategy.groups[self.name]
        is_mixed = autocast_dtype(strategy.precision_plugin) is not None
        around = strategy.step_context(step) if is_mixed else nullcontext
        faults: dict[Any, str | None] = {}
        for layer in experts:
            part, call = module.get_submodule(layer.name), findings.calls[layer.name]
            kind = kind_of(part, layer)
            if strategy.layout.size("context") > 1 and layer.kind != "routed":
                faults[kind] = "it needs whole sequences, which the context axis divides"
            is_brought = layer.kind == "list" or bool(layer.columns)
            if strategy.layout.pipeline > 1 and is_brought:
                what = "adapters of stacked experts" if layer.columns else "experts of a list"
                faults[kind] = f"{what} are brought for a batch, not for its microbatches"
            divisions = (a.division(name) for a in strategy.axes for name in layer.parameters)
            if self._divides_layers and (is_brought or not any(divisions)):
                faults[kind] = "the tensor plan does not divide the layers of each expert"
            if kind not in faults:
                with made_for_now(own_modules([part], layer.name)):
                    fault = prove(
                        part,
                        layer,
                        call,
                        group,
                        around=around,
                        device=strategy.root_device,
                        is_mixed=is_mixed,
                    )
                of_ranks = gather_objects(fault)
                faults[kind] = next((text for text in of_ranks if text), None)
            if (reason := faults[kind]) is None:
                self.divided[layer.name] = divide(part, layer, call, group, around)
            else:
                findings.whole[layer.name] = reason
        texts = list(_reasons(findings.whole))
        if not self.divided:
            raise ConfigError(
                f"expert={self.asked!r} was asked for, and no experts can be divided: "
                f"{'; '.join(texts)}. Leave {'expert_tensor' * self._divides_layers or 'expert'} "
                f"out."
            )
        if strategy.is_global_zero:
            for text in texts:
                warnings.warn(f"Experts that are not divided: {text}.", stacklevel=2)
        equal_rows = None
        if self._sharing > 1:
            equal_rows = EqualRows(strategy.groups["tensor"])
        for divided in self.divided.values():
            divided.put_on()
            divided.count = self._count
            if self._on_rows is not None:
                divided.on_rows = self._on_rows
            divided.exchange.drop = partial(self._drop, divided.name)
            divided.equal_rows = equal_rows
            if self.capacity is not None and divided.experts.kind != "batched":
                divided.set_capacity(self._places(divided))
        one = next(iter(self.divided.values()))
        rank_zero_info(
            f"Experts: {len(self.divided)} modules such as {one.name!r}, "
            f"{one.exchange.num_local} of {one.experts.num_experts} experts on each rank."
        )

    def _places(self, divided: DividedExperts) -> int:
        """Return the most rows of each rank's batch for an expert. Collective."""
        assert self.capacity is not None
        shape = self._part(divided).part(self._sharing)
        of_ranks = gather_objects(math.ceil(shape.num_rows) * shape.num_choices)
        return max(1, math.ceil(self.capacity * max(of_ranks) / shape.num_experts))

    def _part(self, divided: DividedExperts) -> ExchangeShape:
        """Return the sizes of an exchange of the rows of this rank and its tensor group."""
        part = divided.shape.part(self.strategy.layout.size("context"))
        return part.part(self._parts_per_batch)

    @property
    def _sharing(self) -> int:
        """Number of ranks that have the same rows and each send a part of them."""
        return 1 if self._divides_layers else self.strategy.layout.tensor

    @property
    def _parts_per_batch(self) -> int:
        return math.prod(axis.parts_per_batch for axis in self.strategy.axes)

    @property
    def _held(self) -> list[DividedExperts]:
        """Return the experts of this rank's stages."""
        held = set(map(id, self.strategy.held_parameters()))
        return [
            divided
            for divided in self.divided.values()
            if any(id(parameter) in held for parameter in divided.module.parameters())
        ]

    def _count(self, name: str, chosen: Tensor, num_experts: int) -> None:
        # Read the recorder each time: every fit has a new one.
        if self._counts_rows:
            self.strategy.recorder.expert_rows(name, chosen, num_experts)
        is_training = self.divided[name].module.training and not is_in_backward()
        if self._biases is not None and is_training:
            self._biases.count(name, chosen, num_experts)

    def _drop(self, name: str, count: Tensor) -> None:
        if self._counts_rows:
            self.strategy.recorder.dropped_rows(name, count)

    @property
    def _counts_rows(self) -> bool:
        """Whether no other rank records the same rows."""
        return self._sharing > 1 or self.strategy.coordinates["tensor"] == 0

    @override
    def start(self, trainer: Trainer) -> None:
        for hook in self._hooks:
            hook.remove()
        optimizers = self.strategy.optimizers if self._biases is not None else []
        self._hooks = [
            optimizer.register_step_post_hook(self._correct) for optimizer in optimizers[:1]
        ]

    def _correct(self, *_: object) -> None:
        assert self._biases is not None
        assert self._replicas is not None
        assert self._module is not None
        self._biases.correct(self._module, (self.strategy.groups[self.name], self._replicas))

    @override
    def owned_rows(self) -> OwnedRows | None:
        if not self.divided:
            return None
        assert self._module is not None
        assert self._replicas is not None
        if not (exchanges := self._held):
            return None
        fetched = [divided.owned for divided in exchanges if divided.owned is not None]
        stacked = [divided for divided in exchanges if not isinstance(divided, DividedList)]
        names = {name for divided in stacked for name in divided.experts.parameters}
        own = {p for n, p in self._module.named_parameters() if n in names}
        group = self.strategy.groups[self.name]
        rank, size = self.strategy.global_rank, self.size
        stage = next(ranks for ranks in self._stages() if rank in ranks)
        rows = [stage[start : start + size] for start in range(0, len(stage), size)]
        return OwnedRows(own, group, self._replicas, rows, exchanges, fetched)

    # Forecasts.

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        if not self.divided:
            return []
        blocks = self.strategy.recomputation.blocks
        recomputed = {part for block in blocks for part in block.modules()}
        sharing = self._sharing
        shapes = [(self._part(divided), divided.module in recomputed) for divided in self._held]
        if not shapes:
            return []
        tensor = [axis for axis in self.strategy.axes if axis.name == "tensor"]
        return exchange_traffic(
            shapes,
            self.size,
            self.strategy.trainer.accumulate_grad_batches * self._parts_per_batch,
            sharing=sharing,
            gathers_parts=sharing > 1 and any(axis.expected_traffic(module) for axis in tensor),
            why="rows to the ranks of their experts and back, once for a rank, in both passes; for "
            "batches like the first, as if all experts were as likely",
        )


def _reasons(whole: dict[str, str]) -> "list[str]":
    """Return a text for each reason, with the first modules that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in whole.items():
        names.setdefault(reason, []).append(name)
    return [f"{first_of([*map(repr, several)])}: {reason}" for reason, several in names.items()]
