"""Plus real MNIST, from idx files in a folder or from a URL; without a network it falls back to the built-in digits.

unisono run examples/06_mnist.py --workers 2                          # downloads once, checks the sums
unisono run examples/06_mnist.py --workers 2 -- --source ~/mnist      # a folder with the four files
unisono run examples/06_mnist.py --workers 2 -- --fashion
"""

import argparse

import torch
from torch import nn

import unisono

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", default=None)
    parser.add_argument("--fashion", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()

    train_set, test_set = unisono.data.mnist(args.source, fashion=args.fashion)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip
    unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=nn.functional.cross_entropy,
        data=unisono.Data(train_set, drop_last=True),
        eval_data=test_set,
        metrics={"accuracy": unisono.accuracy},
        batch_size=128,
        epochs=args.epochs,
        batch_norm="synchronised",  # statistics of all 128 samples, on however many workers they are
    ).fit()
