"""A plain PyTorch loop on one process; 04_own_loop.py is the same file with five lines changed."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from unisono.data import digits

if __name__ == "__main__":
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    for _epoch in range(3):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    images, labels = test_set.tensors
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.2%}")
