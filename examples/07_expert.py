"""python examples/07_expert.py [--devices 2] [--max-steps 100]

Expert parallelism on two CPU processes, in about a minute. Each process holds half of the experts
of a small Mixtral of Hugging Face; tokens are sent to the processes of their experts. Experts are
found by running one step, and the division is verified before the first training step;
``boltmesh plan expert_hf`` prints them. The model is unmodified. Needs transformers:
``pip install -c constraints.txt -e ".[transformers]"``.
"""

from argparse import ArgumentParser
from typing import Any

from causal_lm import CausalLM
from lightning.pytorch import Trainer, seed_everything
from text import TextData

from boltmesh.strategies import ZeROStrategy

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,  # of each expert
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": True,  # adds the loss that balances the experts
}


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=100)
    options = parser.parse_args()

    seed_everything(0, verbose=False)  # the same initial weights in every process
    trainer = Trainer(
        strategy=ZeROStrategy(stage=1, expert=options.devices),
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,  # by the norm over all experts
        limit_val_batches=20,
    )
    trainer.fit(CausalLM("mixtral", SIZES), TextData(batch_size=16))  # per process


if __name__ == "__main__":
    main()
