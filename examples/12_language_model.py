"""A decoder as large as you like: precision, compilation, recomputation and the fused loss of large vocabularies.

It reads text that every machine has, the source of Python's own standard library, byte by byte.

    unisono run examples/12_language_model.py --workers 2
    unisono run examples/12_language_model.py --precision bf16 --compile blocks --recompute selective
    unisono run examples/12_language_model.py --microbatches 1 --precision bf16 -- --shape gpt2 --length 1024 --batch 64
"""

import argparse

import torch

import unisono
from reference_models.decoder import Decoder, gpt2_small, llama_1b, next_token_loss, tiny

SHAPES = {"tiny": tiny, "gpt2": gpt2_small, "llama": llama_1b}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fused-loss", action="store_true", help="scores never exist as a whole")
    options = parser.parse_args()

    train_set, test_set = unisono.data.python_text(length=options.length, max_bytes=500_000, test_fraction=0.02)
    model = Decoder(SHAPES[options.shape](length=options.length))
    fused = unisono.nn.LinearCrossEntropy(model.head)
    loss = {"loss": next_token_loss}
    if options.fused_loss:
        loss = {"objective": lambda model, batch: fused(model.features(batch[0]), batch[1])}

    unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        **loss,
        data=train_set,
        eval_data=test_set,
        batch_size=options.batch,
        max_steps=options.steps,
        clip=unisono.Clip(norm=1.0),
    ).fit()
