"""Decides which chunk of optimizer state is stored where: arithmetic alone, without torch.

The device gets the chunks whose gradients arrive last in the backward pass: nothing hides their
steps, which are fastest there. A disk gets those that arrive first: the rest of the backward pass
is left to read, step and write them.

Source: Twin-Flow also keeps a static share on the device,
https://github.com/deepspeedai/DeepSpeed/tree/master/blogs/deepspeed-offloadpp
"""

from collections.abc import Mapping, Sequence

PLACES = ("disk", "host", "device")
"""In the order in which gradients arrive."""


def plan_places(numels: Sequence[int], shares: Mapping[str, float]) -> list[str]:
    """Place chunks by shares of their joint size.

    Args:
        numels: Elements of each chunk, in the order in which gradients arrive.
        shares: Fractions for ``"host"`` and ``"disk"``, at most 1 together; the rest stays on
            the device.

    Returns:
        A place for each chunk. Chunks are not divided, so a share is met to within half a chunk.
    """
    total = sum(numels)
    bounds = {}
    end = 0.0
    for place in PLACES[:-1]:
        end += shares.get(place, 0.0) * total
        bounds[place] = end
    places = []
    done = 0
    for numel in numels:
        middle = done + numel / 2
        # Rounding must not leave a chunk on the device that was to leave it.
        fitting = (place for place in PLACES[:-1] if middle <= bounds[place] * (1 + 1e-9))
        places.append(next(fitting, PLACES[-1]))
        done += numel
    return places
