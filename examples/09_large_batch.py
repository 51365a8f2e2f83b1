"""A batch of 1,024 instead of 32: a fifth of the steps, six times the samples. The learning rate is scaled and warmed
up; LAMB stands beside Adam and momentum SGD.

python examples/09_large_batch.py --compare                                   # five trainings, one after the other
unisono run examples/09_large_batch.py --workers 2                            # LAMB with 1,024
unisono run examples/09_large_batch.py --workers 2 -- --optimizer adam --batch 32 --steps 300
"""

import argparse

import torch
from torch import nn

import unisono

BASE_BATCH = 32
BASE_LR = {"sgd": 0.01, "adam": 0.003, "lamb": 0.01}  # good ones for 32


def build_optimizer(name: str, model: nn.Module, batch: int) -> torch.optim.Optimizer:
    groups = unisono.layer_groups(model, weight_decay=1e-4)  # no decay for biases
    lr = unisono.scaled_lr(BASE_LR[name], BASE_BATCH, batch, rule="linear" if name == "sgd" else "sqrt")
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if name == "adam":
        return torch.optim.AdamW(groups, lr=lr)
    return unisono.LAMB(groups, lr=lr)


def train(name: str, batch: int, steps: int) -> unisono.Result:
    unisono.seed(0)
    train_set, test_set = unisono.data.digits(size=16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = build_optimizer(name, model, batch)
    warm_up = max(1, steps // 5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - warm_up + 1)
    return unisono.Trainer(
        model,
        optimizer,
        loss=nn.functional.cross_entropy,
        data=unisono.Data(train_set, drop_last=True),
        eval_data=test_set,
        metrics={"accuracy": unisono.accuracy},
        batch_size=batch,
        max_steps=steps,
        schedule=unisono.WarmUp(optimizer, warm_up, then=cosine),
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=BASE_LR, default="lamb")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compare", action="store_true", help="all of them, by plain Python")
    args = parser.parse_args()
    if args.compare:
        small, large = [("sgd", 32, 300), ("adam", 32, 300)], [(name, 1024, 60) for name in BASE_LR]
        for (name, batch, _), result in [(case, train(*case)) for case in small + large]:
            accuracy = f"accuracy {result.metrics['accuracy']:.1%}"
            print(f"{name:<5} batch {batch:>5,}  {result.steps:>3} steps  {result.samples:>6,} samples  {accuracy}")
    else:
        train(args.optimizer, args.batch, args.steps)
