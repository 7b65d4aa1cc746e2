"""Names of parameters in a LightningModule, and in the model that it holds."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from boltmesh.errors import ConfigError

T = TypeVar("T")


def find_prefix(names: Iterable[str]) -> str:
    """The attribute of the LightningModule that holds its model, with a point behind it.

    It can be told when the module has parameters and buffers in one attribute only.

    Raises:
        ConfigError: When there are several.
    """
    counts: dict[str, int] = {}
    for name in names:
        first, point, _ = name.partition(".")
        key = first + point
        counts[key] = counts.get(key, 0) + 1
    if len(counts) == 1:
        (found,) = counts
        if found.endswith("."):
            return found
    found = ", ".join(f"{key} ({count})" for key, count in sorted(counts.items())[:6])
    raise ConfigError(
        f"Which tensors are those of the model cannot be told: they begin with {found}. Say "
        f"--prefix '' to keep all names as they are, or what is to be taken off them, such as "
        f"--prefix {_likeliest(counts)}"
    )


def take_off(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Those whose names begin with a prefix, by the rest of their names.

    Raises:
        ConfigError: When there are none.
    """
    kept = {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }
    kept.pop("", None)
    if not kept:
        first = next(iter(tensors), "none")
        raise ConfigError(
            f"No tensor has a name that begins with {prefix!r}; the first one is {first}."
        )
    return kept


def _likeliest(counts: Mapping[str, int]) -> str:
    attributes = [each for each in counts if each.endswith(".")]
    return max(attributes, key=lambda each: (counts[each], each), default="''")
