# SPDX-License-Identifier: Apache-2.0
"""The spec of a run: what the user asked for, and what the script's trainer made of it.

`RunSpec` comes from the command line or a spec file; `JobSpec` is filled in by the trainer inside the script. The
two together are ``spec.json`` in the run's directory, and with the data they determine the final weights. Unknown
keys are refused, with a suggestion.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_serializer, model_validator

from unisono.core.errors import BatchTooSmall, TooFewMicrobatches, UnknownKey, UsageError, suggest
from unisono.core.interval import parse_interval
from unisono.core.mesh import AUTO, Mesh, parse_mesh

ROUND_STEPS = 16  # after which workers meet that do not wait for each other, if nobody says
SHARED_DEFAULT_MICROBATCHES = 4  # up to this many workers, the default gives the same bits without any flag
_FROM_ENVIRONMENT = (
    "seed", "microbatches", "threads", "run_dir", "checkpoint_every", "checkpoint_to", "resume", "compress", "strategy",
    "local_steps", "outer", "fragments", "servers", "staleness", "copies", "delayed", "fresh", "round_steps", "mesh",
    "precision", "compile", "recompute",
)  # fmt: skip
PRECISIONS = ("fp32", "bf16", "bf16-all", "fp16", "fp8")
COMPILES = ("none", "blocks", "whole", "tuned")
RECOMPUTES = ("none", "selective", "full", "auto")
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Workers(BaseModel):
    """How many workers a run may have: ``4`` or ``2:8``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    min: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"the minimum {self.min} is above the maximum {self.max}")
        return self

    @model_serializer
    def _as_text(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}:{self.max}"


def _as_workers(value: Any) -> Workers:
    return value if isinstance(value, Workers) else parse_workers(value)


def parse_workers(text: str | int) -> Workers:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(text).strip())
    if not match:
        raise UsageError(f"--workers {text} is not a number or MIN:MAX", do="write --workers 4 or --workers 2:8")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if min(low, high) < 1:
        raise UsageError(f"--workers {text}: a run needs at least one worker", do="write --workers 1 or more")
    if high < low:
        raise UsageError(f"--workers {text}: the minimum is above the maximum", do=f"write --workers {high}:{low}")
    return Workers(min=low, max=high)


class RunSpec(BaseModel):
    """What the user asks of a run. Every key is also an option of ``unisono run``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    script: str = ""
    args: tuple[str, ...] = ()
    name: str = ""
    run_dir: str = ""
    workers: Workers = Workers(min=1, max=1)
    microbatches: int | None = Field(default=None, ge=1)
    stop_after: int | None = Field(default=None, ge=1)
    threads: int = Field(default=1, ge=1)
    seed: int | None = Field(default=None, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_restarts: int = Field(default=10, ge=0)
    rejoin_within: float = Field(default=300.0, ge=0)
    hang_after: float = Field(default=60.0, gt=0)
    grace: float = Field(default=30.0, gt=0)
    verify_every: int = Field(default=100, ge=0)
    noise_every: int | None = Field(default=None, ge=0)
    balance: bool = True
    faults: str = ""
    listen: str = ""
    local: int | None = Field(default=None, ge=1)
    checkpoint_every: str = "10m"
    checkpoint_to: str = ""
    checkpoint_key: str = ""
    keep: int = Field(default=2, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    keep_best: str = ""
    resume: Literal["auto", "never", "force"] = "auto"
    comm: Literal["auto", "direct", "ring", "tree", "double-tree", "halving", "hierarchical", "backend"] = "auto"
    backend: Literal["auto", "mesh", "gloo"] = "auto"
    compress: str = ""
    strategy: Literal["", "allreduce", "local", "ps"] = ""
    local_steps: int | None = Field(default=None, ge=1)
    outer: Literal["", "average", "nesterov"] = ""
    fragments: int | None = Field(default=None, ge=1)
    servers: int | None = Field(default=None, ge=0)
    local_servers: int | None = Field(default=None, ge=0)
    staleness: str = ""
    copies: int | None = Field(default=None, ge=1)
    delayed: Literal["", "scale", "compensate"] = ""
    fresh: Literal["", "pull", "push"] = ""
    round_steps: int | None = Field(default=None, ge=1)
    mesh: str = ""  # the shape of a replica; how many there are is `workers`
    zero: Literal[1, 2, 3] | None = None
    offload: bool = False
    schedule: str = ""
    chunks: int | None = Field(default=None, ge=1)
    plaintext: bool = False
    precision: Literal["", "fp32", "bf16", "bf16-all", "fp16", "fp8"] = ""
    compile: Literal["", "none", "blocks", "whole", "tuned"] = ""
    recompute: Literal["", "none", "selective", "full", "auto"] = ""

    @property
    def serving(self) -> int:
        """How many servers there are besides the workers."""
        return 0 if self.strategy != "ps" else 1 if self.servers is None else self.servers

    @property
    def serving_here(self) -> int:
        """How many of them the run's own machine starts; others are brought by machines that join."""
        return self.serving if self.local_servers is None else self.local_servers

    @property
    def replica(self) -> Mesh:
        if self.mesh == AUTO:
            raise UsageError(
                "--mesh auto needs unisono run, which chooses before anything starts",
                do=f"unisono run {self.script or 'train.py'} --mesh auto; or write the mesh out",
            )
        return parse_mesh(self.mesh) if self.mesh else Mesh()

    @model_validator(mode="before")
    @classmethod
    def _replicas_are_workers(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("mesh") in (None, "", AUTO):
            return values
        mesh = parse_mesh(str(values["mesh"]))
        asked = values.get("workers")
        if mesh.dp and asked is not None and str(parse_workers(mesh.dp)) != str(_as_workers(asked)):
            raise ValueError(
                f"--mesh asks for dp={mesh.dp} replicas and --workers for {asked}: they are the same thing; give one"
            )
        return {**values, "mesh": mesh.inner} | ({"workers": mesh.dp} if mesh.dp else {})

    @model_validator(mode="after")
    def _ranks_share(self) -> Self:
        """An option for ranks that share a model cannot take effect where none do."""
        if self.mesh == AUTO:
            return self._choosable()
        mesh = self.replica
        for name, dimension in (("zero", "fsdp"), ("offload", "fsdp"), ("schedule", "pp"), ("chunks", "pp")):
            if getattr(self, name) and getattr(mesh, dimension) == 1:
                raise ValueError(f"{name} belongs to {dimension}; add {dimension}=2 or more to --mesh, or leave it out")
        return self

    def _choosable(self) -> Self:
        refusals = {
            "listen": "it looks at the devices of this machine alone",
            "offload": "how much stays on a device then depends on what is in use at the moment",
            "schedule": "it never chooses pp",
            "chunks": "it never chooses pp",
        }
        for name, why in refusals.items():
            if getattr(self, name):
                raise ValueError(f"--mesh auto and --{name} do not go together: {why}; write the mesh out")
        if self.strategy not in ("", "allreduce"):
            raise ValueError(f"--mesh auto and --strategy {self.strategy} do not go together; leave out one of the two")
        return self

    @property
    def bound(self) -> int | None:
        """How many steps one worker may be ahead of the slowest; None: as many as it likes."""
        return None if self.staleness == "inf" else int(self.staleness or 0)

    @model_validator(mode="after")
    def _servers_serve(self) -> Self:
        names = ("servers", "local_servers", "staleness", "copies", "delayed", "fresh", "round_steps")
        given = [name for name in names if getattr(self, name) not in (None, "")]
        if given and self.strategy != "ps":
            raise ValueError(f"{given[0]} belongs to the strategy ps; add --strategy ps, or leave it out")
        if self.noise_every and self.strategy == "ps":
            raise ValueError(
                f"noise_every {self.noise_every} cannot take effect with the strategy ps: nobody has the sum "
                "of all gradients; leave it out, or use all-reduce"
            )
        if self.delayed and self.bound == 0:
            raise ValueError("with staleness 0 nothing is late; add --staleness, or leave out --delayed")
        if self.serving_here > self.serving:
            raise ValueError(f"{self.serving_here} local servers are more than all; add --servers {self.serving_here}")
        if self.fresh and self.bound == 0:
            raise ValueError("with staleness 0 all get weights at once; add --staleness, or leave out --fresh")
        if self.round_steps and self.bound == 0:
            raise ValueError("with staleness 0 all meet at every step; add --staleness, or leave out --round-steps")
        round_steps = self.round_steps or ROUND_STEPS
        if self.bound and self.bound >= round_steps:
            raise ValueError(
                f"staleness {self.bound} cannot take effect: all meet at the end of a round of {round_steps} steps, so "
                f"they are at most {round_steps - 1} apart; add --round-steps {self.bound + 1} or more, or use "
                "--staleness inf"
            )
        if self.fresh == "push" and self.delayed == "compensate":
            raise ValueError(
                "--delayed compensate needs to know of which weights a gradient is, unknown with --fresh push; "
                "use --fresh pull, or --delayed scale"
            )
        if self.serving and (self.copies or 1) > self.serving:
            raise ValueError(f"{self.copies} copies of each slice need as many servers; add --servers {self.copies}")
        if not self.serving and (self.copies or 1) > self.workers.min:
            raise ValueError(
                f"without servers, {self.copies} copies of each slice need as many workers, and there may be as few as "
                f"{self.workers.min}; write --workers {self.copies}:{max(self.copies or 1, self.workers.max)}, or add "
                f"--servers {self.copies}"
            )
        return self

    @model_validator(mode="after")
    def _gloo_reaches(self) -> Self:
        """Said again by `comm.transport`, where gloo is all that there is."""
        if self.backend == "gloo" and self.listen:
            raise ValueError("--backend gloo reaches nobody on another machine; leave out --listen, or --backend")
        if self.backend == "gloo" and self.strategy == "ps":
            raise ValueError(
                "--backend gloo does not carry what servers are asked; leave out --strategy ps, or --backend"
            )
        return self

    @field_validator("staleness", mode="before")
    @classmethod
    def _usable_staleness(cls, value: Any) -> Any:
        if str(value) not in ("", "inf") and not str(value).isdecimal():
            raise ValueError("staleness is a number of steps from 0 on, or inf")
        return str(value)

    @field_validator("workers", mode="before")
    @classmethod
    def _workers_from_text(cls, value: Any) -> Any:
        return parse_workers(value) if isinstance(value, str | int) else value

    @field_validator("checkpoint_every")
    @classmethod
    def _usable_interval(cls, value: str) -> str:
        parse_interval(value, "--checkpoint-every")
        return value

    @field_validator("name")
    @classmethod
    def _usable_name(cls, value: str) -> str:
        if value and not NAME_PATTERN.fullmatch(value):
            raise ValueError(
                "a name is letters, digits, '.', '_' and '-', at most 64, and starts with a letter or digit"
            )
        return value


class JobSpec(BaseModel):
    """What the script's trainer resolved: with the data and the fingerprint this decides every bit of the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    microbatches: int
    batch_size: int
    seed: int
    threads: int
    epochs: int | None = None
    max_steps: int | None = None
    exact: bool = True
    split: str = "samples"
    shuffle: bool | Literal["blocks"] = True
    block_shards: int | None = None  # of shuffle="blocks"
    drop_last: bool = False
    on_bad: str = "stop"
    samples: int | None = None  # None: an iterable dataset, its length is known when it ends
    optimizer: str = ""
    schedule: str = ""
    clip: str = ""
    l1: float = 0.0
    batch_norm: str = "local"
    compress: str = "none"
    local: str = ""  # how replicas update on their own, empty: not at all
    staleness: str = ""  # how far workers may be apart, empty: not at all
    delayed: str = ""  # what is done about gradients that come late, empty: nothing
    fresh: str = ""  # how weights come to workers that do not wait for each other, empty: pulled
    round_steps: int | None = None  # after which they meet all the same; None: as many as usual
    mesh: str = ""  # the shape of a replica, empty: one rank
    sharing: str = ""  # how its ranks share the work, where that decides bits
    measured_stages: tuple[str, ...] = ()  # where its pipeline was cut by measured times
    precision: str = "fp32"
    compile: str = "none"
    recompute: str = "none"
    parameters: int = 0


def why_not_exact(job: Mapping[str, Any]) -> str:
    """What the bits of a job depend on besides its spec and its data, for people; empty if nothing. As in spec.json."""
    if not job.get("exact", True):
        return "bits depend on the number of workers"
    if job.get("staleness"):
        return "bits depend on who is faster"
    if job.get("compress") == "auto":
        return "bits depend on codecs chosen by measurement"
    if job.get("measured_stages"):
        return "bits depend on where the pipeline was cut by measured times"
    return ""


def default_microbatches(max_workers: int, batch_size: int) -> int:
    """M when the user does not say: the most workers the run may use, and at least four where the batch allows.

    The floor of four is what makes ``python train.py`` and ``--workers 1..4`` agree without a flag.
    """
    return max(max_workers, min(SHARED_DEFAULT_MICROBATCHES, batch_size))


def resolve_microbatches(asked: int | None, max_workers: int, batch_size: int) -> int:
    """M for this job, or an error that shows the arithmetic."""
    microbatches = default_microbatches(max_workers, batch_size) if asked is None else asked
    if microbatches < max_workers:
        raise TooFewMicrobatches(
            f"{microbatches} microbatches cannot occupy {max_workers} workers",
            cause="each worker computes at least one microbatch of every step",
            do=f"set --microbatches {max_workers} or more (this changes the bits)"
            + (f", or --workers {microbatches}" if microbatches > 0 else ""),
        )
    if batch_size < microbatches:
        raise BatchTooSmall(
            f"batch_size {batch_size} is smaller than {microbatches} microbatches",
            cause="every step's batch is cut into that many microbatches, one sample each at least",
            do=f"raise batch_size to {microbatches} or more, or set --microbatches {batch_size} (workers up to that)",
        )
    return microbatches


def build_run_spec(values: dict[str, Any], source: str) -> RunSpec:
    """Validate plain values (from a file or the command line); `source` is named in errors."""
    unknown = [key for key in values if key not in RunSpec.model_fields]
    if unknown:
        hint = suggest(unknown[0], RunSpec.model_fields)
        raise UnknownKey(
            f"{source}: unknown key {unknown[0]!r}" + (f"; {hint}" if hint else ""),
            do="known keys: " + ", ".join(RunSpec.model_fields),
        )
    try:
        return RunSpec(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if not key:  # what does not go together
            raise UsageError(f"{source}: {first['msg'].removeprefix('Value error, ')}") from None
        raise UsageError(f"{source}: {key} = {first['input']!r}: {first['msg']}") from None


def from_environment() -> dict[str, Any]:
    """What UNISONO_SEED, UNISONO_RUN_DIR and the like ask for; options beat them."""
    found = {key: os.environ.get(f"UNISONO_{key.upper()}") for key in _FROM_ENVIRONMENT}
    return {key: value for key, value in found.items() if value}


def read_spec_file(path: Path) -> dict[str, Any]:
    """The run keys of a TOML or JSON spec file; a run's own ``spec.json`` works too."""
    is_toml = path.suffix == ".toml"
    try:
        text = path.read_text()
        values = tomllib.loads(text) if is_toml else json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read the spec file {path}: {error.strerror}") from None
    except ValueError as error:  # of either parser, or bytes that are no text
        raise UsageError(f"{path} is not valid {'TOML' if is_toml else 'JSON'}: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} does not hold a table of keys")
    run, job = values.get("run"), values.get("job")
    if set(values) == {"run", "job"} and isinstance(run, dict):
        # A run's spec.json: the same asking, with the microbatches and the seed that it settled on.
        settled = {key: job[key] for key in ("microbatches", "seed") if isinstance(job, dict) and key in job}
        return {**run, **settled, "run_dir": "", "name": ""}
    return values
