"""The data axis: ranks that hold the same model and see different batches.

``axis`` is the interface for the engine. ``ddp`` implements it with replicas, ``zero`` with shards
(FSDP2's ``fully_shard``, applied by ``fully_shard`` to the modules that ``units`` finds, on the
mesh of ``shard_mesh``). Beside a pipeline, where gradients appear at the end of a batch,
``pipeline_ddp`` and ``pipeline_zero`` take their places. ``options`` and ``unsupported`` check
before anything starts.

``param_state`` keeps gradients and buffers consistent with shards, ``param_remap`` optimizers and
whatever else holds the author's parameters. ``uneven_inputs`` lets ranks evaluate different numbers
of batches, ``missing_gradients`` experts that got rows on some ranks alone; ``order_check`` ends
ranks that issue different collectives, ``cpu_collectives`` overlaps collectives on the host.
``expected_memory`` and ``expected_traffic`` state what telemetry should measure.
"""
