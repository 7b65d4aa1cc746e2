"""What an optimizer step of a pipeline should move, beside what crosses its borders."""

from collections.abc import Iterable, Sequence

import msgspec
from torch.nn import Parameter

from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.strategies.planner.traffic import NORM_BYTES, OVERFLOW_BYTES
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import CONTROL, ExpectedTraffic


def expected_collectives(
    *,
    agreements: tuple[int, int],
    shared: tuple[int, int],
    told: tuple[int, int],
    evened: tuple[int, int] = (0, 0),
    accumulated: int,
    num_norms: int,
    agrees_on_overflow: bool = False,
) -> list[ExpectedTraffic]:
    """Return the collectives of one optimizer step on one rank; each pair is bytes and calls.

    Args:
        agreements: Of a batch, on whether ranks await the same and nobody has failed, with what
            they tell each other beside: what a rank sends, and receives.
        shared: Of a batch, for gradients of parameters that several stages hold.
        told: Of a batch, from the last stage, beside that: the loss and what was logged.
        evened: Of an optimizer step, for gradients of shared parameters that were averaged over
            pipelines.
        accumulated: Batches in an optimizer step.
        num_norms: Norms over all stages in an optimizer step.
        agrees_on_overflow: Whether stages tell each other before a step if gradients overflowed.
    """
    reduced = {
        "gradients of parameters that stages share": (
            shared[0] * accumulated,
            shared[1] * accumulated,
        ),
        "the norm for clipping": (NORM_BYTES * num_norms, num_norms),
        "whether fp16 has overflown": (
            OVERFLOW_BYTES * agrees_on_overflow,
            int(agrees_on_overflow),
        ),
    }
    named = {why: each for why, each in reduced.items() if each[1]}
    sizes, calls = zip(*named.values(), strict=True) if named else ((), ())
    over_stages = ExpectedTraffic(
        axis="pipeline",
        operator="allreduce",
        payload_bytes=float(sum(sizes)),
        calls=float(sum(calls)),
        why=", ".join(named),
    )
    agreed = [
        ExpectedTraffic(
            axis=CONTROL,
            operator=operator,
            payload_bytes=float(agreements[0] * accumulated),
            calls=float(agreements[1] * accumulated),
            why="agreements of the ranks at both ends of a batch, and its loss",
        )
        for operator in ("send", "recv")
    ]
    broadcasts = {
        "the last stage tells the loss and what was logged": told[1] * accumulated,
        "averaged gradients of parameters that stages share": evened[1],
    }
    over_ranks = ExpectedTraffic(
        axis="pipeline",
        operator="broadcast",
        payload_bytes=float(told[0] * accumulated + evened[0]),
        calls=float(sum(broadcasts.values())),
        why=", ".join(why for why, calls in broadcasts.items() if calls),
    )
    found = [each for each in (over_stages, over_ranks) if each.calls]
    return [*found, *agreed]


def with_second_version(
    expected: Iterable[MemoryKind], held: Iterable[Parameter]
) -> list[MemoryKind]:
    """Return what a rank needs that keeps the weights of the batch before, and two gradients.

    Args:
        expected: What it needs with one of each.
        held: Its parameters; those that are not trained have one version.
    """
    trained = sum(each.numel() * each.element_size() for each in held if each.requires_grad)
    return [
        msgspec.structs.replace(kind, predicted_bytes=kind.predicted_bytes + trained)
        if kind.kind in {"parameters", "gradients"} and kind.predicted_bytes is not None
        else kind
        for kind in expected
    ]


def border_bytes(
    crossing: Sequence[Sequence[Sequence[ValueSpec]]], accumulated: int
) -> tuple[tuple[int, int], ...]:
    """Return what an optimizer step moves over each border: values forward, gradients back.

    Args:
        crossing: By microbatch and stage, what the border before the stage carries.
        accumulated: Batches in an optimizer step.
    """
    num_stages = len(crossing[0]) if crossing else 0
    found = []
    for stage in range(1, num_stages):
        specs = [spec for stages in crossing for spec in stages[stage]]
        forward = sum(spec.num_bytes for spec in specs)
        back = sum(spec.num_bytes for spec in specs if spec.needs_grad)
        found.append((forward * accumulated, back * accumulated))
    return tuple(found)
