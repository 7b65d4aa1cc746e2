"""The private names of torch that the strategies need, each with why, in one room.

Others import from here; what is kept where is the business of these files.
"""

from boltmesh.strategies.torch_compat.autograd import (
    after_gradient,
    has_gradient_hooks,
    is_in_backward,
    not_compiled,
)
from boltmesh.strategies.torch_compat.communication import (
    Replica,
    broadcast_coalesced,
    device_index,
    flush_static_graph,
    shared_store,
)
from boltmesh.strategies.torch_compat.fake import (
    NEEDS_DATA,
    FakeTensorMode,
    fake_tensors,
    is_fake,
    make_fake,
)
from boltmesh.strategies.torch_compat.files import skip_indices, storage_info
from boltmesh.strategies.torch_compat.modules import (
    buffers_of,
    refuse_fused_attention,
    set_parameter,
    swapped_state,
)
from boltmesh.strategies.torch_compat.operators import (
    CAST,
    COSTLY_OPERATORS,
    CPU_ATTENTION,
    GROUPED_PRODUCT,
    DispatchMode,
    OpOverload,
    functions_unwatched,
    schema_of,
    written_or_viewed,
)
from boltmesh.strategies.torch_compat.optimizers import (
    TOTAL_NORM,
    agree_on_overflow,
    fused_adam,
    scale_all,
    step_without_hooks,
    stop_scaling_in_step,
    total_norm_replaced,
)
from boltmesh.strategies.torch_compat.schedules import torch_schedule_order, torch_send_recv
from boltmesh.strategies.torch_compat.tensors import (
    disabled_torch_function,
    dtensor_like,
    local_tensor,
    make_subclass,
    make_wrapper,
    set_local_tensor,
    storage_key,
    subclasses_unasked,
    times_written,
)
from boltmesh.strategies.torch_compat.trees import (
    open_one_level,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from boltmesh.strategies.torch_compat.unit_hooks import (
    DefaultReduceScatter,
    intercept_collectives,
    reduce_with,
    skip_gathers_ahead,
    watch_dropped_gathers,
)
from boltmesh.strategies.torch_compat.units import (
    StepUnits,
    UnitShard,
    forget_step,
    is_gathered,
    unit_parameter_names,
    unit_parameters,
    unit_shards,
    whole_gradients,
)

__all__ = [
    "CAST",
    "COSTLY_OPERATORS",
    "CPU_ATTENTION",
    "GROUPED_PRODUCT",
    "NEEDS_DATA",
    "TOTAL_NORM",
    "DefaultReduceScatter",
    "DispatchMode",
    "FakeTensorMode",
    "OpOverload",
    "Replica",
    "StepUnits",
    "UnitShard",
    "after_gradient",
    "agree_on_overflow",
    "broadcast_coalesced",
    "buffers_of",
    "device_index",
    "disabled_torch_function",
    "dtensor_like",
    "fake_tensors",
    "flush_static_graph",
    "forget_step",
    "functions_unwatched",
    "fused_adam",
    "has_gradient_hooks",
    "intercept_collectives",
    "is_fake",
    "is_gathered",
    "is_in_backward",
    "local_tensor",
    "make_fake",
    "make_subclass",
    "make_wrapper",
    "not_compiled",
    "open_one_level",
    "reduce_with",
    "refuse_fused_attention",
    "scale_all",
    "schema_of",
    "set_local_tensor",
    "set_parameter",
    "shared_store",
    "skip_gathers_ahead",
    "skip_indices",
    "step_without_hooks",
    "stop_scaling_in_step",
    "storage_info",
    "storage_key",
    "subclasses_unasked",
    "swapped_state",
    "times_written",
    "torch_schedule_order",
    "torch_send_recv",
    "total_norm_replaced",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "unit_parameter_names",
    "unit_parameters",
    "unit_shards",
    "watch_dropped_gathers",
    "whole_gradients",
    "written_or_viewed",
]
