"""Combines the losses and logs of microbatches into those of the batch.

A stage differentiates the loss of each microbatch before the next one exists. A loss that is a mean
was divided by a count: of rows, or of tokens with a label, which differs between microbatches. So
the mean of their losses is not the batch's: they are weighted by these counts. Users do not declare
the counts. They are read, proved and applied:

1. ``reduction`` reads the graph that autograd keeps of a loss, node by node (``autograd_nodes``):
   the terms that it adds, and the divisor of each.
2. ``trial`` runs the end of the step, behind the last layer, on a few made-up rows: all together,
   and cut into parts. ``calibration`` finds which counts grow with the rows (the term is a mean),
   which are constants (a sum) and which terms have no rows (a penalty), weights the parts by them,
   and compares loss and gradients with those of all rows. A loss that differs is refused.
3. ``weights`` weights each microbatch's loss when it is computed. Accumulated gradients are divided
   by the sum of the weights at the end of the batch.

``log_rules`` has the rules for logged values: mean, sum, maximum and so on. The trial shows which
of them gives the value of all rows. ``loss_check`` keeps the proofs of a run, and repeats them if a
batch differs from those before.
"""
