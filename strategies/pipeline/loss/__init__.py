"""How the losses and logs of microbatches become those of the batch.

``autograd_nodes`` reads one node of autograd's graph, ``reduction`` the form of a loss: what
it was divided by and summed over. ``weights`` turns that into the weight of each microbatch, for
losses and for logged values. ``loss_check`` proves both on a few rows before they count: ``trial``
makes up the rows and runs the end of a step, ``calibration`` compares.
"""
