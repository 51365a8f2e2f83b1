"""Plus data as shards: written once, streamed by every worker, shuffled in blocks of shards.

Here they lie in a folder; give the address of shards in object storage, such as s3://bucket/digits, and nothing else
changes: each worker fetches, ahead of time, what its own microbatches need, into a cache that all workers of a machine
share.

    unisono run examples/08_shards.py --workers 3
    unisono run examples/08_shards.py --workers 3 -- s3://bucket/digits
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.data import Shards, ShardWriter


def write_digits(dest: Path) -> None:
    """Usually done beforehand, by a script of its own or by ``unisono data write``. Here each worker may come first: it
    writes elsewhere and renames, and whoever finds the place taken has written the same."""
    fresh = Path(tempfile.mkdtemp(dir=dest.parent))
    with ShardWriter(fresh, {"image": "float32[1,28,28]", "label": "int"}, shard_bytes=256 * 1024) as writer:
        for image, label in unisono.data.digits()[0]:
            writer.write({"image": image.numpy(), "label": int(label)})
    try:
        fresh.rename(dest)
    except OSError:
        shutil.rmtree(fresh)


def shift(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Up to one pixel, at random: the same on any worker, for the random state belongs to the microbatch."""
    image, label = sample
    return torch.roll(image, tuple(torch.randint(-1, 2, (2,)).tolist()), dims=(1, 2)), label


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default=f"{tempfile.gettempdir()}/digits-shards")
    url = parser.parse_args().url
    if "://" not in url and not Path(url).exists():
        write_digits(Path(url))

    train_set = Shards(url, cache_limit="100MB", columns=("image", "label"), transform=shift)
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
    unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=nn.functional.cross_entropy,
        data=unisono.Data(train_set, shuffle="blocks", block_shards=4),
        eval_data=unisono.data.digits()[1],
        metrics={"accuracy": unisono.accuracy},
        batch_size=64,
        epochs=4,
    ).fit()
