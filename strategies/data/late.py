"""What a pipeline asks of the data axis.

Its stages run pieces of the LightningModule, several microbatches at once, and hand the gradients
of a batch over when all of them are made. So there is no forward pass of the module that a data
axis could go along with: it is told when a batch begins, and when its gradients are in ``.grad``.
"""

from abc import abstractmethod

from boltmesh.strategies.data.axis import DataAxis


class LateGradients(DataAxis):
    """A data axis that can be used where the gradients of a batch come all at once."""

    @abstractmethod
    def begin_batch(self) -> None:
        """Called before each batch of training. Collective over the axis."""

    @abstractmethod
    def end_batch(self) -> bool:
        """Called within the backward pass of a batch, when its gradients are in ``.grad``.

        Collective over the axis for the last batch of an accumulation window, as ``no_sync`` tells.

        Returns:
            Whether ``.grad`` holds averages over several ranks now.

        Raises:
            DivergenceError: When another rank has no loss for its batch.
        """

    @abstractmethod
    def pass_over_batch(self) -> bool:
        """Called in the place of ``end_batch`` where a batch gave no loss. Collective likewise.

        Raises:
            DivergenceError: When another rank has one.
        """
