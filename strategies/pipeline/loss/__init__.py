"""How the losses and logs of microbatches become those of the batch.

``autograd_nodes`` reads one node of autograd's graph, ``reduction`` the form of a loss: what
it was divided by and summed over. ``loss_weights`` turns that into the weight of each microbatch,
``log_rules`` does the same for logged values. ``loss_check`` proves both on a few rows before
they count: ``trial`` runs the end of a step, ``trial_values`` makes up the rows, and
``calibration`` compares.
"""
