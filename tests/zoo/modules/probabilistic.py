"""Probabilistic models: pythae, gpytorch, torchcfm, nflows, FrEIA, and Moirai of uni2ts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["pythae.models", "gpytorch", "torchcfm.models.unet", "FrEIA.framework", "nflows",
           "uni2ts"]  # fmt: skip


def images(number: int) -> Any:
    return torch.sigmoid(normal(number, ROWS, 1, 8, 8))


def of_output(net: Any, batch: Tensor) -> Any:
    return net({"data": batch}).loss


def vae() -> Any:
    from pythae.models import VAE, VAEConfig

    return Trained(VAE(VAEConfig(input_dim=(1, 8, 8), latent_dim=4)), of_output)


def rae() -> Any:
    from pythae.models import RAE_L2, RAE_L2_Config

    return Trained(RAE_L2(RAE_L2_Config(input_dim=(1, 8, 8), latent_dim=4)), of_output)


class Processes(nn.Module):
    """A deep kernel with inducing points, as in gpytorch's example of regression."""

    def __init__(self) -> None:
        super().__init__()
        import gpytorch

        class Layer(gpytorch.models.ApproximateGP):  # type: ignore[misc]
            def __init__(self) -> None:
                points = normal(7, 6, 4)
                distribution = gpytorch.variational.CholeskyVariationalDistribution(6)
                super().__init__(
                    gpytorch.variational.VariationalStrategy(self, points, distribution)
                )
                self.mean = gpytorch.means.ConstantMean()
                self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, values: Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(
                    self.mean(values), self.kernel(values)
                )

        self.features = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )
        self.process = Layer()
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=16)

    def forward(self, values: Tensor, wanted: Tensor) -> Any:
        return -self.bound(self.process(self.features(values)), wanted)


def processes() -> Any:
    return Trained(Processes(), lambda net, batch: net(*batch))


def measured(number: int) -> Any:
    return normal(number, ROWS, 4), normal(number + 1, ROWS)


def matching() -> Any:
    from torchcfm.models.unet import UNetModel

    net = UNetModel(dim=(1, 8, 8), num_channels=32, num_res_blocks=1, num_heads=2,
                    attention_resolutions="4", channel_mult=(1, 2))  # fmt: skip

    def loss(net: Any, batch: Any) -> Any:
        time, start, end = batch
        place = torch.lerp(start, end, time.view(-1, 1, 1, 1))
        return functional.mse_loss(net(time, place), end - start)

    return Trained(net, loss)


def paths(number: int) -> Any:
    time = torch.sigmoid(normal(number, ROWS))
    return time, normal(number + 1, ROWS, 1, 8, 8), normal(number + 2, ROWS, 1, 8, 8)


def flow() -> Any:
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import (
        CompositeTransform,
        MaskedAffineAutoregressiveTransform,
        ReversePermutation,
    )

    layers = []
    for _ in range(4):
        layers.append(ReversePermutation(features=4))
        layers.append(MaskedAffineAutoregressiveTransform(features=4, hidden_features=16))
    net = Flow(CompositeTransform(layers), StandardNormal([4]))

    def likelihood(net: Any, batch: Any) -> Any:
        return -net.log_prob(inputs=batch[0]).mean()

    return Trained(net, likelihood)


def invertible() -> Any:
    import FrEIA.framework as frames
    import FrEIA.modules as parts

    def inner(into: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(into, 16), nn.ReLU(), nn.Linear(16, out))

    net = frames.SequenceINN(4)
    for _ in range(4):
        net.append(parts.AllInOneBlock, subnet_constructor=inner)

    def loss(net: Any, batch: Any) -> Any:
        found, log_volume = net(batch[0])
        return (0.5 * found.square().sum(1) - log_volume).mean()

    return Trained(net, loss)


PATCHES, SIZE = 6, 8


def moirai() -> Any:
    from uni2ts.distribution import StudentTOutput
    from uni2ts.model.moirai import MoiraiModule, MoiraiPretrain

    net = MoiraiModule(
        distr_output=StudentTOutput(), d_model=64, num_layers=4, patch_sizes=(SIZE,),
        max_seq_len=16, attn_dropout_p=0.0, dropout_p=0.0,
    )  # fmt: skip
    return MoiraiPretrain(
        min_patches=2, min_mask_ratio=0.15, max_mask_ratio=0.5, max_dim=8, num_training_steps=8,
        num_warmup_steps=1, module=net, log_on_step=True,
    )  # fmt: skip


def series(number: int) -> Any:
    ones = torch.ones(ROWS, PATCHES, dtype=torch.int64)
    masked = torch.zeros(ROWS, PATCHES, dtype=torch.bool)
    masked[:, -2:] = True
    return {
        "target": normal(number, ROWS, PATCHES, SIZE),
        "observed_mask": torch.ones(ROWS, PATCHES, SIZE, dtype=torch.bool),
        "sample_id": ones, "variate_id": integers(number, 2, ROWS, 1).expand(-1, PATCHES).clone(),
        "time_id": torch.arange(PATCHES).repeat(ROWS, 1), "prediction_mask": masked,
        "patch_size": SIZE * ones,
    }  # fmt: skip


ENTRIES = [
    Entry("pythae VAE", vae, images, draws=True),
    Entry("pythae RAE_L2", rae, images),
    Entry("gpytorch VariationalELBO", processes, measured, microbatches=1, draws=True),
    Entry("torchcfm UNetModel", matching, paths),
    Entry("nflows MaskedAffineAutoregressive", flow, lambda number: (normal(number, ROWS, 4),)),
    Entry("FrEIA AllInOneBlock", invertible, lambda number: (normal(number, ROWS, 4),)),
    Entry("uni2ts MoiraiPretrain", moirai, series),
]
