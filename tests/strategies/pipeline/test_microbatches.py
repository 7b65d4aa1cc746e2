"""Batches of any nesting are cut along their rows."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.microbatch import MicrobatchSplitter, even_sizes
from boltmesh.strategies.pytree import own_arguments

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclasses.dataclass
class Sample:
    image: Tensor
    names: list[str]
    scale: float = 1.0
    count: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.names)


class Opaque:
    """Holds a tensor where nobody looks for one."""

    def __init__(self) -> None:
        self.store = {"edges": torch.zeros(2, 9)}


def images(*sizes: int) -> list[Tensor]:
    return [torch.full((3, size, 4), float(number)) for number, size in enumerate(sizes)]


def boxes(*counts: int) -> list[dict[str, Any]]:
    return [{"boxes": torch.zeros(count, 4), "id": number} for number, count in enumerate(counts)]


def halves(batch: Any, **options: Any) -> tuple[Any, Any]:
    first, second = MicrobatchSplitter(**options).cut(batch, 2)[0]
    return first, second


def test_nested_batches_are_cut_along_their_rows() -> None:
    batch = {
        "pair": Pair(torch.arange(10).view(5, 2), torch.arange(5)),
        "names": ["a", "b", "c", "d", "e"],
        "parts": [torch.arange(5), None, 3],
        "sample": Sample(torch.arange(5.0), ["v", "w", "x", "y", "z"], scale=2.0),
        "temperature": torch.tensor(0.5),
        "array": np.arange(5),
        "title": "one for all",
        "ordered": OrderedDict(x=torch.arange(5)),
        "meta": [{"id": number} for number in range(5)],
        "sizes": [2, 3],
    }
    parts, sizes = MicrobatchSplitter().cut(batch, 2)
    assert sizes == [3, 2]
    first, second = parts
    assert first["pair"].inputs.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].targets.tolist() == [3, 4]
    assert second["names"] == ["d", "e"]
    assert second["parts"][0].tolist() == [3, 4]
    assert second["parts"][1:] == [None, 3]
    sample = second["sample"]
    assert (sample.names, sample.scale, sample.count) == (["y", "z"], 2.0, 5)
    assert second["temperature"].item() == 0.5
    assert second["array"].tolist() == [3, 4]
    assert second["title"] == "one for all"
    assert type(second["ordered"]) is OrderedDict
    assert second["ordered"]["x"].tolist() == [3, 4]
    assert second["meta"] == [{"id": 3}, {"id": 4}]
    assert second["sizes"] == [2, 3]


def test_microbatches_are_views() -> None:
    batch = [torch.zeros(4, 2), torch.zeros(4)]
    _, second = halves(batch)
    batch[0][3, 1] = 7
    assert second[0][1, 1] == 7


def test_a_pair_of_tensors_in_a_batch_of_two_is_no_list_of_samples() -> None:
    first, second = halves((torch.arange(2), torch.arange(2)))
    assert [each.tolist() for each in (*first, *second)] == [[0], [0], [1], [1]]


def test_strings_alone_have_rows() -> None:
    assert MicrobatchSplitter().rows({"text": ["a", "b", "c"]}).count == 3
    assert MicrobatchSplitter().rows((("a", "b"), ("c", "d"))).count == 2
    assert halves((("a", "b"), ("c", "d"))) == ((("a",), ("c",)), (("b",), ("d",)))


# See [Note: Lists of samples].


def test_a_list_of_samples_is_known_by_the_rows_of_what_lies_beside_it() -> None:
    # Three channels and four samples: cut along channels, nobody would notice.
    first, second = halves({"x": images(5, 5, 5, 5), "y": torch.arange(4)})
    assert [each.shape for each in second["x"]] == [(3, 5, 4)] * 2
    assert second["x"][0].unique().tolist() == [2.0]
    assert second["y"].tolist() == [2, 3]
    first, second = halves({"x": [torch.arange(4)] * 3, "y": torch.arange(4)})
    assert [each.tolist() for each in first["x"]] == [[0, 1]] * 3


def test_a_detection_batch_is_cut_by_image() -> None:
    batch = (tuple(images(5, 6, 7, 8)), tuple(boxes(1, 0, 3, 3)))
    first, second = halves(batch)
    assert [each.shape[1] for each in (*first[0], *second[0])] == [5, 6, 7, 8]
    assert [each["id"] for each in (*first[1], *second[1])] == [0, 1, 2, 3]


def test_labels_in_a_list_of_0_dim_tensors_are_samples() -> None:
    batch = [torch.zeros(4, 2), [torch.tensor(number) for number in range(4)]]
    assert [each.item() for each in halves(batch)[1][1]] == [2, 3]


def test_the_batch_size_of_the_loader_decides_what_a_list_is() -> None:
    alike = [torch.arange(40).view(8, 5)] * 4
    first, second = halves(alike, batch_sizes={8})
    assert [each.shape for each in first] == [(4, 5)] * 4
    first, second = halves(alike, batch_sizes={4})
    assert [each.shape for each in second] == [(8, 5)] * 2


def test_a_later_batch_is_taken_as_the_earlier_ones() -> None:
    cutter = MicrobatchSplitter(batch_sizes={8})
    cutter.rows([torch.zeros(8, 5)] * 3)
    last = cutter.rows([torch.zeros(3, 5)] * 3)  # as many rows as parts
    assert (last.count, last.samples) == (3, frozenset())
    cutter = MicrobatchSplitter(batch_sizes={8})
    cutter.rows(images(*[5] * 8))
    assert cutter.rows(images(5, 5, 5)).samples == {"batch"}
    assert cutter.rows(images(5)).count == 1


def test_two_tensors_are_parts_where_nothing_says_otherwise() -> None:
    assert MicrobatchSplitter().rows([torch.zeros(8, 5), torch.zeros(8, 5)]).count == 8
    assert (
        MicrobatchSplitter(batch_sizes={2}).rows([torch.zeros(8, 5), torch.zeros(7, 5)]).count == 2
    )
    assert MicrobatchSplitter().rows([torch.zeros(8, 5)]).count == 8
    assert MicrobatchSplitter(batch_sizes={1}).rows([torch.zeros(8, 5)]).count == 1


def test_what_a_tokenizer_gives_keeps_its_class_and_its_words() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    batch = tokenizer(["a b", "b b", "a a", "b a"], return_tensors="pt")
    _, second = halves(batch)
    assert type(second) is type(batch)
    assert second["input_ids"].tolist() == [[0, 0], [1, 0]]
    assert second.input_ids.tolist() == [[0, 0], [1, 0]]
    assert second.tokens(1) == ["b", "a"]


@pytest.mark.parametrize(
    ("rows", "wanted", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1]), (1, 1, [1])],
)
def test_sizes_differ_by_at_most_one(rows: int, wanted: int, sizes: list[int]) -> None:
    assert even_sizes(rows, wanted) == sizes


@pytest.mark.parametrize(("rows", "sizes"), [(8, [2, 2, 2, 2]), (5, [3, 2]), (3, [3]), (1, [1])])
def test_a_microbatch_has_enough_rows_where_the_batch_has(rows: int, sizes: list[int]) -> None:
    assert even_sizes(rows, 4, fewest_rows=2) == sizes


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([torch.zeros(4), torch.zeros(3)], r"batch\[0\] has 4 rows and batch\[1\] has 3"),
        ({"x": torch.tensor(1.0)}, "cannot be cut into microbatches: it holds no tensor"),
        (object(), "A batch of object cannot be cut"),
        ({"x": torch.zeros(0, 3)}, "The batch has no rows"),
        ({"a": ["x", "y"], "b": ["x", "y", "z"]}, r"batch\['a'\] has 2 rows and batch\['b'\]"),
        ([torch.zeros(8, 5)] * 3, "batch is a list of 3 tensors of one kind"),
        ({"x": images(5, 5, 5), "y": torch.zeros(3)}, r"batch\['x'\] is a list of 3 tensors"),
        ({"x": images(5, 5), "y": torch.zeros(4)}, r"batch\['y'\] has 4 rows and batch\['x'\]\[0"),
        ({"y": torch.zeros(4), "g": Opaque()}, r"batch\['g'\] is a .*Opaque with tensors inside"),
        (
            {"x": pack_sequence([torch.zeros(3), torch.zeros(2)])},
            r"batch\['x'\] is a PackedSequence",
        ),
        ([torch.zeros(4, 4).to_sparse(), torch.zeros(4)], r"batch\[0\] is a sparse_coo tensor"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MicrobatchSplitter().rows(batch)


class Named(dict[str, Any]):
    """A batch class of an author's: a dict with more arguments and an attribute."""

    def __init__(self, x: Tensor, source: str) -> None:
        super().__init__(x=x)
        self.source = source


def test_a_run_of_a_step_gets_a_batch_of_its_own() -> None:
    batch = Named(torch.ones(2), "file")
    own, rest = own_arguments((batch, [1]), written={0})
    assert type(own) is Named
    assert own.source == "file"
    own.pop("x").add_(1)
    rest.append(2)
    assert batch["x"].tolist() == [1.0, 1.0]
    (same,) = own_arguments((batch,), written=())
    assert same["x"] is batch["x"]
