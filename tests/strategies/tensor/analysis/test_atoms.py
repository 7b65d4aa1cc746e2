import pytest

from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Reason,
    SymbolicDim,
    keep_whole,
    leaves,
    length,
    narrow,
    new_dim,
    regroup,
    representative,
    unify,
)

WHY = Reason("test")


def sizes(dim):
    return [each.size for each in leaves(dim)]


def test_the_same_dimension_seen_twice_is_one_axis():
    one, other = new_dim(12), new_dim(12)

    unify(one, other, WHY)

    assert representative(one[0]) is representative(other[0])
    assert not one[0].is_whole


def test_a_product_meets_its_factors_in_any_order():
    one, factors = new_dim(12), (*new_dim(4), *new_dim(3))

    unify(one, factors, WHY)

    assert sizes(one) == [4, 3]
    assert leaves(one) == leaves(factors)


def test_two_ways_to_take_an_axis_apart_refine_each_other():
    one, two = (*new_dim(2), *new_dim(6)), (*new_dim(4), *new_dim(3))

    unify(one, two, WHY)

    assert sizes(one) == sizes(two) == [2, 2, 3]
    assert leaves(one) == leaves(two)


def test_factors_without_a_common_boundary_have_to_be_whole():
    one, two = (*new_dim(3), *new_dim(4)), (*new_dim(4), *new_dim(3))

    unify(one, two, WHY)

    assert all(each.is_whole for each in leaves((*one, *two)))


def test_axes_united_before_are_united_with_all_that_they_were_united_with():
    dims = [new_dim(5) for _ in range(4)]
    unify(dims[0], dims[1], WHY)
    unify(dims[2], dims[3], WHY)
    unify(dims[1], dims[2], WHY)

    assert len({representative(each[0]) for each in dims}) == 1


def test_what_has_to_be_whole_is_so_with_its_parts():
    whole = new_dim(12)
    unify(whole, (*new_dim(4), *new_dim(3)), WHY)
    keep_whole(leaves(whole)[1:], Reason("softmax"))

    keep_whole(whole, Reason("sum"))

    outer, inner = leaves(whole)
    assert [each.operator for each in outer.reasons] == ["sum"]
    assert [each.operator for each in inner.reasons] == ["softmax", "sum"]


def test_what_has_to_be_whole_leaves_what_it_is_a_part_of():
    whole = new_dim(12)
    unify(whole, (*new_dim(4), *new_dim(3)), WHY)

    keep_whole(leaves(whole)[1:], Reason("softmax"))

    assert not leaves(whole)[0].is_whole
    assert not representative(whole[0]).is_whole


def test_parts_made_later_are_whole_as_well():
    dim = new_dim(12)
    keep_whole(dim, WHY)

    heads, channels = regroup([dim], [4, 3], WHY)

    assert heads[0].is_whole
    assert channels[0].is_whole


def test_a_view_takes_a_dimension_apart_and_puts_it_together():
    rows, columns = new_dim(10), new_dim(12)

    apart = regroup([rows, columns], [2, 5, 4, 3], WHY)
    together = regroup(apart, [10, 12], WHY)

    assert [sizes(each) for each in apart] == [[2], [5], [4], [3]]
    assert leaves(together[0]) == leaves(rows)
    assert leaves(together[1]) == leaves(columns)
    assert not any(each.is_whole for dim in apart for each in dim)


def test_a_view_across_dimensions_needs_them_whole():
    rows, columns = new_dim(3), new_dim(5)

    (dim, other) = regroup([rows, columns], [5, 3], WHY)

    assert rows[0].is_whole
    assert columns[0].is_whole
    assert dim[0].is_whole
    assert (length(dim), length(other)) == (5, 3)


def test_sections_of_a_dimension_are_found_again_by_their_places():
    dim = new_dim(12)

    first = narrow(dim, 0, 4, WHY)
    second = narrow(dim, 4, 8, WHY)
    again = narrow(dim, 0, 4, WHY)
    half = narrow(dim, 8, 4, WHY)

    assert representative(first[0]) is representative(again[0])
    assert sizes(second) == [8]
    assert representative(second[0]).form == "sections"
    assert sizes(half) == [4]
    assert not representative(dim[0]).is_whole


def test_overlapping_slices_need_the_dimension_whole():
    dim = new_dim(12)
    narrow(dim, 0, 6, WHY)

    narrow(dim, 3, 6, WHY)

    assert representative(dim[0]).is_whole


def test_a_slice_of_rows_of_a_product_is_a_section_of_its_outer_factor():
    dim = (*new_dim(4), *new_dim(3))

    cut = narrow(dim, 3, 6, WHY)

    assert sizes(cut) == [2, 3]
    assert leaves(cut)[1] is leaves(dim)[1]
    assert not dim[1].is_whole


def test_a_slice_within_a_row_needs_the_dimension_whole():
    dim = (*new_dim(4), *new_dim(3))

    cut = narrow(dim, 2, 5, WHY)

    assert dim[0].is_whole
    assert dim[1].is_whole
    assert length(cut) == 5


def test_a_view_over_sections_needs_them_whole():
    dim = new_dim(12)
    narrow(dim, 0, 4, WHY)

    regroup([dim], [3, 4], WHY)

    assert representative(dim[0]).is_whole


@pytest.mark.parametrize("size", [0, 12])
def test_nothing_and_everything_are_no_sections(size):
    dim = new_dim(12)

    narrow(dim, 0, size, WHY)

    assert representative(dim[0]).form is None
    assert not dim[0].is_whole


def test_sections_and_factors_of_the_same_axis_contradict_each_other():
    one, other = new_dim(12), new_dim(12)
    narrow(one, 0, 6, WHY)
    regroup([other], [4, 3], WHY)

    unify(one, other, WHY)

    assert representative(one[0]).is_whole
    assert all(each.is_whole for each in leaves(other))


def test_axes_of_one_element_are_none():
    assert leaves((SymbolicDim(1), SymbolicDim(3), SymbolicDim(1))) != ()
    assert sizes((SymbolicDim(1), SymbolicDim(3), SymbolicDim(1))) == [3]
