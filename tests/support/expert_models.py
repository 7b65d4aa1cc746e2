"""Tiny mixtures of experts: of transformers as they are, and some as people write them by hand."""

from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

WORDS = 61
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def language_model(kind: str) -> Any:
    """Return a causal language model of transformers with random weights."""
    import transformers as hf

    kind, _, kernel = kind.partition(":")
    has_aux, kernel = kernel != "no aux", kernel.removeprefix("no aux")
    if kind == "mixtral":
        config = hf.MixtralConfig(
            **SIZES,
            num_local_experts=8,
            num_experts_per_tok=2,
            output_router_logits=has_aux,
            router_aux_loss_coef=0.02,
        )
        config._experts_implementation = kernel or "eager"
        return hf.MixtralForCausalLM(config)
    if kind == "qwen3_moe":
        config = hf.Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=3,
            output_router_logits=has_aux,
            router_aux_loss_coef=0.02,
        )
        config._experts_implementation = kernel or "eager"
        return hf.Qwen3MoeForCausalLM(config)
    if kind != "gpt_oss":
        from tests.support import causal_lms

        return (
            causal_lms.build(kind) if causal_lms.has_head(kind) else causal_lms.build_decoder(kind)
        )
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16}
    config = hf.GptOssConfig(**{**SIZES, **more}, output_router_logits=has_aux)
    config._experts_implementation = kernel or "eager"
    return hf.GptOssForCausalLM(config)


class Experts(nn.Module):
    """Stacked experts, written by hand; ``is_coupled`` makes a row's result depend on others."""

    def __init__(self, width: int, num_experts: int, *, is_coupled: bool = False) -> None:
        super().__init__()
        self.num_experts, self.is_coupled = num_experts, is_coupled
        self.up = nn.Parameter(torch.randn(num_experts, width, 24) * 0.2)
        self.bias = nn.Parameter(torch.randn(num_experts, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, 24, width) * 0.2)

    @override
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            row, slot = torch.where(chosen == expert)
            hidden = functional.gelu(x[row] @ self.up[expert] + self.bias[expert])
            made = hidden @ self.down[expert] * weights[row, slot, None]
            if self.is_coupled:
                made = made / max(1, len(row)) ** 0.5
            out = out.index_add(0, row, made)
        return out


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, width: int, num_experts: int, num_choices: int, **options: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(width, num_experts, **options)
        self.num_choices = num_choices

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(self.num_choices, -1)
        return self.experts(rows, chosen, weights).view(x.shape)


class ListMixture(nn.Module):
    """Experts as modules of a list, called one by one."""

    def __init__(self, width: int, num_experts: int, num_choices: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))
        self.num_choices = num_choices

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.scores(rows).softmax(-1).topk(self.num_choices, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if len(row):
                out.index_add_(0, row, expert(rows[row]) * weights[row, slot, None])
        return out.view(x.shape)

    def scores(self, rows: Tensor) -> Tensor:
        """Return what experts are chosen by."""
        return self.gate(rows)


class CalledList(nn.ModuleList):
    """A list that calls its experts itself, as that of Switch Transformers."""

    @override
    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number in chosen.unique():
            row, slot = torch.where(chosen == number)
            out.index_add_(0, row, self[number](rows[row]) * weights[row, slot, None])
        return out


class CalledMixture(ListMixture):
    """A router before such a list."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.experts = CalledList(self.experts)

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(self.num_choices, -1)
        made: Tensor = self.experts(rows, chosen, weights)
        return made.view(x.shape)


class ReadList(ListMixture):
    """Reads a parameter of an expert beside calling it."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * next(self.experts[0].parameters()).sum()


class EvenList(ListMixture):
    """Rows go in turns to pairs of experts, one of each half of them."""

    @override
    def scores(self, rows: Tensor) -> Tensor:
        num_experts = len(self.experts)
        pair = torch.arange(len(rows))[:, None] % 3 + torch.tensor([0, num_experts // 2])
        return self.gate(rows) + torch.zeros(len(rows), num_experts).scatter(1, pair, 20.0)


class Mlp(nn.Module):
    """A gated expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 20, bias=False)
        self.up, self.down = nn.Linear(width, 20, bias=False), nn.Linear(20, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class MaskedMixture(nn.Module):
    """As Mixtral before transformers 5: a mask, jitter in place, counted rows, two results."""

    def __init__(self, width: int, num_experts: int, num_choices: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(num_experts))
        self.num_choices = num_choices
        self.num_rows: Tensor
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.long))

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        x = x.clone()
        if self.training:
            x *= torch.empty_like(x).uniform_(0.9, 1.1)
        self.num_rows.add_(batch * length)
        x = x.view(-1, width)
        logits = self.gate(x)
        weights, chosen = logits.softmax(-1).topk(self.num_choices, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, row = torch.where(mask[number])
            if row.shape[0] == 0:
                continue
            made = expert(x[None, row].reshape(-1, width)) * weights[row, slot, None]
            out.index_add_(0, row, made.to(out.dtype))
        return out.view(batch, length, width), logits


class RepeatedMixture(nn.Module):
    """As DeepSeek-MoE was published: all experts called, rows repeated, a shared expert."""

    def __init__(self, width: int, num_experts: int, num_choices: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(num_experts))
        self.shared_experts = Mlp(width)
        self.num_choices = num_choices

    @override
    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        scores = self.gate(flat).softmax(-1)
        weights, chosen = scores.topk(self.num_choices, -1, sorted=False)
        if self.training:
            repeated = flat.repeat_interleave(self.num_choices, 0)
            made = torch.empty_like(repeated)
            for number, expert in enumerate(self.experts):
                mine = chosen.view(-1) == number
                made[mine] = expert(repeated[mine]).to(made.dtype)
            out = (made.view(*weights.shape, -1) * weights[..., None]).sum(1)
        else:
            out = self.infer(flat, chosen, weights)
        return out.to(x.dtype).view(x.shape) + self.shared_experts(x)

    @torch.no_grad()
    def infer(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        order = chosen.view(-1).argsort()
        ends = chosen.view(-1).bincount().cumsum(0).tolist()
        for number, end in enumerate(ends):
            first = ends[number - 1] if number else 0
            if first == end:
                continue
            row = order[first:end] // self.num_choices
            made = self.experts[number](x[row]) * weights.view(-1, 1)[order[first:end]]
            out.index_add_(0, row, made.to(out.dtype))
        return out


class BatchedExperts(nn.Module):
    """Experts that multiply as many rows each in one product."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, width, 24) * 0.2)
        self.bias = nn.Parameter(torch.randn(num_experts, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, 24, width) * 0.2)

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("ech,ehi->eci", x, self.up) + self.bias[:, None]
        return torch.einsum("eci,eih->ech", functional.gelu(hidden), self.down)


class CapacityMixture(nn.Module):
    """As GShard: products with masks, and rows that an expert has no place for are dropped."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = BatchedExperts(width, num_experts)

    @override
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(1, -1)
        number = self.gate.out_features
        capacity = int(1.25 * len(rows) / number) + 1
        wanted = functional.one_hot(chosen[:, 0], number)
        place = (wanted.cumsum(0) - 1) * wanted
        is_kept = wanted * (place < capacity)
        mask = is_kept[..., None] * functional.one_hot(place.clamp(max=capacity - 1), capacity)
        given = torch.einsum("tec,th->ech", mask.to(rows), rows)
        made = torch.einsum("tec,ech->th", mask.to(rows) * weights[..., None], self.experts(given))
        return made.view(x.shape)


class CoupledList(ListMixture):
    """Experts whose results depend on how many rows they get."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(args[0], args[0]), Centered()) for _ in self.experts
        )


class Centered(nn.Module):
    """Subtracts the mean of all rows."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Residual(nn.Sequential):
    """Modules in a row, of which the last may give router logits beside its output."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if isinstance(made, tuple):
            made, self.logits = made
        return made


class ByHand(nn.Module):
    """A language model of two blocks, with the interface of transformers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = {
            "stacked": lambda: Mixture(32, 8, 2),
            "all": lambda: Mixture(32, 8, 8),
            "coupled": lambda: Mixture(32, 8, 2, is_coupled=True),
            "list": lambda: ListMixture(32, 8, 2),
            "list, even": lambda: EvenList(32, 8, 2),
            "list, even on a rank": lambda: EvenList(32, 6, 2),
            **dict.fromkeys(CHANGED, lambda: ListMixture(32, 8, 2)),
            "masked": lambda: MaskedMixture(32, 8, 2),
            "repeated": lambda: RepeatedMixture(32, 8, 3),
            "capacity": lambda: CapacityMixture(32, 8),
            "called list": lambda: CalledMixture(32, 8, 2),
            "list, read": lambda: ReadList(32, 8, 2),
            "coupled list": lambda: CoupledList(32, 8, 2),
            "dense": lambda: nn.Linear(32, 32),
        }[kind]
        self.embed, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        in_row = Residual if kind in TUPLES else nn.Sequential
        self.blocks = nn.ModuleList(
            in_row(nn.LayerNorm(32), nn.Linear(32, 32), make()) for _ in range(2)
        )

    @override
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


TUPLES = ("masked", "repeated")
"""Kinds in blocks that take what is beside the output."""
CHANGED = ("list, frozen", "list, adapters", "list, hooked")
"""Experts of a list that are changed once they are made."""
ADAPTED = ", LoRA"
"""Ends kinds of stacked experts with adapters of peft on all stacks."""
BY_HAND = (
    *("stacked", "all", "coupled", "capacity", "dense"),
    *("list", "list, even", "list, even on a rank", "list, read", "called list", "coupled list"),
    *TUPLES,
    *CHANGED,
)


def change(net: nn.Module, kind: str) -> nn.Module:
    """Return a model with some experts frozen, adapters on all experts, or a hook within one."""
    if kind == "list, adapters":
        from peft import LoraConfig, inject_adapter_in_model

        targets = [f"blocks.{n}.2.experts.{e}" for n in range(2) for e in range(8)]
        return inject_adapter_in_model(LoraConfig(r=4, target_modules=targets), net)
    if kind.endswith(ADAPTED):
        from peft import LoraConfig, inject_adapter_in_model

        stacks = [name for name, each in net.named_parameters() if each.ndim == 3]
        config = LoraConfig(r=4, target_modules=[], target_parameters=stacks)
        return inject_adapter_in_model(config, net)
    for block in net.blocks:
        if kind == "list, frozen":
            for expert in block[2].experts[::2]:
                expert.requires_grad_(False)
        else:
            experts = (nn.Sequential(each) for each in block[2].experts)
            block[2].experts = nn.ModuleList(experts)
            block[2].experts[3][0].register_forward_hook(lambda *_: None)
    return net


class MoeModule(LightningModule):
    """An ordinary LightningModule around such a model."""

    def __init__(self, kind: str, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(0)
        made = kind.removesuffix(ADAPTED)
        self.net = ByHand(made) if made in BY_HAND else language_model(made)
        if kind in CHANGED or made != kind:
            self.net = change(self.net, kind)
        self.optimizer = optimizer
        if made.partition(":")[0] not in {*BY_HAND, "mixtral", "qwen3_moe", "gpt_oss"}:
            return
        with torch.no_grad():  # zeros of some initialisations
            for name, each in self.net.named_parameters():
                if each.ndim > 1:
                    each.normal_(0, 0.15)
                elif "norm" not in name:
                    each.normal_(0, 0.05)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(int(batch.sum()))  # some routers draw
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(input_ids=batch, labels=batch).loss, sync_dist=True)

    @override
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    @override
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def tokens(number: int, rank: int) -> Tensor:
    """Return a batch, of another size on every rank."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(3, WORDS, (2 + rank % 2, 11 + 2 * (rank % 3)), generator=generator)
