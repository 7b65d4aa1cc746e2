"""What a step does behind its last unit: loss, metrics, logs, and what it returns.

[Note: The tail of a step]
Behind the last unit there is one more stage, which has no unit. What crosses the border to it are
the values that the last unit made, or that earlier units made and that are used again: logits as a
rule. Microbatches can be joined there, since what units give for a row does not depend on other
rows; means, counts and metrics come later. So whoever runs the tail on values of the whole batch
gets what one process gets, whatever the step computes of them: no rule has to be known of how to
put a number together that was taken of parts.

The values must not come from a part of the batch in another order than the tail expects
(``joining.py``). And where code between units draws random numbers before the tail begins, the
tail draws them again when it is run: only with the seed and the shapes of the first time are
they the same, so such a batch is not divided.
"""

from dataclasses import dataclass

from boltmesh.strategies.pipeline.replay.stage_run import StageRun


@dataclass(frozen=True, eq=False)
class Tail:
    """A step cut once more, behind its last unit, for batches of one signature.

    ``last.forward(received, args, seed=...)`` runs the last stage's units and gives the values
    that live behind them, as ``values_in`` of ``end.plan`` says. ``end.forward(values, args,
    seed=...)`` runs no unit: these give the values, and the step goes on to its end and returns
    what it returns. The values may come from anywhere, such as several microbatches of the last
    stage joined to one batch; where grad mode is on, those that need a gradient get one.
    Parameters outside of units that it uses are ``end.plan.parameters``.
    """

    last: StageRun
    end: StageRun
    draws_before: bool
    """Whether code between units draws random numbers before ``end`` begins: with another batch
    or seed than ``last`` had, ``end`` would draw others."""
