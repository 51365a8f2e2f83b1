"""Plus a dataset without a length: an iterable that makes its samples as it goes.

Every worker reads the same stream and keeps the samples of its own microbatches; a stream that differs between workers
is noticed at the first step.

    unisono run examples/05_stream.py --workers 3
"""

from collections.abc import Iterator

import torch
from torch import nn

import unisono


class Sums(torch.utils.data.IterableDataset):
    """Short random sequences and their sums."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.count):
            values = torch.randn(10, 1)
            yield values, values.sum(0)


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:  # (n, 10, 1) -> (n, 1)
        return self.out(self.lstm(values)[0][:, -1])


if __name__ == "__main__":
    model = Adder()
    unisono.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.mse_loss,
        data=Sums(1000),
        eval_data=Sums(200),
        batch_size=50,
        epochs=3,
    ).fit()
