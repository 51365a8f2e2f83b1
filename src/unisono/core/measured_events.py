# SPDX-License-Identifier: Apache-2.0
"""Events about what a run has measured and chosen: ways of adding, codecs, noise, staleness. Part of `events`."""

from __future__ import annotations

from dataclasses import dataclass, field

from unisono.core.event import Event


@dataclass(frozen=True, kw_only=True)
class CommChosen(Event):
    """How vectors are added over the workers from now on, by their bytes, and the link that takes longest for 1 MB."""

    kind = "comm_chosen"
    generation: int
    algorithms: dict[str, str]  # bytes: what was chosen
    because: dict[str, str]  # bytes: why
    predicted_s: dict[str, dict[str, float]]  # bytes: algorithm: seconds by the model
    tried_s: dict[str, dict[str, float]]  # the same, measured, where there was time for it
    slowest_workers: list[int]
    slowest_hosts: list[str]
    latency_s: float  # of that link
    bytes_per_s: float
    seconds: float  # that measuring and trying took


@dataclass(frozen=True, kw_only=True)
class CodecsChosen(Event):
    """What ``--compress auto`` sends each bucket of gradients as from now on; ``none``: as it is."""

    kind = "codecs_chosen"
    generation: int
    step: int
    bytes: dict[str, int]  # bucket: its length
    codecs: dict[str, str]
    because: dict[str, str]
    predicted_s: dict[str, dict[str, float]]  # bucket: codec, ``none`` among them: seconds by the model
    errors: dict[str, float | None]  # bucket: of its codec, relative, as last sampled
    slowest_workers: list[int]  # and the link that takes longest for 1 MB
    slowest_hosts: list[str]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class CodecChanged(Event):
    """The accuracy guard of ``--compress auto`` has taken a bucket's codec back, or allowed it another."""

    kind = "codec_changed"
    step: int
    bucket: int
    before: str
    codec: str
    error: float | None  # of the codec from now on, relative, in this sample; None where there is none
    because: str  # the reason for this codec
    text: str  # the whole story in one sentence


@dataclass(frozen=True, kw_only=True)
class NoiseScale(Event):
    """The gradient noise scale as it stands: `samples` of a batch, or None where only `text` has something to say."""

    kind = "noise_scale"
    step: int
    samples: float | None
    noise: float  # the variance of one sample's gradient, all its elements together
    signal: float  # the squared length of the true gradient
    batch_size: int
    text: str


@dataclass(frozen=True, kw_only=True)
class DeviceMeasured(Event):
    """What the GPUs of a run achieve, over the last seconds: model FLOPs against the stated peak, and memory."""

    kind = "device_measured"
    step: int
    samples_per_s: float
    tokens_per_s: float | None  # None: the data is not made of tokens
    tflops: float | None  # of all GPUs together; None: the model's operations are not known
    mfu: float | None  # tflops over the peak of all
    peak: str  # which peak, in words
    memory: dict[str, int]  # bytes on one GPU at the most, by what they are used for
    rank: int | None = None  # whose GPU: the fullest of the first replica's; None: a replica is one rank


@dataclass(frozen=True, kw_only=True)
class Staleness(Event):
    """What became of the round that has just ended in a parameter-server run: how far workers were apart in it, what
    they pushed, what the servers hold now."""

    kind = "staleness"
    bound: int | None  # that was asked for; None: any
    leads: dict[str, int]  # steps ahead of the oldest unfinished one, when a piece was begun: how often
    delays: dict[str, int]  # updates made between a worker's pull and its push, on the first server: how often
    pushed: int = 0  # also by workers that died in it, as far as servers have heard of it
    acknowledged: int = 0  # those of them that their workers were told of as made
    applied: int = 0  # pieces of the round that every server has made
    steps: int = 0  # in the round
    held: dict[str, int] = field(default_factory=dict)  # by owner: bytes of weights and optimizer state


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """A part of the state was lost, and the training goes back to a checkpoint: these updates are gone."""

    kind = "rolled_back"
    step: int  # where it was
    to_step: int
    updates: int  # acknowledged ones
    under_way: int  # those of them that belong to a round that was broken off, so no `staleness` tells of them


@dataclass(frozen=True, kw_only=True)
class ModelCut(Event):
    """How the ranks of every replica share the model, in words; `lines` have the details."""

    kind = "model_cut"
    mesh: str
    text: str
    lines: list[str]


@dataclass(frozen=True, kw_only=True)
class StagesTimed(Event):
    """One microbatch on its way through the pipeline of the first replica, measured."""

    kind = "stages_timed"
    step: int
    schedule: str
    chunks: int
    bubbles: list[float]  # by stage's rank: the share of the time in which it computed nothing
    predicted: float  # the mean of that by the schedule alone, if all stages took equally long

    @property
    def text(self) -> str:
        mean = sum(self.bubbles) / max(1, len(self.bubbles))
        return (
            f"{self.schedule}, {self.chunks} chunks on {len(self.bubbles)} ranks: {mean:.0%} bubble "
            f"({self.predicted:.0%} by the schedule), worst rank {max(self.bubbles, default=0.0):.0%}"
        )
