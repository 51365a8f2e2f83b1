# SPDX-License-Identifier: Apache-2.0
"""A model that does not say how it is a sequence, cut at boundaries by torch's tracer.

The traced stages call operations, not the model's modules: shapes and the mode (training) are frozen in them. What
would be wrong because of that is refused with the cure, which is always the same: to write ``pipeline_layers()``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from unisono.core.errors import SetupError, suggest
from unisono.parallel.pipeline_batches import arguments
from unisono.parallel.pipeline_layers import METHOD, Layer

FIRST = "inputs"  # the name of the layer before the first boundary
_BY_MODE = ("dropout", "batch_norm", "rrelu")  # operations that do something else when a model is evaluated


def traced_layers(model: nn.Module, boundaries: Sequence[str], chunk: Any) -> list[Layer]:
    """A layer for each stage. `chunk`: inputs as they come, of one chunk; later ones must have their shape."""
    _check_names(model, boundaries)
    _check_ties(model)
    values, names = arguments(chunk)
    cuts = dict.fromkeys(boundaries, SplitPoint.BEGINNING)
    given: dict[str, Any] = {"mb_kwargs": dict(zip(names, values, strict=True))} if names else {}
    try:
        pipe = pipeline(model, () if names else values, split_spec=cuts, **given)
    except Exception as error:
        raise _refused(model, f"it could not be traced: {str(error).strip().splitlines()[0]}") from error
    stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    if len(stages) != len(boundaries) + 1:
        raise _refused(model, f"tracing cut it into {len(stages)} stages and not {len(boundaries) + 1}")
    _check_chain(model, pipe, stages)
    _check_modes(model, stages)
    return [Layer(name, stage, spreads=True) for name, stage in zip([FIRST, *boundaries], stages, strict=True)]


def _refused(model: nn.Module, cause: str) -> SetupError:
    return SetupError(
        f"{type(model).__name__} cannot be cut into stages as it is",
        cause=cause,
        do=f"give it a method {METHOD}() that returns its layers as a list of (name, module)",
    )


def _check_names(model: nn.Module, boundaries: Sequence[str]) -> None:
    known = [name for name, _ in model.named_modules() if name]
    for name in boundaries:
        if name not in known:
            raise SetupError(
                f"boundary {name!r} is no module of {type(model).__name__}",
                cause=suggest(name, known),
                do="name modules as in model.named_modules()",
            )


def _check_ties(model: nn.Module) -> None:
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            raise _refused(
                model, f"{seen[id(parameter)]} and {name} are one parameter, and tracing would make them two"
            )
        seen[id(parameter)] = name


def _check_chain(model: nn.Module, pipe: Pipe, stages: Sequence[nn.Module]) -> None:
    """Each stage takes what the one before returns: all of it, in its order, and nothing else."""
    calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    for number, call in enumerate(calls[1:], 1):
        before, expected = calls[number - 1], _outputs(stages[number - 1])
        whole = list(call.args) == [before]
        parts = [arg.args[1] for arg in call.args if isinstance(arg, fx.Node) and arg.target is operator.getitem
                 and arg.args[0] is before]  # fmt: skip
        if not whole and (parts != list(range(expected)) or len(parts) != len(call.args)):
            raise _refused(model, f"stage {number} takes other values than those that stage {number - 1} returns")


def _outputs(stage: nn.Module) -> int:
    assert isinstance(stage, fx.GraphModule)
    (returned,) = next(node.args for node in stage.graph.nodes if node.op == "output")
    return len(returned) if isinstance(returned, tuple | list) else 1


def _check_modes(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    for stage in stages:
        for part in stage.modules():
            for node in getattr(part, "graph", fx.Graph()).nodes:
                found = next((word for word in _BY_MODE if word in str(node.target)), None)
                if found:
                    raise _refused(model, f"{found} would go on in evaluation: a traced stage has no modes")
