"""A Hugging Face model, unmodified: it computes its own loss, so the trainer gets an `objective`.

A small GPT-2 with new weights, so nothing is downloaded; ``GPT2LMHeadModel.from_pretrained("gpt2")`` goes as well.

    pip install transformers
    unisono run examples/13_hugging_face.py --workers 2
"""

import argparse
import sys

import torch

import unisono

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("this example needs Hugging Face's transformers: pip install transformers")


def objective(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch[0], labels=batch[0], use_cache=False).loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps

    train_set, test_set = unisono.data.python_text(length=64, max_bytes=500_000, test_fraction=0.02)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        objective=objective,
        data=train_set,
        eval_data=test_set,
        batch_size=16,
        max_steps=steps,
        clip=unisono.Clip(norm=1.0),
    ).fit()
