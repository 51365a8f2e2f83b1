# SPDX-License-Identifier: Apache-2.0
"""What a training's way of computing comes to: how much memory a rank has, and what is known of it before it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blocky_model import Block, Model
from torch import nn
from torch.utils.data import TensorDataset

import unisono.train.cutting  # noqa: F401  which is loaded late, in seconds
from unisono.core.errors import DeviceMemory
from unisono.core.mesh import Mesh
from unisono.core.run_dir import RunDir
from unisono.core.spec import JobSpec, build_run_spec
from unisono.parallel.local import LocalSteps
from unisono.train import opening, settling
from unisono.train.computing import Computing
from unisono.train.context import Context, Place
from unisono.train.job import Request
from unisono.train.memory import Usage
from unisono.train.settling import explained, settle_computing
from unisono.train.trainer import as_data

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MB = 10**6
TOKENS = torch.zeros(4, 100, dtype=torch.int64)


def request_of(model: nn.Module, recompute: str = "none", **more: Any) -> Request:
    optimizer = more.pop("optimizer", None) or torch.optim.AdamW(model.parameters())
    data = as_data(TensorDataset(TOKENS, TOKENS))
    asked = {"max_steps": 1, "computing": Computing(recompute=recompute), "loss": nn.functional.cross_entropy} | more
    return Request(model, optimizer, data, 64, **asked)


def context_of(tmp_path: Path, local: int = 1, under_way: bool = False, **asked: Any) -> Context:
    place = Place(tmp_path, "host", local=local, under_way=under_way)
    return Context(build_run_spec(asked, "test"), RunDir(tmp_path), 0, lambda _: None, place=place)


def job_spec(microbatches: int = 1) -> JobSpec:
    return JobSpec(microbatches=microbatches, batch_size=64, seed=0, threads=1, exact=True)


# 64 samples of 100 tokens: blocks keep 14.7 MB, of which products are 7.4, the head's scores are 3.4; and 0.3 of state.
@pytest.mark.parametrize(
    ("local", "mesh", "memory_mb", "how"),
    [
        (1, "", 21, "none"),
        (1, "", 15, "selective"),
        (2, "", 42, "none"),
        (2, "", 30, "selective"),  # two workers on the machine
        (1, "fsdp=2", 21, "none"),  # half of the samples in half of the memory
        (1, "fsdp=2", 15, "selective"),
        (1, "tp=2", 28, "selective"),  # all samples in half of it, and two thirds of each activation
        (2, "tp=2", 84, "none"),
        (2, "tp=2", 42, "selective"),
        (1, "", 2, "full"),
    ],
)
def test_on_cpus_the_machines_memory_is_shared_by_the_ranks_of_its_workers(
    local: int, mesh: str, memory_mb: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "machine_bytes", lambda: memory_mb * MB)
    context = context_of(tmp_path, local, mesh=mesh)
    spec, prepared, _ = settle_computing(context, request_of(Model(), "auto"), job_spec(), CPU)
    assert spec.recompute == prepared.computing.recompute == how


def test_what_is_known_of_a_model_that_will_be_cut_is_from_before(tmp_path: Path) -> None:
    model = Model()
    context = context_of(tmp_path, mesh="fsdp=2", zero=2)
    _, _, foresight = settle_computing(context, request_of(model), job_spec(4), GPU)
    whole = sum(p.numel() for p in model.parameters()) * 4
    del model.blocks, model.head
    known = foresight()
    assert known.estimated is not None
    assert known.estimated.none == 3 * 192 * 8 * 100 * 4  # of 16 samples, this rank's 8
    assert (known.needs.weights, known.needs.state, known.needs.zero) == (whole, 2 * whole, 2)
    assert (known.mesh, known.microbatches, known.recompute, known.host_is_apart) == (Mesh(fsdp=2), 4, "none", True)


class Declared(nn.Sequential):
    """Its layers follow each other, so a pipeline can be made of them."""


@pytest.mark.parametrize(
    ("model", "more", "larger"),
    [
        (Model, {}, ["fsdp=2", "fsdp=4", "fsdp=8", "tp=2"]),
        (lambda: Declared(Block(), Block()), {}, ["fsdp=2", "fsdp=4", "fsdp=8", "tp=2", "pp=2"]),
        (lambda: Declared(Block(), Block()), {"loss": None}, ["fsdp=2", "fsdp=4", "fsdp=8", "tp=2"]),
        (Model, {"local": LocalSteps(h=2)}, []),
        (Model, {"has_end": False}, []),
        (Model, {"optimizer": torch.optim.LBFGS}, []),
    ],
)
def test_only_meshes_into_which_the_training_can_be_cut_are_advised(
    model: Any, more: dict[str, Any], larger: list[str], tmp_path: Path
) -> None:
    built = model()
    more = more | ({"optimizer": more["optimizer"](built.parameters())} if "optimizer" in more else {})
    _, _, foresight = settle_computing(context_of(tmp_path), request_of(built, **more), job_spec(4), GPU)
    assert [mesh.inner for mesh in foresight().larger] == larger


def test_fsdp_ranks_without_a_sample_are_not_advised(tmp_path: Path) -> None:
    _, _, foresight = settle_computing(context_of(tmp_path), request_of(Model()), job_spec(32), GPU)
    assert [mesh.inner for mesh in foresight().larger] == ["fsdp=2", "tp=2"]


def test_an_allocation_that_fails_becomes_an_error_with_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    _, _, foresight = settle_computing(context_of(tmp_path), request_of(model), job_spec(), GPU)
    monkeypatch.setattr(settling, "usage_of", lambda *_: Usage(1, 1, 2, 60, 0, 80))  # there is no device to ask
    with pytest.raises(DeviceMemory, match="--precision bf16") as caught, explained(model, optimizer, GPU, foresight):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity")
    assert caught.value.where == "CUDA out of memory. Tried to allocate 3.07 GiB"


class TooLarge(Model):
    def to(self, *_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity")


@pytest.mark.parametrize(("under_way", "error"), [(False, DeviceMemory), (True, torch.OutOfMemoryError)])
def test_a_model_that_does_not_come_onto_the_device_is_explained_but_to_a_worker_in_anothers_place(
    under_way: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, context = request_of(TooLarge()), context_of(tmp_path, under_way=under_way)
    _, _, foresight = settle_computing(context, request, job_spec(), GPU)
    monkeypatch.setattr(settling, "usage_of", lambda *_: Usage(60, 0, 0, 0, 0, 80))
    with pytest.raises(error):
        opening._bring(context, request, job_spec(), CPU, (), foresight)
