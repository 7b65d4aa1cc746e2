"""A GAN in the manner of Lightning's example: two optimizers that take turns in one step.

Without the example's batch norms: rows of drawn noise are equal here, see ``even_draws``.

Source: ``examples/pytorch/domain_templates/generative_adversarial_net.py`` of Lightning
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, integers, normal

IMPORTS: list[str] = []

SHAPE, LATENT = (1, 8, 8), 12


def batch(number: int) -> Any:
    return normal(number, ROWS, *SHAPE).tanh(), integers(number, 10, ROWS)


class Generator(nn.Module):
    """From noise to images."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(LATENT, 16), nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(16, 24), nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(24, SHAPE[0] * SHAPE[1] * SHAPE[2]), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.model(noise)
        return images.view(len(images), *SHAPE)


class Discriminator(nn.Module):
    """From images to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(SHAPE[0] * SHAPE[1] * SHAPE[2], 32), nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(32, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.view(len(images), -1))
        return logits


class GAN(LightningModule):
    """Manual optimization; looks at images of fixed noise at the end of an epoch."""

    steps_of_a_batch = 2

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()
        self.fixed_noise = torch.randn(8, LATENT)

    def forward(self, noise: Tensor) -> Any:
        return self.generator(noise)

    def adversarial_loss(self, images: Tensor, truth: float) -> Tensor:
        logits = self.discriminator(images)
        wanted = torch.full((len(images), 1), truth).type_as(images)
        return functional.binary_cross_entropy_with_logits(logits, wanted)

    def training_step(self, batch: Any) -> None:
        images, _ = batch
        of_generator, of_discriminator = self.optimizers()  # type: ignore[attr-defined]
        noise = torch.randn(len(images), LATENT).type_as(images)

        self.toggle_optimizer(of_generator)
        generator_loss = self.adversarial_loss(self(noise), 1.0)
        of_generator.zero_grad()
        self.manual_backward(generator_loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        real_loss = self.adversarial_loss(images, 1.0)
        loss = (real_loss + self.adversarial_loss(self(noise).detach(), 0.0)) / 2
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)

        self.log_dict({"discriminator_loss": loss, "generator_loss": generator_loss})

    def on_train_epoch_end(self) -> None:
        images = self(self.fixed_noise.type_as(self.generator.model[0].weight))  # type: ignore[arg-type]
        for logger in self.loggers:
            logger.experiment.add_images(  # type: ignore[attr-defined]
                "generated", images, self.current_epoch
            )

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(each.parameters(), lr=2e-3, betas=(0.5, 0.999))
            for each in (self.generator, self.discriminator)
        ]


ENTRIES = [
    Entry(
        "Lightning's example of a GAN",
        GAN,
        batch,
        is_shared_batch=True,
        has_unused=True,
        draws=True,
    )
]
