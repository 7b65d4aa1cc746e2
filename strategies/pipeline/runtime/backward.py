"""Differentiates a stage: as a whole, or its inputs first and its weights later.

[Note: Two halves of a backward pass]
The gradient of the inputs is on the critical path of a pipeline, that of the weights is not (Zero
Bubble Pipeline Parallelism, Qi et al. 2024, https://arxiv.org/abs/2401.10241, section 2). The first
half differentiates the inputs alone, so it runs only the operators on the path to them, and keeps
the gradients that arrive at operators with a branch off that path towards a parameter. The second
half starts there. Such an operator runs in both halves; each time it computes only the gradients
needed.

Each call of autograd traverses the graph behind its roots, so few calls are made. Parameters of
one dim, as in norms, get their gradients in the first half, unless they share a branch with a
matrix. Split points that are not behind one another are differentiated together: queries, keys and
values. In a call with one behind another, autograd would compute the path between them again.

Split points that share nodes off the path (a weight that is used twice, a cast of one) have to be
differentiated together. One may then be behind another, and autograd propagates gradients from the
first to the second again; a hook sets those of the second to the ones of the first half.

The halves of ``torch.distributed.pipelining`` lose the gradients of parameters that reach an output
independently of the inputs, and fail on outputs that are views and on weights that are used before
and after another one (torch 2.13).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[Tensor | None, ...]

_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
"""A node that differentiates its parameters itself, and refuses a backward pass to inputs alone."""


@dataclass
class StageGraph:
    """The graph of a forward pass, to be differentiated once.

    It keeps edges instead of outputs, whose memory is freed as soon as nothing else needs it.
    """

    inputs: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]
    """One for each output; None if it needs no gradient."""

    @classmethod
    def of(cls, inputs: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> "StageGraph":
        """Return the graph from a stage's inputs, which are leaves, to its outputs."""
        edges = tuple(get_gradient_edge(each) if each.requires_grad else None for each in outputs)
        return cls(inputs, edges)


@dataclass
class _SplitPoint:
    """A node at which the second half starts: on the path with a branch off it, or an output."""

    node: Node
    is_on_path: bool
    grads: list[Tensor | None] = field(default_factory=list)
    """Gradients of the operator's outputs."""

    def hold(self, grads: Any) -> None:
        self.grads = list(grads)


@dataclass
class _SplitGroup:
    """Split points that are differentiated together, and the leaves behind them."""

    places: list[_SplitPoint]
    leaves: list[Tensor]
    is_shared: bool = False
    """Whether several split points on the path share nodes off it."""

    def backward(self) -> None:
        """Accumulate the leaves' gradients, with all of their hooks."""
        edges = [
            (GradientEdge(place.node, index), grad)
            for place in self.places
            for index, grad in enumerate(place.grads)
            if grad is not None
        ]
        if not edges:
            return
        with ExitStack() as stack:
            for place in self.places:
                if self.is_shared and place.is_on_path:
                    kept = tuple(place.grads)
                    stack.enter_context(place.node.register_prehook(lambda _, kept=kept: kept))
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [grad for _, grad in edges],
                retain_graph=self.is_shared,
                inputs=self.leaves,
            )


class WeightsHalf:
    """The second half of a backward pass, not yet run.

    Args:
        calls: Calls of autograd, in order; each is dropped once it is made.
    """

    def __init__(self, calls: Iterable[Callable[[], object]]) -> None:
        self._calls = list(calls)

    def run(self) -> None:
        """Accumulate the parameters' gradients and free the graph."""
        calls, self._calls = self._calls, []
        while calls:
            calls.pop(0)()


def backward(graph: StageGraph, grads: Grads) -> Grads:
    """Differentiate a stage as a whole, and accumulate the gradients of its parameters.

    Args:
        graph: Graph of its forward pass, which is freed.
        grads: Gradient of each output, with the output's shape and dtype; None for none.

    Returns:
        The gradient of each input, with the input's shape and dtype; None for none.
    """
    edges, known = _with_grads(graph.edges, grads)
    if edges:
        torch.autograd.backward(edges, known)
    return _take_gradients(graph.inputs)


def backward_inputs(graph: StageGraph, grads: Grads) -> tuple[Grads, WeightsHalf]:
    """Differentiate a stage's inputs before its matrices.

    See [Note: Two halves of a backward pass].

    Args:
        graph: See ``backward``; the second half frees it.
        grads: See ``backward``.

    Returns:
        The gradient of each input, see ``backward``, and the second half.
    """
    edges, known = _with_grads(graph.edges, grads)
    leaves = [each for each in graph.inputs if each.requires_grad]
    if not edges:
        return (None,) * len(graph.inputs), WeightsHalf([])
    if not leaves:
        return (None,) * len(graph.inputs), WeightsHalf([partial(backward, graph, grads)])
    walk = _StageWalk(
        [edge.node for edge in edges], [get_gradient_edge(each).node for each in leaves]
    )
    if not walk.path:
        return (None,) * len(graph.inputs), WeightsHalf([partial(backward, graph, grads)])
    if any(node.name() == _REENTRANT_CHECKPOINT for node in walk.following):
        return backward(graph, grads), WeightsHalf([])

    apart = [
        _SplitPoint(edge.node, is_on_path=False, grads=[None] * edge.output_nr + [grad])
        for edge, grad in zip(edges, known, strict=True)
        if edge.node not in walk.path
    ]
    now, later = _in_halves(_group(walk, apart))
    places = [each for group in later for each in group.places if each.is_on_path]
    on_path = [
        (edge, grad) for edge, grad in zip(edges, known, strict=True) if edge.node in walk.path
    ]
    with ExitStack() as stack:
        for each in places:
            stack.enter_context(each.node.register_prehook(each.hold))
        torch.autograd.backward(
            [edge for edge, _ in on_path],
            [grad for _, grad in on_path],
            retain_graph=True,
            inputs=[*leaves, *(leaf for group in now for leaf in group.leaves)],
        )
    return _take_gradients(graph.inputs), WeightsHalf(
        group.backward for group in _in_few_calls(walk, later)
    )


def _take_gradients(inputs: Sequence[Tensor]) -> Grads:
    """Return the gradients of a stage's inputs and clear their ``.grad``."""
    grads = tuple(each.grad if each.requires_grad else None for each in inputs)
    for each in inputs:
        each.grad = None
    return grads


def _with_grads(
    edges: Iterable[GradientEdge | None], grads: Grads
) -> tuple[list[GradientEdge], list[Tensor]]:
    pairs = [
        (edge, grad)
        for edge, grad in zip(edges, grads, strict=True)
        if edge is not None and grad is not None
    ]
    return [edge for edge, _ in pairs], [grad for _, grad in pairs]


class _StageWalk:
    """The nodes behind some outputs, and the set of them on the path to the inputs.

    It keeps all of them: autograd makes a new Python object of a node unless one is referenced.
    """

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Node]) -> None:
        self.following: dict[Node, list[Node]] = {}
        self._before: dict[Node, list[Node]] = {node: [] for node in roots}
        waiting = list(self._before)
        while waiting:
            node = waiting.pop()
            following = [each for each, _ in node.next_functions if each is not None]
            self.following[node] = following
            for each in following:
                if each not in self._before:
                    self._before[each] = []
                    waiting.append(each)
                self._before[each].append(node)
        self.path: set[Node] = set()
        waiting = [node for node in inputs if node in self._before]
        while waiting:
            node = waiting.pop()
            if node not in self.path:
                self.path.add(node)
                waiting += self._before[node]

    def off_path(self, node: Node) -> list[Node]:
        """Return the next nodes of a node that are off the path."""
        return [each for each in self.following[node] if each not in self.path]

    def places(self) -> list[Node]:
        """Return the nodes on the path with a next node off the path."""
        return [node for node in self._before if node in self.path and self.off_path(node)]

    def levels(self, places: set[Node]) -> dict[Node, int]:
        """Return the most split points before each node of the path, on one way to it."""
        level = dict.fromkeys(self.path, 0)
        left = {node: len(self._before[node]) for node in self.path}
        ready = [node for node, count in left.items() if not count]
        while ready:
            node = ready.pop()
            behind = level[node] + (node in places)
            for each in self.following[node]:
                if each in left:
                    level[each] = max(level[each], behind)
                    left[each] -= 1
                    if not left[each]:
                        ready.append(each)
        return level


def _group(walk: _StageWalk, apart: Sequence[_SplitPoint]) -> list[_SplitGroup]:
    """Group split points that share nodes off the path; ``apart`` are outputs off the path."""
    on_path = [_SplitPoint(node, is_on_path=True) for node in walk.places()]
    group_of: dict[Node, _SplitGroup] = {}
    groups: list[_SplitGroup] = []
    for place in [*on_path, *apart]:
        mine = _SplitGroup([place], [])
        groups.append(mine)
        seen: set[Node] = set()
        waiting = walk.off_path(place.node) if place.is_on_path else [place.node]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            other = group_of.get(node)
            if other is not None and other is not mine:
                _merge(mine, other, group_of)
                groups.remove(other)
            elif other is None:
                group_of[node] = mine
                leaf = getattr(node, "variable", None)
                if leaf is not None:
                    mine.leaves.append(leaf)
                waiting += walk.off_path(node)
    return [group for group in groups if group.leaves]


def _merge(into: _SplitGroup, other: _SplitGroup, group_of: dict[Node, _SplitGroup]) -> None:
    into.places += other.places
    into.leaves += other.leaves
    into.is_shared = sum(place.is_on_path for place in into.places) > 1
    for node, group in group_of.items():
        if group is other:
            group_of[node] = into


def _in_halves(groups: Iterable[_SplitGroup]) -> tuple[list[_SplitGroup], list[_SplitGroup]]:
    """Return the groups to differentiate with the inputs, and those to differentiate later."""
    now: list[_SplitGroup] = []
    later: list[_SplitGroup] = []
    for group in groups:
        is_small = all(leaf.dim() <= 1 for leaf in group.leaves)
        is_reached = all(place.is_on_path for place in group.places)
        (now if is_small and is_reached else later).append(group)
    return now, later


def _in_few_calls(walk: _StageWalk, groups: Sequence[_SplitGroup]) -> list[_SplitGroup]:
    """Join groups without split points behind those of another."""
    on_path = {place.node for group in groups for place in group.places if place.is_on_path}
    level = walk.levels(on_path)
    joined: dict[int, _SplitGroup] = {}
    for group in groups:
        if not group.is_shared:
            key = max(level.get(place.node, 0) for place in group.places)
            call = joined.setdefault(key, _SplitGroup([], []))
            call.places += group.places
            call.leaves += group.leaves
    # Shared ones first: they pass through split points of others, whose buffers must exist.
    return [*(group for group in groups if group.is_shared), *joined.values()]
