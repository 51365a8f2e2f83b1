"""Plus your own dataset: random augmentation in loader processes, callbacks, L1, early stopping.

The augmentation draws from the usual global generators; Unisono puts them into a state that belongs to the step and the
microbatch, so the result is the same on any number of workers and loader processes.

    unisono run examples/03_own_data.py --workers 2
"""

import random

import torch
from torch import nn

import unisono


class Shifted(torch.utils.data.Dataset):
    """Digits, each moved by up to two pixels at random every time it is read."""

    def __init__(self, digits: torch.utils.data.Dataset) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.digits[index]
        return torch.roll(image, (random.randint(-2, 2), random.randint(-2, 2)), dims=(1, 2)), label


class BestSoFar(unisono.Callback):
    """Callbacks run on every worker with the same numbers; print on one."""

    def __init__(self) -> None:
        self.best = 0.0

    def on_epoch(self, info: unisono.EpochInfo) -> None:
        self.best = max(self.best, info.metrics["accuracy"])
        if info.is_first_worker:
            print(f"epoch {info.epoch}: train loss {info.train_loss:.4f}, best accuracy {self.best:.2%}")


if __name__ == "__main__":
    train_set, test_set = unisono.data.digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
        loss=nn.functional.cross_entropy,
        data=unisono.Data(Shifted(train_set), loader_processes=1),
        eval_data=test_set,
        metrics={"accuracy": unisono.accuracy},
        batch_size=64,
        epochs=6,
        l1=1e-5,
        early_stop=unisono.EarlyStop(metric="accuracy", mode="max", patience=2),
        callbacks=[BestSoFar()],
    ).fit()
