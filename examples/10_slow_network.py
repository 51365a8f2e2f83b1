"""Replicas that meet once in 8 updates, and send each other an eighth of the bytes then: for slow networks.
On a fast one there is nothing to gain: with as many samples, the replicas are behind.

python examples/10_slow_network.py
unisono run examples/10_slow_network.py --workers 2 --compress int4
unisono run examples/10_slow_network.py --workers 2 -- --every-step        # all-reduce; compare what was sent
unisono run examples/01_digits.py --workers 2 --strategy local --outer nesterov    # without a line in the script
"""

import argparse

import torch
from torch import nn

import unisono


def train(every_step: bool) -> None:
    unisono.seed(0)
    train_set, test_set = unisono.data.digits(size=16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 128), nn.ReLU(), nn.Linear(128, 10))
    unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=nn.functional.cross_entropy,
        data=train_set,
        eval_data=test_set,
        metrics={"accuracy": unisono.accuracy},
        batch_size=32,
        epochs=10,
        # DiLoCo: the replicas' mean difference is a step of an outer optimizer.
        local=None if every_step else unisono.LocalSteps(h=8, outer="nesterov"),
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every-step", action="store_true", help="add the gradients of every step instead")
    train(parser.parse_args().every_step)
