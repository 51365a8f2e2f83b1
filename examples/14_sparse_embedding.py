"""A recommender with a Trainer, whose user table has sparse=True: only the rows of a batch get a gradient, only they
travel, and only they move. The same bits with and without servers, on any number of workers.

python examples/14_sparse_embedding.py
unisono run examples/14_sparse_embedding.py --workers 2
unisono run examples/14_sparse_embedding.py --workers 2 --strategy ps --servers 2
unisono run examples/14_sparse_embedding.py --workers 2 --strategy ps --staleness 4
"""

import torch
from torch import nn

import unisono

USERS, ITEMS, WIDTH, TASTES = 20_000, 100, 16, 4


def clicks(count: int, seed: int) -> torch.utils.data.TensorDataset:
    """Made-up: a user likes an item if their hidden tastes agree. Few of all users ever come."""
    truth = torch.Generator().manual_seed(0)
    of_users, of_items = torch.randn(200, TASTES, generator=truth), torch.randn(ITEMS, TASTES, generator=truth)
    drawn = torch.Generator().manual_seed(seed)
    users = torch.randint(200, (count,), generator=drawn)
    items = torch.randint(ITEMS, (count,), generator=drawn)
    likes = ((of_users[users] * of_items[items]).sum(1) > 0).float()
    return torch.utils.data.TensorDataset(torch.stack([users * (USERS // 200), items], 1), likes)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.head(self.users(pairs[:, 0]) * self.items(pairs[:, 1])).squeeze(1)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs > 0) == (targets > 0.5)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Recommender()
    unisono.Trainer(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.3),  # one that takes sparse and dense gradients
        loss=nn.functional.binary_cross_entropy_with_logits,
        data=clicks(20_000, seed=1),
        batch_size=256,
        epochs=6,
        eval_data=clicks(2_000, seed=2),
        metrics={"accuracy": accuracy},
    ).fit()
