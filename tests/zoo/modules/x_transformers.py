"""x-transformers: a decoder with its wrapper for training, and an encoder."""

from typing import Any

from tests.zoo.entry import ROWS, Entry, Trained, integers

IMPORTS = ["x_transformers"]

WORDS = 40


def batch(number: int) -> Any:
    return integers(number, WORDS, ROWS, 13)


def decoder(**options: Any) -> Any:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=4, heads=2, attn_dim_head=8, **options)
    net = TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers)
    return Trained(AutoregressiveWrapper(net), lambda net, batch: net(batch))


ENTRIES = [
    Entry("x-transformers Decoder", decoder, batch, in_context=True),
    Entry(
        "x-transformers Decoder, rotary, one key head",
        lambda: decoder(rotary_pos_emb=True, attn_one_kv_head=True, ff_glu=True, use_rmsnorm=True),
        batch,
        in_context=True,
    ),
]
