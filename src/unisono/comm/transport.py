# SPDX-License-Identifier: Apache-2.0
"""Which Comm carries the tensors of a run: chosen by what is there, and said in one line. Pure; `train` builds it."""

from __future__ import annotations

from typing import Literal

Transport = Literal["mesh", "gloo", "nccl"]


def choose(device: str, has_eventfd: bool) -> Transport:
    """`device`: its type. The mesh needs what only Linux has; gloo runs wherever torch does."""
    if device == "cuda":
        return "nccl"
    return "mesh" if has_eventfd else "gloo"


def describe(transport: Transport, hosts: int, workers: int, encrypted: bool, without_memory: str = "") -> str:
    """`without_memory`: why workers of one host cannot share memory, if so. Empty for a worker alone."""
    if workers == 1:
        return ""
    if transport == "nccl":
        return "by NCCL, between GPUs"
    if transport == "gloo":
        return "by gloo, not encrypted: the mesh needs Linux"
    near = f"through sockets ({without_memory})" if without_memory else "through shared memory"
    if hosts == 1:
        return near
    far = "encrypted (TLS 1.3)" if encrypted else "not encrypted (--plaintext)"
    if hosts == workers:
        return f"between {hosts} hosts, {far}"
    return f"{near} inside a host, {far} between {hosts} hosts"
