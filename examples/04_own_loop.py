"""Your own loop, five lines changed against 04_own_loop_before.py: exact on any number of workers.

python examples/04_own_loop.py
unisono run examples/04_own_loop.py --workers 2
unisono run examples/04_own_loop.py --workers 2 --strategy ps
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import unisono
from unisono.data import digits

if __name__ == "__main__":
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    run, loader = unisono.attach(model, optimizer, DataLoader(train_set, batch_size=64, shuffle=True))
    for _epoch in range(3):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            run.backward(loss)
            run.step()
    images, labels = test_set.tensors
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    run.finish(accuracy=accuracy)
