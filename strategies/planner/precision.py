"""How many bytes an element takes in each of its forms, by the Trainer's precision."""

from dataclasses import dataclass

from boltmesh.errors import ConfigError


@dataclass(frozen=True)
class Widths:
    """Bytes of an element.

    Without autocast gradients are reduced as they are; with it in fp32, whatever is computed in.
    """

    stored: int | None
    """Of a parameter and its gradient between steps; None is what the model builds."""
    computed: int | None
    """Of a parameter when it is gathered, and of its whole gradient; None is as stored."""
    reduced: int | None
    """Of a gradient on its way between ranks; None is as computed."""

    def store(self, element_bytes: int) -> int:
        """Bytes of an element at rest."""
        return self.stored or element_bytes

    def compute(self, element_bytes: int, *, is_autocast: bool = True) -> int:
        """Bytes of a gathered element."""
        chosen = self.computed if is_autocast else None
        return chosen or self.store(element_bytes)

    def reduce(self, element_bytes: int, *, is_autocast: bool = True) -> int:
        """Bytes of an element of a reduction."""
        return self.reduced or self.compute(element_bytes, is_autocast=is_autocast)

    @property
    def is_autocast(self) -> bool:
        """Whether parameters are computed in another type than they are stored in."""
        return self.computed is not None


_WIDTHS = {
    "32-true": Widths(None, None, None),
    "64-true": Widths(8, None, None),
    "16-true": Widths(2, None, None),
    "bf16-true": Widths(2, None, None),
    "16-mixed": Widths(None, 2, 4),
    "bf16-mixed": Widths(None, 2, 4),
}


def widths_of(precision: str) -> Widths:
    """Return the widths of a Trainer's ``precision``.

    Raises:
        ConfigError: Where they depend on more than its name.
    """
    if precision not in _WIDTHS:
        raise ConfigError(
            f"trainer.precision={precision} stores weights as its library decides, which cannot "
            f"be planned. Plan with trainer.precision=bf16-mixed."
        )
    return _WIDTHS[precision]
