"""A small config and the rates of a slow machine, for tests of plans."""

from boltmesh.strategies.cost_model.step_time import Machine

RATES = Machine(
    device_tflops=0.05,
    memory_gb_s=5.0,
    operator_us=5.0,
    network_gb_s=1.0,
    collective_us=100.0,
    step_ms=2.0,
)
SMALL = (
    *("model.init_args.n_layer=2", "model.init_args.n_embd=32", "model.init_args.block_size=32"),
    *("data.init_args.batch_size=8", "max_steps=2", "limit_val_batches=0"),
    *("run.checkpoint.enabled=false", "enable_model_summary=false"),
    f"data.init_args.path={__file__}",  # any text that is read at once
)
