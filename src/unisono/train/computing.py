# SPDX-License-Identifier: Apache-2.0
"""How a model is computed: in which precision, compiled or not, keeping or recomputing its activations. As values.

What the script asks for and what the command says become one `Computing` (`choose`), or an error. Pure; `preparing`
puts it into effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.errors import SetupError, suggest
from unisono.core.spec import COMPILES, PRECISIONS, RECOMPUTES, RunSpec


@dataclass(frozen=True)
class Computing:
    """`precision`: fp32; bf16 or fp16 (products are narrow, the rest wide); bf16-all (what flows between layers is
    narrow too); fp8 (products of the blocks' linear layers, and bf16-all elsewhere). Weights are always kept in fp32.

    `compile`: none; blocks (a repeated block once); whole (model and loss as one); tuned (whole, kernels chosen by
    measurement). `recompute` in the backward pass: none; selective (all but products); full (whole blocks); auto.
    """

    precision: str = "fp32"
    compile: str = "none"
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("compile", self.compile, COMPILES),
            ("recompute", self.recompute, RECOMPUTES),
        ):
            if value not in known:
                hint = suggest(str(value), known)
                raise SetupError(f"{name}={value!r} is not one of {', '.join(known)}" + (f"; {hint}" if hint else ""))

    @property
    def is_plain(self) -> bool:
        return self == Computing()


def choose(spec: RunSpec, asked: Computing) -> Computing:
    """What the command says comes before what the script says."""
    return Computing(
        spec.precision or asked.precision, spec.compile or asked.compile, spec.recompute or asked.recompute
    )


def refuse(computing: Computing, exact: bool, batch_norm: str, strategy: str, own_loop: bool) -> None:
    """What cannot take effect. `strategy`: allreduce, local or ps."""
    if own_loop and not computing.is_plain:
        raise SetupError(
            "precision, compile and recompute need unisono.Trainer",
            cause="in a loop of your own, the script calls the model and not Unisono",
            do="use torch.autocast and torch.compile there yourself, or use Trainer",
        )
    if computing.compile == "tuned" and exact:
        raise SetupError(
            'compile="tuned" and the same bits in every run exclude each other',
            cause="kernels are chosen by measuring them, and another one may win next time",
            do='use compile="whole", or exact=False',
        )
    if computing.compile != "none" and batch_norm == "synchronised":
        raise SetupError(
            f'compile="{computing.compile}" and batch_norm="synchronised" do not go together',
            cause="at every batch norm the microbatches wait for each other, which compiled code cannot",
            do='leave out compile, or use batch_norm="local"',
        )
    if computing.precision == "fp16" and strategy != "allreduce":
        raise SetupError(
            f"precision fp16 and the strategy {strategy} do not go together yet",
            cause="fp16 needs a loss scale, on which all workers agree with every step's sum",
            do="use bf16, or all-reduce",
        )
