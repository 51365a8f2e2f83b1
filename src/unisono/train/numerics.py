# SPDX-License-Identifier: Apache-2.0
"""What must be the same everywhere for bits to be: threads, kernel choices, gradients after the sum, fingerprints.

Called once at the start (`settle_torch`, `fingerprint`) and once a step (`Update`). Knows torch, not the loop.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.core.errors import SetupError
from unisono.core.fingerprint import Fingerprint
from unisono.core.mesh import INNER, Mesh
from unisono.parallel.read_back import read_back
from unisono.parallel.rows import tables_of
from unisono.train.options import Clip

ONE_RANK = Mesh()


def settle_torch(threads: int, exact: bool, strict: bool = False) -> None:
    """Fix what would otherwise vary between workers: thread count, autotuned kernels, unordered additions.

    `strict`: operations that have no fixed order are refused. A mere warning is not enough on a GPU: with it, attention
    goes on adding up its gradients in any order.
    """
    torch.set_num_threads(threads)
    if not exact:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; without it sums may vary
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The same as use_deterministic_algorithms, which would load the compiler only to tell it, too.
    torch.set_deterministic_debug_mode("error" if strict else "warn")
    compiler: Any = sys.modules.get("torch._inductor.config")
    if compiler is not None:
        compiler.deterministic = True
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read when it is loaded


def move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Both to where they compute. Returns what was fused on the way."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model.to(device)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = value.to(device)
    return fuse(optimizer, device)


def fuse(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """On a GPU, let torch's own optimizer update all parameters in one kernel, unless the script says how it should.
    Returns the name of what was fused."""
    kind = type(optimizer)
    groups = optimizer.param_groups
    if device.type != "cuda" or kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return ""
    said = any(group.get("foreach") is not None or group.get("fused") is not None for group in groups)
    odd = any(group.get("differentiable") or group.get("capturable") for group in groups)
    if said or odd or any(not p.is_floating_point() for group in groups for p in group["params"]):
        return ""
    for group in groups:
        group["fused"] = True
    return f"fused {kind.__name__}"


def fingerprint(
    device: torch.device, threads: int, exact: bool, seen: tuple[int, int], kernels: str = ""
) -> Fingerprint:
    """`seen` of the data: its length, and what its first samples digest to."""
    if device.type == "cuda":
        instructions = torch.cuda.get_device_name(device)
    else:
        instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Fingerprint(
        torch=torch.__version__,
        device=device.type,
        instructions=instructions,
        threads=threads,
        deterministic=exact,
        kernels=kernels,
        data=f"{seen[0]}/{seen[1]:012x}",
    )


def choose_device(asked: str, number: int, workers: int, mesh: Mesh = ONE_RANK) -> torch.device:
    """A GPU of its own for each rank of this machine's workers, or the CPU for all. `number` counts those ranks."""
    count = usable_gpus(asked)
    if count is None:
        return torch.device("cpu")
    require_gpus(count, workers, mesh)
    return torch.device("cuda", number)


def usable_gpus(asked: str) -> int | None:
    """How many there are; None where the CPU is used."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None if asked == "cpu" or (asked == "auto" and not count) else count


def require_gpus(count: int, workers: int, mesh: Mesh) -> None:
    """Never two ranks on one GPU, never silently fewer GPUs than asked for."""
    needed = workers * mesh.ranks
    if needed <= count:
        return
    here = f"there {'is' if count == 1 else 'are'} {count} here"
    if mesh.ranks == 1:
        raise SetupError(
            f"{workers} workers need {workers} GPUs, and {here}",
            cause="each worker computes on a GPU of its own",
            do=f"use --workers {count}, or --device cpu" if count else "use --device cpu",
        )
    factors = " x ".join(str(getattr(mesh, name)) for name in INNER if getattr(mesh, name) > 1)
    fits = (
        f"use --mesh dp={count // mesh.ranks},{mesh.inner}, or " if count >= mesh.ranks else "use a smaller mesh, or "
    )
    raise SetupError(
        f"--mesh dp={workers},{mesh.inner} needs {workers} x {factors} = {needed} GPUs, and {here}",
        cause="each rank of a replica computes on a GPU of its own",
        do=fits + "--device cpu",
    )


@torch.no_grad()
def flip_one_bit(model: nn.Module) -> None:
    """What a bad memory chip does: one bit of one weight. For fault plans."""
    first = next(parameter for parameter in model.parameters() if parameter.numel())
    first.view(-1).view(torch.uint8)[first.element_size() // 2] ^= 1 << 3


def _no_norm() -> None:
    return None


class Update:
    """What happens to the reduced gradients before the optimizer sees them: L1, then clipping."""

    def __init__(self, model: nn.Module, clip: Clip | None, l1: float) -> None:
        if l1 < 0:
            raise SetupError(f"l1={l1} would reward large weights", do="give l1 as 0 or above")
        if l1 and tables_of(model):
            raise SetupError(
                f"l1={l1} and an embedding with sparse=True do not go together",
                cause="L1 draws every weight towards zero in every step, and only touched rows should move",
                do="leave out l1, add a term for the rows of the batch to the loss, or use sparse=False",
            )
        self.model, self.l1 = model, l1
        self.norm, self.value = (clip.norm, clip.value) if clip else (None, None)
        self.norm_of_all: Callable[[], float] | None = None  # where ranks hold parts of the model
        self.norm_reading: Callable[[], float | None] = _no_norm

    @property
    def changes_nothing(self) -> bool:
        return not self.l1 and self.value is None and self.norm is None

    @property
    def grad_norm(self) -> float | None:
        """Of the last step's gradients. Asking for it waits for the device, the first time."""
        return self.norm_reading()

    @grad_norm.setter
    def grad_norm(self, value: float) -> None:
        self.norm_reading = lambda: value

    @torch.no_grad()
    def __call__(self) -> None:
        if self.changes_nothing:
            return
        with_gradient = [_dense(p) for p in self.model.parameters() if p.grad is not None]
        if self.l1:
            for parameter in with_gradient:
                assert parameter.grad is not None
                parameter.grad.add_(parameter.sign(), alpha=self.l1)
        if self.value is not None:
            nn.utils.clip_grad_value_(with_gradient, self.value)
        if self.norm is not None and self.norm_of_all is not None:
            self.grad_norm = found = self.norm_of_all()
            factor = min(1.0, self.norm / (found + 1e-6))  # as torch's clip_grad_norm_ has it
            torch._foreach_mul_([p.grad for p in with_gradient if p.grad is not None], factor)
        elif self.norm is not None:
            # Norms per parameter, then one over them in parameter order: a fixed order on every worker.
            self.norm_reading = read_back(nn.utils.clip_grad_norm_(with_gradient, self.norm))


def _dense(parameter: Tensor) -> Tensor:
    """Something with the same gradient in memory; of a table, the rows that there are."""
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    values = parameter.grad._values()
    stand_in = values.detach()
    stand_in.grad = values
    return stand_in


def count_parameters(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
