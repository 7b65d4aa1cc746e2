"""What a step does behind its last unit: loss, metrics, logs, and what it returns."""

from dataclasses import dataclass

from boltmesh.strategies.pipeline.replay.stage_run import StageRun


@dataclass(frozen=True)
class Tail:
    """A step cut once more, behind its last unit, for batches of one signature.

    ``last.forward(received, args, seed=...)`` runs the last stage's units and gives the values
    that live behind them, as ``values_in`` of ``end.plan`` says. ``end.forward(values, args,
    seed=...)`` runs no unit: these give the values, and the step goes on to its end and returns
    what it returns. The values may come from anywhere, such as several microbatches of the last
    stage joined to one batch; where grad mode is on, those that need a gradient get one.
    """

    last: StageRun
    end: StageRun
    draws_before: bool
    """Whether code between units draws random numbers before ``end`` begins: with another batch
    or seed than ``last`` had, ``end`` would draw others."""
