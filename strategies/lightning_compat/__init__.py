"""The private names of Lightning that the strategies need, each with why, in one room.

Written for lightning 2.6. Public names are imported where they are used. Others import from here;
what is kept where is the business of these files.
"""

from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized as distributed_is_initialized,
)
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import (
    _init_dist_connection as init_process_group,
)
from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available as all_reduce_copy,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection as DDPForwardRedirection

from boltmesh.strategies.lightning_compat.batches import (
    draws_from_iterator,
    rank_loader,
    requested_loader,
    seed_workers,
    step_arguments,
    transferred_to_host,
)
from boltmesh.strategies.lightning_compat.evaluation import (
    draws_batches,
    evaluation_batch_index,
    evaluation_is_over,
    evaluation_length,
    gives_last_batch,
    watch_batches,
)
from boltmesh.strategies.lightning_compat.fitting import (
    batches_to_skip,
    is_epoch_over,
    loggers_follow,
    prefetched_batches,
    restart_fetching,
    training_loaders,
    validation_follows,
)
from boltmesh.strategies.lightning_compat.gradients import (
    has_norm_clipping,
    module_keeps_gradients,
    module_reads_gradients,
    reads_gradients,
    uses_lightning_norm,
    zeroes_gradients,
)
from boltmesh.strategies.lightning_compat.launchers import MultiProcessingLauncher, ScriptLauncher
from boltmesh.strategies.lightning_compat.replicas import tell_device
from boltmesh.strategies.lightning_compat.sigterm import SigtermAgreement
from boltmesh.strategies.lightning_compat.trainer import (
    autocast_dtype,
    callbacks_of,
    forbid_inference_mode,
    is_for_requeue,
    is_in_fit,
    is_wrapping,
    trainer_of,
)

__all__ = [
    "DDPForwardRedirection",
    "MultiProcessingLauncher",
    "ScriptLauncher",
    "SigtermAgreement",
    "all_reduce_copy",
    "autocast_dtype",
    "batches_to_skip",
    "callbacks_of",
    "default_backend",
    "distributed_is_initialized",
    "draws_batches",
    "draws_from_iterator",
    "evaluation_batch_index",
    "evaluation_is_over",
    "evaluation_length",
    "forbid_inference_mode",
    "gives_last_batch",
    "has_norm_clipping",
    "init_process_group",
    "is_epoch_over",
    "is_for_requeue",
    "is_in_fit",
    "is_wrapping",
    "loggers_follow",
    "module_keeps_gradients",
    "module_reads_gradients",
    "optimizers_to_device",
    "prefetched_batches",
    "prepare_for_backward",
    "rank_loader",
    "reads_gradients",
    "requested_loader",
    "reset_seed",
    "restart_fetching",
    "seed_workers",
    "step_arguments",
    "sync_module_states",
    "tell_device",
    "trainer_of",
    "training_loaders",
    "transferred_to_host",
    "uses_lightning_norm",
    "validation_follows",
    "watch_batches",
    "zeroes_gradients",
]
