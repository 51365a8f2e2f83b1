# SPDX-License-Identifier: Apache-2.0
"""Everybody hands something to some: trees of state, when slices of a model move, or letters of any length.

All ranks call it at the same time. What a tree is, `state_tree` knows; what is in it, the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.comm import state_tree
from unisono.comm.seam import Comm, Message


def hand_round(comm: Comm, tree: Any, receivers: Collection[int], tag: int) -> list[Any]:
    """Every rank's tree, by rank, on those who receive; an empty list on the others."""
    text, tensors = state_tree.flatten(tree)
    letter = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = [int(row.item()) for row in comm.gather(torch.tensor([letter.numel()]))]
    mine = comm.rank in receivers
    senders = [rank for rank in range(comm.size) if rank != comm.rank] if mine else []
    takers = [rank for rank in receivers if rank != comm.rank]
    letters = {rank: torch.empty(lengths[rank], dtype=torch.uint8) for rank in senders}
    comm.exchange(
        [Message(rank, letter) for rank in takers], [Message(rank, box) for rank, box in letters.items()], tag
    ).wait()
    texts = {rank: bytes(box.tolist()).decode() for rank, box in letters.items()}
    found = {rank: state_tree.empty_tensors(text) for rank, text in texts.items()}
    sent = [state_tree.as_bytes(tensor.cpu()) for tensor in tensors if tensor.numel()]
    comm.exchange(
        [Message(rank, part) for rank in takers for part in sent],
        [Message(rank, state_tree.as_bytes(box)) for rank, boxes in found.items() for box in boxes if box.numel()],
        tag + 1,
    ).wait()
    if not mine:
        return []
    return [tree if rank == comm.rank else state_tree.rebuild(texts[rank], found[rank]) for rank in range(comm.size)]


def post(comm: Comm, letters: Mapping[int, Tensor], tag: int) -> dict[int, Tensor]:
    """To each rank its letter, of bytes, of any length; what came, by rank. All ranks call it together."""
    own = [letters[rank].numel() if rank in letters else 0 for rank in range(comm.size)]
    lengths = [int(row[comm.rank].item()) for row in comm.gather(torch.tensor(own))]
    coming = {
        rank: torch.empty(length, dtype=torch.uint8)
        for rank, length in enumerate(lengths)
        if length and rank != comm.rank
    }
    comm.exchange(
        [Message(rank, letter) for rank, letter in letters.items() if letter.numel() and rank != comm.rank],
        [Message(rank, letter) for rank, letter in coming.items()],
        tag,
    ).wait()
    return coming
