"""A small GPT as a plain LightningModule: it knows nothing of ranks, strategies or boltmesh.

    python examples/gpt.py           in one process, about a minute on a CPU
    boltmesh fit ddp devices=2       the same class, unchanged, in two

Shapes in the comments: B batch, T time, C channels, H heads, V vocabulary.
Source: GPT-2, Radford et al. 2019, with the optimizer of GPT-3, Brown et al. 2020, appendix B.
"""

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

Batch = tuple[Tensor, Tensor]  # tokens and their targets, the next tokens; both (B, T)


class Attention(nn.Module):
    """Causal self-attention with all heads in one projection."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.out = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.n_head, -1))  # (B, T, 3, H, C/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # (B, H, T, C/H) each
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, T, C)


class Block(nn.Module):
    """One pre-norm layer: each half reads the normalised stream and adds to it."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attention = Attention(n_embd, n_head, dropout)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(LightningModule):
    """A decoder-only transformer; the defaults are a byte-level model of 0.9M parameters.

    The learning rate warms up over ``warmup_steps`` and falls along a cosine to a tenth at the
    Trainer's last step. Weight decay is for matrices and embeddings only.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        block_size: int = 128,
        n_layer: int = 4,
        n_head: int = 4,
        n_embd: int = 128,
        dropout: float = 0.0,
        tie_weights: bool = False,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ValueError(f"n_embd={n_embd} is not a multiple of n_head={n_head}.")
        self.save_hyperparameters()
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        self.norm, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                scale = 2 * n_layer if name.endswith(("out.weight", "down.weight")) else 1
                std = 0.02 if "embedding" in name else (weight.shape[1] * scale) ** -0.5
                nn.init.normal_(weight, std=std)  # the scaled ones add up along the depth
        if tie_weights:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, V)

    def loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Continue each text of the batch by its likeliest bytes, the same in every layout."""
        return self.generate(batch[0], 64)

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, draw: bool = False) -> Tensor:
        """Append ``count`` tokens one by one: the likeliest, or drawn by their probabilities."""
        for _ in range(count):
            logits = self(tokens[:, -self.hparams["block_size"] :])[:, -1]  # (B, V)
            odds = logits.softmax(-1)
            following = torch.multinomial(odds, 1) if draw else odds.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, following), dim=1)
        return tokens

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        warmup_steps = self.hparams["warmup_steps"]
        last_step = self.trainer.estimated_stepping_batches  # inf when only the time is limited

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            progress = (step - warmup_steps) / max(1, last_step - warmup_steps)
            return 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))

        rate, decay = self.hparams["learning_rate"], self.hparams["weight_decay"]
        matrices = [weight for weight in self.parameters() if weight.dim() > 1]
        vectors = [weight for weight in self.parameters() if weight.dim() <= 1]
        optimizer = torch.optim.AdamW(matrices, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
        optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
        schedule = LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    from text import TextData

    seed_everything(0)
    Trainer(max_steps=200, limit_val_batches=50).fit(GPT(), TextData())
