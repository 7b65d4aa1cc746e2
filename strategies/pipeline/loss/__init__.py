"""How the losses and logs of microbatches become those of the batch.

A stage differentiates the loss of each microbatch before it knows the next one's. A loss that is a
mean was divided by what it counts: rows, or tokens that have a label, of which microbatches hold
different numbers. So the mean of their losses is not the batch's: they are weighed by these counts.
No user says what a loss counts. It is read, proved and applied:

1. ``reduction`` reads the graph that autograd keeps of a loss, node by node (``autograd_nodes``):
   which terms it adds, and what each of them was divided by.
2. ``trial`` runs the end of the step, behind the last layer, on a few made-up rows: all together,
   and cut into parts. ``calibration`` sees which counts grow with the rows (the term is a mean),
   which are constants (a sum) and which terms have no rows (a penalty), weighs the parts by them,
   and compares loss and gradients with those of all rows. What differs is refused.
3. ``weights`` weighs each microbatch's loss when it is made. What was accumulated is divided by the
   sum of the weights at the end of the batch.

``log_rules`` has the same for values that a step logs: their mean, sum, largest and so on, of which
the trial shows the one that gives the value of all rows. ``loss_check`` keeps what was proved in a
run, and has it proved again where a batch differs from those before.
"""
