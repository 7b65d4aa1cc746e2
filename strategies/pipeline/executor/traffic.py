"""What a step should move over the borders of a rank's stages."""

from collections.abc import Callable

from boltmesh.strategies.pipeline.executor.program import RECEIVES, SENDS, Program
from boltmesh.strategies.pipeline.values import ValueSpec
from boltmesh.telemetry.traffic import ExpectedTraffic

ValuesAt = Callable[[int, int], tuple[ValueSpec, ...]]
"""Gives what crosses a border in a microbatch; border 1 is the one from stage 0 to stage 1."""


def expected_traffic(
    program: Program, values_at: ValuesAt, *, accumulated: int = 1
) -> list[ExpectedTraffic]:
    """Return the bytes and messages of one optimizer step on one rank, by operator.

    Args:
        program: What the rank does in one run.
        values_at: What crosses a border.
        accumulated: Runs in an optimizer step.
    """
    expected = []
    for operator, kinds in (("send", SENDS), ("recv", RECEIVES)):
        num_bytes = num_messages = 0
        for action in program.actions:
            if action.kind not in kinds:
                continue
            border = action.stage + (action.kind in {"SEND_F", "RECV_B"})
            specs = values_at(border, action.microbatch)
            if action.kind.endswith("B"):
                specs = tuple(spec for spec in specs if spec.needs_grad)
            num_bytes += sum(spec.num_bytes for spec in specs)
            num_messages += sum(spec.num_bytes > 0 for spec in specs)
        if num_messages:
            expected.append(
                ExpectedTraffic(
                    axis="pipeline",
                    operator=operator,
                    payload_bytes=float(num_bytes * accumulated),
                    calls=float(num_messages * accumulated),
                    why="each microbatch: values over a border, gradients back",
                )
            )
    return expected
