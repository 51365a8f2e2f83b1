# SPDX-License-Identifier: Apache-2.0
"""How a codec is written down: ``int8``, ``topk:0.01``, ``int4,feedback``, ``clip:1.0+onebit``. Pure, free of torch.

Also what each is worth a line in a help text, and whether it wants error feedback. `parse_codec` of the package builds
the codec; the command line and the spec only check, with `read`.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.errors import UsageError, suggest

ABOUT = {
    "none": "float32 as it is",
    "fp16": "half precision, 2 times fewer bytes",
    "bf16": "bfloat16, 2 times fewer bytes",
    "int8": "8-bit blocks, 4 times fewer bytes (int8:stochastic rounds at random)",
    "int4": "4-bit blocks, 7.5 times fewer bytes (int4:stochastic rounds at random)",
    "onebit": "signs, 31 times fewer bytes",
    "topk": "the largest share, 100 times fewer bytes for topk:0.01",
    "randomk": "a random share, 200 times fewer bytes for randomk:0.01",
    "powersgd": "matrices of low rank, powersgd:4 for rank 4",
    "auto": "for each bucket the codec that the links call for, as long as it is accurate",
    "clip": "the norm of each microbatch limited, clip:1.0, alone or before another: clip:1.0+int8",
}
WANT_FEEDBACK = {"int4", "onebit", "topk", "randomk", "powersgd"}
_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Spelling:
    """`number` is a share, a rank or nothing, by name; `clip` the limit of a clip in front."""

    name: str
    number: float = 0.0
    stochastic: bool = False
    feedback: bool = False
    clip: float | None = None


def read(text: str) -> Spelling:
    """Take it apart and check every word of it."""
    clip, rest = None, text.strip()
    if rest.startswith("clip"):
        first, plus, rest = rest.partition("+")
        clip = _number(text, first.partition(":")[2], "a limit above 0, such as clip:1.0", 0.0, float("inf"))
        if not plus:
            return Spelling("none", clip=clip)
    rest, *options = rest.split(",")
    name, colon, value = rest.partition(":")
    if name not in ABOUT or name == "clip":
        raise UsageError(
            f"there is no compression {name!r}",
            cause=f"known are {', '.join(ABOUT)}",
            do=suggest(name, ABOUT) or "choose one of those, or none",
        )
    if name == "auto" and (clip is not None or options):
        raise _wrong(text, "auto chooses among codecs as they are", "write auto alone, or name a codec")
    number, stochastic = _value(text, name, value if colon else None)
    feedback = name in WANT_FEEDBACK and not stochastic
    for option in options:
        if option not in ("feedback", "nofeedback") or name == "none":
            raise _wrong(text, f"{option!r} is no option of {name}", "options are ,feedback and ,nofeedback")
        feedback = option == "feedback"
    return Spelling(name, number, stochastic, feedback, clip)


def _value(text: str, name: str, value: str | None) -> tuple[float, bool]:
    if name in ("topk", "randomk"):
        words = f"a share above 0 and up to 0.5, such as {name}:0.01"
        return _number(text, value or "0.01", words, 0.0, 0.5), False
    if name == "powersgd":
        rank = _number(text, value or "4", "a whole rank from 1 to 256, such as powersgd:4", 0.0, 256)
        if rank != int(rank):
            raise _wrong(text, f"{value} is not a whole number", "a rank is, such as powersgd:4")
        return rank, False
    if name in ("int8", "int4"):
        if value not in (None, *_ROUNDINGS):
            raise _wrong(text, f"{value!r} is no way to round", f"write {name}:nearest or {name}:stochastic")
        return 0.0, value == "stochastic"
    if value is not None:
        raise _wrong(text, f"{name} takes no value", f"write {name} alone")
    return 0.0, False


def _number(text: str, value: str, words: str, above: float, up_to: float) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _wrong(text, f"{value!r} is not a number", f"give {words}") from None
    if not (above < number <= up_to) or number == float("inf"):
        raise _wrong(text, f"{value} is out of range", f"give {words}")
    return number


def _wrong(text: str, cause: str, do: str) -> UsageError:
    return UsageError(f"the compression {text!r} cannot be read", cause=cause, do=do)
