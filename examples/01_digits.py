"""The smallest complete training: the classic two-convolution network on real handwritten digits.

python examples/01_digits.py                        # in this process
unisono run examples/01_digits.py --workers 2       # on two workers: the same hash
"""

import torch
from torch import nn

import unisono


class Net(nn.Module):
    """Two convolutions with batch norm, dropout, two linear layers: 28×28 images in, ten classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classify = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (n, 1, 28, 28) -> (n, 10)
        return self.classify(self.features(images))


if __name__ == "__main__":
    train_set, test_set = unisono.data.digits()
    model = Net()
    trainer = unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=nn.functional.cross_entropy,
        data=train_set,
        eval_data=test_set,
        metrics={"accuracy": unisono.accuracy},
        batch_size=64,
        epochs=6,
    )
    trainer.fit()
