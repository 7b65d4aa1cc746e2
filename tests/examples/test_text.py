"""Text from files, folders, datasets and the standard library, byte for byte."""

import sys
from pathlib import Path

import datasets
import pytest
import torch
from text import END_OF_DOCUMENT, STANDARD_LIBRARY_BYTES, TextData, Windows, decode
from torch.utils.data import DataLoader

LOREM = "".join(f"{number:03d}," for number in range(300))  # no piece of it appears twice


def windows_of(loader: DataLoader) -> Windows:
    assert isinstance(loader.dataset, Windows)
    return loader.dataset


def bytes_of(loader: DataLoader) -> bytes:
    return bytes(windows_of(loader).text.tolist())


def write_folder(folder: Path, count: int) -> list[bytes]:
    contents = [f"document {number} ".encode() * (number + 1) for number in range(count)]
    for number, content in enumerate(contents):
        file = folder / f"{number % 3}" / f"{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    return contents


@pytest.mark.parametrize(
    ("length", "block_size"), [(101, 10), (100, 10), (11, 10), (97, 7), (2, 1)]
)
def test_windows_cover_every_byte_and_predict_the_next_one(length: int, block_size: int) -> None:
    text = torch.arange(length, dtype=torch.uint8)
    windows = Windows(text, block_size)
    targets = []
    for index in range(len(windows)):
        tokens, following = windows[index]
        assert tokens.dtype == torch.long
        assert tokens.shape == following.shape == (block_size,)
        assert torch.equal(tokens + 1, following)
        targets += following.tolist()
    assert sorted(set(targets)) == list(range(1, length))
    assert len(targets) - (length - 1) < block_size


def test_the_last_batch_may_be_smaller(tmp_path: Path) -> None:
    file = tmp_path / "lorem.txt"
    file.write_text(LOREM)
    data = TextData(file, block_size=16, batch_size=7)
    sizes = [len(tokens) for tokens, _ in data.train_dataloader()]
    assert set(sizes[:-1]) == {7}
    assert 0 < sizes[-1] < 7
    assert sum(sizes) == len(windows_of(data.train_dataloader()))


def test_a_file_is_cut_once_and_nothing_of_the_validation_is_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "lorem.txt"
    file.write_text(LOREM)
    data = TextData(file, block_size=16, validation_fraction=0.25)
    train, validation = bytes_of(data.train_dataloader()), bytes_of(data.val_dataloader())
    assert train + validation == LOREM.encode() + END_OF_DOCUMENT
    assert abs(len(validation) / len(LOREM) - 0.25) < 0.01
    windows = windows_of(data.train_dataloader())
    trained = {
        byte
        for tokens, following in map(windows.__getitem__, range(len(windows)))
        for byte in (decode(tokens) + decode(following[-1:])).split(",")[1:-1]
    }
    validated = set(validation.decode().split(",")[1:-1])
    assert trained
    assert validated
    assert trained.isdisjoint(validated)


def test_a_folder_gives_each_of_its_documents_once_in_an_order_that_repeats(tmp_path: Path) -> None:
    contents = write_folder(tmp_path, 20)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")

    def read(seed: int) -> bytes:
        data = TextData(tmp_path, block_size=8, seed=seed)
        return bytes_of(data.train_dataloader()) + bytes_of(data.val_dataloader())

    assert sorted(read(0).split(END_OF_DOCUMENT)[:-1]) == sorted(contents)
    assert read(0) == read(0)
    assert read(0) != read(1)


def test_suffixes_choose_the_files_of_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, 6)
    (tmp_path / "notes.log").write_text("only this " * 20)
    data = TextData(tmp_path, block_size=8, suffixes=(".log",))
    assert bytes_of(data.train_dataloader()).startswith(b"only this ")


def test_the_default_is_the_standard_library_up_to_its_limit() -> None:
    data = TextData(batch_size=4)
    data.setup("fit")
    train, validation = bytes_of(data.train_dataloader()), bytes_of(data.val_dataloader())
    assert len(train) + len(validation) == STANDARD_LIBRARY_BYTES
    assert train.count(b"import ") > 1000
    assert b"import " in validation


def test_limit_mb_stops_reading(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(b"x" * 5000)
    data = TextData(tmp_path, block_size=8, limit_mb=0.001)
    whole = bytes_of(data.train_dataloader()) + bytes_of(data.val_dataloader())
    assert whole == b"x" * 1000


def test_bytes_that_are_no_utf8_pass_unchanged(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    (tmp_path / "latin.txt").write_bytes(content)
    data = TextData(tmp_path / "latin.txt", block_size=8)
    whole = bytes_of(data.train_dataloader()) + bytes_of(data.val_dataloader())
    assert whole == content + END_OF_DOCUMENT


def test_prompts_are_windows_of_the_validation_text(tmp_path: Path) -> None:
    (tmp_path / "lorem.txt").write_text(LOREM)
    data = TextData(tmp_path, block_size=16)
    (prompts, _) = next(iter(data.predict_dataloader()))
    assert len(prompts) == 8
    assert decode(prompts[0]).encode() == bytes_of(data.val_dataloader())[:16]


def test_text_that_is_too_short_says_which_block_size_fits(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 49)
    with pytest.raises(ValueError, match=r"one part has 5\. .*set block_size=4\."):
        TextData(tmp_path, block_size=128).setup()
    TextData(tmp_path, block_size=4).setup()


def test_a_missing_path_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere' is neither a file nor a folder"):
        TextData(tmp_path / "nowhere").setup()
    with pytest.raises(ValueError, match=r"holds no file that ends in \.py, \.txt"):
        TextData(tmp_path).setup()


def test_contradictory_arguments_are_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        TextData(tmp_path, dataset="text")
    with pytest.raises(ValueError, match="validation_fraction=1"):
        TextData(tmp_path, validation_fraction=1.0)


@pytest.fixture
def rows() -> list[str]:
    return [f"row {number}: {'abc' * number}" for number in range(40)]


def whole_text(data: TextData) -> list[str]:
    data.prepare_data()
    whole = bytes_of(data.train_dataloader()) + bytes_of(data.val_dataloader())
    return whole.decode().split("\0")[:-1]


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path: Path, rows: list[str]) -> None:
    datasets.Dataset.from_dict({"story": rows}).save_to_disk(tmp_path / "saved")
    found = whole_text(TextData(dataset=str(tmp_path / "saved"), column="story", block_size=8))
    assert sorted(found) == sorted(rows)
    assert found != rows


def test_a_split_of_a_saved_dictionary_is_chosen(tmp_path: Path, rows: list[str]) -> None:
    parts = {
        "train": datasets.Dataset.from_dict({"text": rows}),
        "other": datasets.Dataset.from_dict({"text": ["other"] * 30}),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert sorted(whole_text(TextData(dataset=str(tmp_path / "saved"), block_size=8))) == sorted(
        rows
    )
    other = TextData(dataset=str(tmp_path / "saved"), dataset_args={"split": "other"}, block_size=8)
    assert set(whole_text(other)) == {"other"}


def test_a_dataset_is_loaded_by_name_with_its_arguments(
    tmp_path: Path, rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.txt").write_text("\n".join(rows))
    arguments = {"data_files": str(tmp_path / "rows.txt"), "cache_dir": str(tmp_path / "cache")}
    assert sorted(
        whole_text(TextData(dataset="text", dataset_args=arguments, block_size=8))
    ) == sorted(rows)


def test_a_missing_column_is_refused_with_those_there_are(tmp_path: Path, rows: list[str]) -> None:
    datasets.Dataset.from_dict({"story": rows, "id": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="no column 'text'; its columns are story, id"):
        TextData(dataset=str(tmp_path / "saved")).setup()


def test_a_dataset_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'boltmesh\[datasets\]'"):
        TextData(dataset="text").prepare_data()
