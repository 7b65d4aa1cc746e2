"""Two streams of random numbers: code between units draws the same ones on every stage."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from boltmesh.strategies.random_state import seed_torch

STAGE_STRIDE = 0x9E3779B97F4A7C15
"""Far apart seeds for neighbouring stages: 2**64 over the golden ratio, as SplitMix64 steps."""


class RandomStreams:
    """Seeds one run of the step on one stage, which lies within it.

    What all stages compute, such as a random mask of the batch, has to come out the same on all of
    them, however many numbers the units in between draw on the stage that runs them. Units of
    different stages in turn must not draw the same numbers.

    Torch's generators are put back afterwards. Those of numpy and Python are seeded too and stay:
    putting them back costs more than a small chunk, so who runs a step does it once
    (:func:`host_random_kept`).
    """

    def __init__(
        self,
        seed: int,
        stage: int,
        device: torch.device,
        *,
        is_mixed: bool,
        is_mixed_on_host: bool = False,
    ) -> None:
        """Take what the streams start from.

        Args:
            seed: Equal on all stages, and another one for every microbatch.
            stage: Whose units run.
            device: Where they draw.
            is_mixed: Whether code between units draws after the first unit.
            is_mixed_on_host: Whether numpy or Python draw after the first unit begins, in or
                between units.
        """
        self.seed = seed
        self.unit_seed = (seed + (stage + 1) * STAGE_STRIDE) % 2**63
        self.device = device
        self.is_mixed = is_mixed
        self.before: list[torch.Tensor] = []
        """Where torch's generators stood before the run."""
        self.unit_state: list[torch.Tensor] | None = None
        self.host = _HostStream(self.unit_seed) if is_mixed_on_host else None

    def __enter__(self) -> None:
        """Draw from the stream of code between units until ``__exit__``."""
        self.before = self._state()
        seed_torch(self.seed, self.device)
        seed_host(self.seed)

    def __exit__(self, *_: object) -> None:
        self._set(self.before)

    @property
    def goes_on(self) -> bool:
        """Whether the next unit draws on where the last one ended, with nothing to be switched."""
        return self.unit_state is not None and not self.is_mixed and self.host is None

    def around_unit(self) -> AbstractContextManager[None]:
        """Within, draw from the stream of units."""
        return self._around_unit() if self.host is None else self._around_unit_on_host(self.host)

    @contextmanager
    def _around_unit_on_host(self, host: "_HostStream") -> Iterator[None]:
        with self._around_unit(), host.inside():
            yield

    @contextmanager
    def _around_unit(self) -> Iterator[None]:
        if self.unit_state is not None and not self.is_mixed:
            yield
            return
        before = self._state() if self.is_mixed else None
        if self.unit_state is None:
            seed_torch(self.unit_seed, self.device)
        else:
            self._set(self.unit_state)
        try:
            yield
        finally:
            self.unit_state = self._state() if self.is_mixed else []
            if before is not None:
                self._set(before)

    def _state(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)


def seed_host(seed: int) -> None:
    """Start the generators of numpy and Python."""
    np.random.seed(seed % 2**32)
    random.seed(seed)


def host_random_state() -> tuple[Any, Any]:
    """Return where the generators of numpy and Python stand, to be compared."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), (keys.tobytes(), position)  # type: ignore[union-attr]


@contextmanager
def host_random_kept() -> Iterator[None]:
    """Put the generators of numpy and Python back at the end."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


class _HostStream:
    """What numpy and Python draw inside of units, apart from what they draw between them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.state: tuple[Any, Any] | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw from the stream of units."""
        with host_random_kept():
            if self.state is None:
                seed_host(self.seed)
            else:
                random.setstate(self.state[0])
                np.random.set_state(self.state[1])
            try:
                yield
            finally:
                self.state = random.getstate(), np.random.get_state()
