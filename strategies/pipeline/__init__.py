"""The pipeline axis: stages of one model on several ranks, fed with microbatches of each batch.

``axis`` is what the engine calls. Before a run ``stage`` traces the step, ``partition`` assigns
units to stages, and ``schedules`` orders the work. For each batch ``step_runner`` splits it
(``microbatch``) and calls ``training``, ``evaluation`` or ``layerwise_eval``; ``runtime`` executes
the schedule on this rank.

``loss`` weights the losses of microbatches, ``batch_tail`` runs the end of a step on all of them,
``merge``, ``step_logs``, ``step_report`` and
``metrics`` bring results to all ranks. ``stage_params`` holds this rank's parameters and tied
weights, ``grad_handoff`` passes gradients to Lightning's ``backward``, ``pipedream_2bw`` stashes
weights and gradients, ``peers`` handles several pipelines. ``options`` checks arguments and refuses
what a pipeline cannot do; ``expected_traffic`` states what telemetry should measure.
"""
