"""The pipeline axis: stages of one model on several ranks, fed with microbatches of each batch.

``axis`` is the engine's interface. Before a run ``stage`` traces the step, ``partition`` assigns
units to stages, and ``schedules`` orders the work. For each batch ``step_runner`` splits it
(``microbatch``) and calls ``training`` or ``evaluation``; ``runtime`` executes the schedule on this
rank. ``layerwise_eval`` runs a step that cannot be cut into stages.

``loss`` weights the losses of microbatches, ``row_check`` refuses layers that mix rows, ``merge``
joins outputs and runs the end of a step on all of them, ``step_report`` and ``metrics`` bring
results to all ranks. ``stage_params`` holds this rank's parameters and tied weights,
``pipedream_2bw`` stashes weights and gradients. ``options`` checks arguments and refuses
unsupported runs; ``expected_traffic`` has the traffic that telemetry should measure.
"""
