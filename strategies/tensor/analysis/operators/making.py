"""Operators that make tensors out of nothing, or look at one without making any."""

from boltmesh.strategies.tensor.analysis.operators.rule import Call, rule


@rule(
    "arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "zeros",
)  # fmt: skip
def make(call: Call) -> None:
    """Axes that occur nowhere else; what they meet says what they are."""
    call.give_new(*call.outputs)


@rule(
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_has_same_storage_numel",
    "_local_scalar_dense", "device", "equal", "is_same_size", "item", "sym_numel", "sym_size",
    "sym_storage_offset", "sym_stride",
)  # fmt: skip
def look(call: Call) -> None:
    """Nothing comes out, or a number: what it says is the same on all ranks where it is whole."""
    if call.name in {"_local_scalar_dense", "equal"}:
        for each in call.inputs:
            call.whole(*call.dims(each))
