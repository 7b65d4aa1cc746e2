"""diffusers and denoising-diffusion-pytorch: denoisers, by the loss of their training scripts."""

from typing import Any

from torch.nn import functional

from tests.zoo.entry import ROWS, Entry, Trained, integers, normal

IMPORTS = ["diffusers.models", "denoising_diffusion_pytorch"]


def batch(number: int) -> Any:
    images = normal(number, ROWS, 3, 8, 8)
    return images, normal(number + 50, ROWS, 3, 8, 8), integers(number, 100, ROWS)


def denoises(net: Any, batch: Any) -> Any:
    from diffusers import DDPMScheduler

    images, noise, times = batch
    noisy = DDPMScheduler(num_train_timesteps=100).add_noise(images, noise, times)
    return functional.mse_loss(net(noisy, times).sample, noise)


def unet() -> Any:
    from diffusers import UNet2DModel

    net = UNet2DModel(sample_size=8, block_out_channels=(8, 8), layers_per_block=1,
                      norm_num_groups=4, attention_head_dim=4,
                      down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                      up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    return Trained(net, denoises)


def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=3,
                                num_layers=3, sample_size=8, patch_size=2, norm_num_groups=4,
                                num_embeds_ada_norm=10)  # fmt: skip

    def loss(net: Any, batch: Any) -> Any:
        images, noise, times = batch
        found = net(images + noise, timestep=times, class_labels=times % 10).sample
        return functional.mse_loss(found, noise)

    return Trained(net, loss)


def vae() -> Any:
    from diffusers import AutoencoderKL

    net = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=2,
                        down_block_types=("DownEncoderBlock2D",) * 2,
                        up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip

    def loss(net: Any, batch: Any) -> Any:
        posterior = net.encode(batch[0]).latent_dist
        found = net.decode(posterior.sample()).sample
        return functional.mse_loss(found, batch[0]) + 1e-3 * posterior.kl().mean()

    return Trained(net, loss)


def gaussian() -> Any:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2),
                            image_size=8, timesteps=20)  # fmt: skip
    return Trained(net, lambda net, batch: net(batch[0].sigmoid()))


ENTRIES = [
    Entry("diffusers UNet2DModel", unet, batch),
    Entry("diffusers DiTTransformer2DModel", dit, batch, draws=True, has_unused=True),
    Entry("diffusers AutoencoderKL", vae, batch, draws=True),
    Entry(
        "denoising-diffusion-pytorch GaussianDiffusion",
        gaussian,
        batch,
        draws=True,
        has_unused=True,
    ),
]
