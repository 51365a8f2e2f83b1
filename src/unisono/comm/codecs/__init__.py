# SPDX-License-Identifier: Apache-2.0
"""Gradient compression: one codec a file behind the seam `Codec`, error feedback around any of them, and their names.

`parse_codec` is the table of names to classes. The reducers carry the codes; nothing here knows other workers. Torch is
loaded only when a codec is built, so that a command line can check a spelling (`spelling.read`) without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from unisono.comm.codecs.spelling import Spelling, read
from unisono.core.errors import UsageError

if TYPE_CHECKING:
    from unisono.comm.codecs.clip import Clip
    from unisono.comm.codecs.powersgd import PowerSGD
    from unisono.comm.codecs.seam import Codec

__all__ = ["NONE", "Compression", "parse_codec"]


class Compression(NamedTuple):
    """`codec` is None for ``none``; `feedback` says whether it wants residuals; `clip` comes before it."""

    codec: Codec | PowerSGD | None
    feedback: bool
    clip: Clip | None = None

    @property
    def name(self) -> str:
        """As `parse_codec` reads it."""
        names = [part.name for part in (self.clip, self.codec) if part is not None and part.name != "float32"]
        name = "+".join(names) or "none"
        usual = read(name).feedback
        return name if self.feedback == usual else f"{name},{'feedback' if self.feedback else 'nofeedback'}"


NONE = Compression(None, False)


def parse_codec(text: str) -> Compression:
    """``topk:0.01``, ``int8:stochastic``, ``powersgd:4``, ``clip:1.0+onebit``, ``topk:0.01,nofeedback``, ``none``."""
    from unisono.comm.codecs.clip import Clip
    from unisono.comm.codecs.plain import Plain

    spelling = read(text)
    if spelling.name == "auto":
        raise UsageError(
            "the compression auto is not a codec",
            cause="it chooses one for each bucket of gradients",
            do="name a codec",
        )
    codec = _build(spelling)
    if spelling.clip is None:
        return Compression(codec, spelling.feedback)
    return Compression(Plain() if codec is None else codec, spelling.feedback, Clip(spelling.clip))


def _build(spelling: Spelling) -> Codec | PowerSGD | None:
    from unisono.comm.codecs.bf16 import BFloat16
    from unisono.comm.codecs.fp16 import Float16
    from unisono.comm.codecs.int4 import Int4
    from unisono.comm.codecs.int8 import Int8
    from unisono.comm.codecs.onebit import OneBit
    from unisono.comm.codecs.powersgd import PowerSGD
    from unisono.comm.codecs.randomk import RandomK
    from unisono.comm.codecs.topk import TopK

    table: dict[str, Codec | PowerSGD | None] = {
        "none": None,
        "fp16": Float16(),
        "bf16": BFloat16(),
        "int8": Int8(spelling.stochastic),
        "int4": Int4(spelling.stochastic),
        "onebit": OneBit(),
        "topk": TopK(spelling.number),
        "randomk": RandomK(spelling.number, unbiased=not spelling.feedback),
        "powersgd": PowerSGD(int(spelling.number)),
    }
    return table[spelling.name]
