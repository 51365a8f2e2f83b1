# SPDX-License-Identifier: Apache-2.0
"""Which Comm carries the tensors of a run: what was asked for, or by what is there. Pure; `train` builds it.

What cannot carry them is refused here, before anybody waits for those who cannot come. One line says what was chosen.
"""

from __future__ import annotations

from typing import Literal

from unisono.core.errors import SetupError

Transport = Literal["mesh", "gloo", "nccl"]
Asked = Literal["auto", "mesh", "gloo"]


def choose(
    device: str, has_eventfd: bool, asked: Asked = "auto", listens: bool = False, serves: bool = False
) -> Transport:
    """`device`: its type. The mesh needs what only Linux has; gloo runs wherever torch does.

    `listens`: other machines may join. `serves`: there are parameter servers.
    """
    if device == "cuda":
        _refuse_with_gpus(asked, listens)
        return "nccl"
    if asked == "mesh" and not has_eventfd:
        raise SetupError(
            "--backend mesh cannot be used on this system",
            cause="the mesh needs Linux",
            do="leave out --backend: tensors then travel by gloo",
        )
    if asked == "mesh" or (asked == "auto" and has_eventfd):
        return "mesh"
    _refuse_with_gloo("--backend gloo" if asked == "gloo" else "gloo, since the mesh needs Linux,", listens, serves)
    return "gloo"


def _refuse_with_gpus(asked: Asked, listens: bool) -> None:
    if listens:
        raise SetupError(
            "GPUs on several machines are not there yet",
            cause="workers with GPUs meet through a file, which other machines do not have",
            do="leave out --listen, or use --device cpu",
        )
    if asked != "auto":
        raise SetupError(
            f"--backend {asked} cannot take effect between GPUs",
            cause="NCCL carries what lies in their memory",
            do="leave out --backend, or use --device cpu",
        )


def _refuse_with_gloo(what: str, listens: bool, serves: bool) -> None:
    if listens:
        raise SetupError(
            f"{what} cannot carry tensors between machines",
            cause="its workers meet through a file and speak by 127.0.0.1, which other machines do not reach",
            do="leave out --listen; or --backend, on Linux, where the mesh is there",
        )
    if serves:
        raise SetupError(
            f"{what} cannot carry what workers and parameter servers say to each other",
            cause="a server waits for whoever comes next, and nothing can wake it out of a wait in gloo",
            do="use the mesh, on Linux; or leave out --strategy ps",
        )


def describe(
    transport: Transport, hosts: int, workers: int, encrypted: bool, without_memory: str = "", asked: Asked = "auto"
) -> str:
    """`without_memory`: why workers of one host cannot share memory, if so. Empty for a worker alone."""
    if workers == 1:
        return ""
    if transport == "nccl":
        return "by NCCL, between GPUs"
    if transport == "gloo":
        return "by gloo, not encrypted" + (" (--backend gloo)" if asked == "gloo" else ": the mesh needs Linux")
    near = f"through sockets ({without_memory})" if without_memory else "through shared memory"
    if hosts == 1:
        return near
    far = "encrypted (TLS 1.3)" if encrypted else "not encrypted (--plaintext)"
    if hosts == workers:
        return f"between {hosts} hosts, {far}"
    return f"{near} inside a host, {far} between {hosts} hosts"
