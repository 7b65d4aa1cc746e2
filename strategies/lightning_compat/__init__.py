"""The private names of Lightning that the strategies need, each with the reason.

Written for lightning 2.6. Public names are imported where they are used. Other packages import
from here or from the modules of this package.
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

__all__ = [
    "DDPForwardRedirection",
    "all_reduce_copy",
    "default_backend",
    "distributed_is_initialized",
    "init_process_group",
    "optimizers_to_device",
    "prepare_for_backward",
    "reset_seed",
    "sync_module_states",
]
