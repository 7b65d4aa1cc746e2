"""Byte-level text for language models: a file, a folder of them, or a Hugging Face dataset.

Without arguments it is the source of the running Python's standard library, so that an example
trains on real text on any machine, with nothing to download.
"""

import math
import random
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

END_OF_DOCUMENT = b"\0"
STANDARD_LIBRARY_BYTES = 8_000_000
NOT_OF_THE_STANDARD_LIBRARY = {"dist-packages", "site-packages", "test", "tests"}

Batch = tuple[Tensor, Tensor]


class Windows(Dataset[Batch]):
    """Pieces of ``block_size`` bytes that lie end to end, and the bytes one further as targets.

    The last piece is moved back to where the text ends, so every byte but the first is a target.
    The text must be longer than a piece.
    """

    def __init__(self, text: Tensor, block_size: int) -> None:
        self.text, self.block_size = text, block_size

    def __len__(self) -> int:
        return math.ceil((len(self.text) - 1) / self.block_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = min(index * self.block_size, len(self.text) - 1 - self.block_size)
        window = self.text[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


class TextData(LightningDataModule):
    """Documents as bytes, shuffled once, laid end to end and cut into training and validation.

    No window crosses the cut. Every rank reads the same text; the Trainer distributes the windows.

    Args:
        path: A file, or a folder: its files that end in one of ``suffixes`` are the documents.
        dataset: Instead of ``path``, the name of a dataset for ``datasets.load_dataset``, or a
            folder that ``save_to_disk`` wrote. Needs the package ``datasets``.
        dataset_args: Arguments of ``load_dataset``: ``name``, ``data_files``, ``split`` [train].
        column: The column of ``dataset`` that holds the text.
        limit_mb: Stop reading after so many million bytes. By default everything is read, of the
            standard library 8 million bytes.
        validation_fraction: Share of the bytes that is kept for validation.
        seed: Seed of the order of the documents.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        dataset: str | None = None,
        block_size: int = 128,
        batch_size: int = 32,
        *,
        dataset_args: Mapping[str, Any] | None = None,
        column: str = "text",
        suffixes: Sequence[str] = (".py", ".txt", ".md", ".rst"),
        limit_mb: float | None = None,
        validation_fraction: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if path is not None and dataset is not None:
            raise ValueError(f"Give path={str(path)!r} or dataset={dataset!r}, not both.")
        if not 0.0 < validation_fraction < 1.0:
            raise ValueError(f"validation_fraction={validation_fraction} is not between 0 and 1.")
        self.path = None if path is None else Path(path)
        self.dataset, self.dataset_args, self.column = dataset, dict(dataset_args or {}), column
        self.suffixes, self.limit_mb, self.seed = tuple(suffixes), limit_mb, seed
        self.validation_fraction, self.block_size = validation_fraction, block_size
        self.batch_size, self.num_workers = batch_size, num_workers
        self._parts: tuple[Windows, Windows] | None = None

    def prepare_data(self) -> None:
        """Download the dataset on one rank of each host; ``setup`` finds it in the cache."""
        if self.dataset is not None:
            load_dataset(self.dataset, self.dataset_args)

    def setup(self, stage: str | None = None) -> None:
        if self._parts is None:
            text = _lay_end_to_end(self._documents(), self._limit_bytes())
            cut = round(len(text) * (1.0 - self.validation_fraction))
            shorter = min(cut, len(text) - cut)
            if shorter <= self.block_size:
                raise ValueError(
                    f"block_size={self.block_size} needs {self.block_size + 1} bytes for training "
                    f"and as many for validation, but of {len(text)} bytes one part has {shorter}. "
                    f"Give more text, or set block_size={max(1, shorter - 1)}."
                )
            train, validation = text[:cut], text[cut:]
            self._parts = Windows(train, self.block_size), Windows(validation, self.block_size)

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._split()[0], shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._split()[1])

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Batch]:
        """A few windows of the validation text, to be continued."""
        validation = self._split()[1]
        return self._loader(Subset(validation, range(min(8, len(validation)))))

    def _split(self) -> tuple[Windows, Windows]:
        self.setup()
        assert self._parts is not None
        return self._parts

    def _loader(self, windows: Dataset[Batch], *, shuffle: bool = False) -> DataLoader[Batch]:
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _documents(self) -> Iterator[bytes]:
        if self.dataset is not None:
            rows = load_dataset(self.dataset, self.dataset_args)
            if self.column not in rows.column_names:
                raise ValueError(
                    f"dataset={self.dataset!r} has no column {self.column!r}; "
                    f"its columns are {', '.join(rows.column_names)}."
                )
            texts = rows.select_columns(self.column).shuffle(seed=self.seed, keep_in_memory=True)
            return (row[self.column].encode() for row in texts)
        if self.path is not None:
            return _read_files(self.path, self.suffixes, self.seed)
        library = Path(sysconfig.get_path("stdlib"))
        return _read_files(library, (".py",), self.seed, without=NOT_OF_THE_STANDARD_LIBRARY)

    def _limit_bytes(self) -> int | None:
        if self.limit_mb is not None:
            return round(self.limit_mb * 1e6)
        is_default = self.path is None and self.dataset is None
        return STANDARD_LIBRARY_BYTES if is_default else None


def load_dataset(dataset: str, arguments: Mapping[str, Any]) -> Any:
    """Load one split of a dataset by its name, or from a folder that ``save_to_disk`` wrote."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        message = f"dataset={dataset!r} needs a package: pip install 'boltmesh[datasets]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    split, folder = arguments.get("split", "train"), Path(dataset)
    if (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(folder)[split]
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(folder)
    return datasets.load_dataset(dataset, **{**arguments, "split": split})


def decode(tokens: Tensor) -> str:
    """Turn one row of tokens back into text; bytes that are no UTF-8 become question marks."""
    return bytes(tokens.tolist()).decode(errors="replace")


def _read_files(
    path: Path, suffixes: Sequence[str], seed: int, *, without: Collection[str] = ()
) -> Iterator[bytes]:
    """Read a file, or what a folder holds, in an order that only names and the seed decide."""
    if path.is_file():
        names = [path.name]
        path = path.parent
    elif path.is_dir():
        inside = (file.relative_to(path) for file in path.rglob("*") if file.suffix in suffixes)
        names = sorted(str(name) for name in inside if not set(without).intersection(name.parts))
        random.Random(seed).shuffle(names)
    else:
        raise FileNotFoundError(f"path={str(path)!r} is neither a file nor a folder.")
    files = [path / name for name in names if (path / name).is_file()]
    if not files:
        raise ValueError(f"path={str(path)!r} holds no file that ends in {', '.join(suffixes)}.")
    return (file.read_bytes() for file in files)


def _lay_end_to_end(documents: Iterable[bytes], limit_bytes: int | None) -> Tensor:
    text = bytearray()
    for document in documents:
        text += document + END_OF_DOCUMENT
        if limit_bytes is not None and len(text) >= limit_bytes:
            break
    if not text:  # torch.frombuffer refuses an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes]
