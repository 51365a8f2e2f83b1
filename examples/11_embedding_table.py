"""A small recommender whose user table lies on servers: only the rows of a batch travel, and only touched rows exist.
The tables come from unisono.ps; the dense part of the model is kept in step with a key-value store, unisono.kvstore.

python examples/11_embedding_table.py
unisono run examples/11_embedding_table.py --workers 2 --strategy ps --servers 2      # then: unisono logs NAME
unisono run examples/11_embedding_table.py --workers 2 --strategy ps --servers 2 -- --rows 50000000
"""

import argparse

import torch
from torch import nn

import unisono

WIDTH, ITEMS, TASTES = 16, 500, 4


def batches(active: int, rows: int, batch: int, steps: int, rank: int):
    """Made-up clicks: a user likes an item if their hidden tastes agree. Few of all users ever come, some often."""
    truth = torch.Generator().manual_seed(0)
    of_users, of_items = torch.randn(active, TASTES, generator=truth), torch.randn(ITEMS, TASTES, generator=truth)
    mine = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        users = (torch.rand(batch, generator=mine, dtype=torch.float64) ** 2 * active).long()
        items = torch.randint(ITEMS, (batch,), generator=mine)
        likes = ((of_users[users] * of_items[items]).sum(1) > 0).float()
        yield users * (rows // active), items, likes  # those who come are spread over the whole table


def train(rows: int, steps: int, batch: int) -> None:
    active = max(1, rows // 50)
    with unisono.ps.connect() as servers:
        kv = unisono.kvstore("dist_sync")
        users = servers.embedding("users", rows, WIDTH, unisono.ps.Adam(lr=0.03))
        items = servers.embedding("items", ITEMS, WIDTH, unisono.ps.Adam(lr=0.03))
        head = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
        weights = list(head.parameters())
        kv.init(range(len(weights)), weights)  # the first worker's
        kv.pull(range(len(weights)), out=weights)
        recent = []
        for step, (who, what, likes) in enumerate(batches(active, rows, batch, steps, servers.rank), start=1):
            optimizer.zero_grad()
            agree = users(who) * items(what)
            loss = nn.functional.binary_cross_entropy_with_logits(head(10 * agree).squeeze(1), likes)
            loss.backward()
            for table in (users, items):
                table.push_gradients()  # the servers have the optimizer
            gradients = [weight.grad / servers.workers for weight in weights]
            kv.pushpull(range(len(weights)), gradients, out=[weight.grad for weight in weights])  # the mean of all
            optimizer.step()
            recent.append(loss.item())
            if servers.rank == 0 and step % max(1, steps // 10) == 0:
                print(f"step {step:5}  loss {sum(recent) / len(recent):.4f}", flush=True)
                recent.clear()
        kv.close()
    if servers.rank == 0:
        print(f"{'':10}{'memory':>10}{'sent':>12}{'received':>12}{'rows here':>12}{'they take':>12}")
        for each in servers.processes:
            moved = f"{each.bytes_sent / 1e6:9.1f} MB{each.bytes_received / 1e6:9.1f} MB"
            held = f"{each.rows_touched:12,}{each.held_bytes / 1e6:9.1f} MB"
            print(f"{each.role:10}{each.memory_bytes / 1e6:7.0f} MB{moved}{held}")
        memory = sum(each.memory_bytes for each in servers.processes)
        touched = sum(each.rows_touched for each in servers.processes)
        print(f"memory of all processes {memory / 1e6:,.0f} MB; {touched:,} of {rows + ITEMS:,} rows were touched")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000, help="of the user table")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=512, help="clicks in a step of one worker")
    arguments = parser.parse_args()
    train(arguments.rows, arguments.steps, arguments.batch)
