# SPDX-License-Identifier: Apache-2.0
"""Where a run's checkpoints lie, and how a training takes one up: found, compared with what the script asks, loaded.

Every worker that sees the place loads for itself; one that does not is healed by the others when they meet. What
decides the bits must be as it was, or nothing is loaded; what does not, such as the number of workers or of epochs, may
differ. Called once, by `job`, before the workers meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.checkpoint.listing import good_checkpoints, list_steps, newest_good
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.matching import require_match
from unisono.checkpoint.reading import read_tensors, verify
from unisono.checkpoint.retention import Best
from unisono.checkpoint.seal import Seal, find_seal
from unisono.checkpoint.specs import CARRIED, Held, TensorSpec, carried_name
from unisono.checkpoint.store import Store, open_store
from unisono.comm import state_tree
from unisono.core import events
from unisono.core.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from unisono.core.fingerprint import Fingerprint
from unisono.core.interval import Interval, parse_interval
from unisono.core.run_dir import RunDir
from unisono.core.spec import ROUND_STEPS, JobSpec, RunSpec
from unisono.parallel.carried import NOTHING, Carried, Make, State
from unisono.train.saving import Keeping
from unisono.train.spread import Specs, Spread, specs_of_carried

_OF_WAITING = {"staleness": "0", "delayed": "nothing", "fresh": "pull", "round_steps": ROUND_STEPS}  # what none means
_MAY_DIFFER = ("epochs", "max_steps", "mesh", "sharing", "measured_stages", *_OF_WAITING)
_BEFORE: Mapping[str, Any] = {"measured_stages": []}  # what checkpoints mean that do not say it
_TOLD_ELSEWHERE = ("threads",)  # they are part of the fingerprint


@dataclass(frozen=True)
class Home:
    """The place of a run's checkpoints, how often and how long they are kept, and the one to go on from."""

    store: Store | None = None
    seal: Seal | None = None
    interval: Interval = field(default_factory=Interval)
    keeping: Keeping = field(default_factory=Keeping)
    found: Manifest | None = None
    force: bool = False
    passed_over: list[str] = field(default_factory=list)  # newer ones that cannot be used, and why

    @property
    def microbatches(self) -> int | None:
        """M belongs to the job: it stays what it was, whatever the number of workers."""
        recorded = _table(self.found, "job").get("microbatches") if self.found else None
        return recorded if type(recorded) is int and recorded > 0 else None  # a wrong one is refused by `differences`

    @property
    def measured_stages(self) -> tuple[str, ...]:
        """Where a pipeline was cut by measured times: there it is cut again, whatever would be measured now."""
        recorded = _table(self.found, "job").get("measured_stages") if self.found else None
        return tuple(map(str, recorded)) if isinstance(recorded, list) else ()


def open_home(spec: RunSpec, run_dir: RunDir, is_under_way: bool) -> Home:
    """`is_under_way`: the others hold a state that is newer than any checkpoint."""
    url = spec.checkpoint_to or str(run_dir.path / "checkpoints")
    seal = find_seal(spec.checkpoint_key or None)
    interval = parse_interval(spec.checkpoint_every, "--checkpoint-every")
    keeping = Keeping(spec.keep, spec.keep_every, Best.parse(spec.keep_best) if spec.keep_best else None)
    store = open_store(url)
    passed_over: list[str] = []
    found = None
    if not is_under_way:
        found = newest_good(store, lambda _, error: passed_over.append(error.what), seal)
        passed_over += _missed(store, run_dir, found)
    if found is not None and spec.resume == "never":
        raise CheckpointError(
            f"{store.url} already holds checkpoints, up to step {found.step}, and --resume never says not to use them",
            do="choose another --checkpoint-to, --name or --run-dir, or remove them",
        )
    return Home(store, seal, interval, keeping, found, spec.resume == "force", passed_over)


def _missed(store: Store, run_dir: RunDir, found: Manifest | None) -> list[str]:
    """What the run's record says was saved and is not there: never go back, or begin anew, without a word."""
    told = [event for event in events.read(run_dir.events) if isinstance(event, events.CheckpointSaved)]
    newest = max(told, key=lambda event: event.step, default=None)
    if newest is None or newest.step <= (found.step if found else -1) or newest.step in list_steps(store):
        return []
    return [f"the checkpoint of step {newest.step}, which this run has saved in {newest.url}, is not in {store.url}"]


def captured(
    state: Mapping[str, Any], model: nn.Module
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any], frozenset[str]]:
    """The state by name, its tree, and the names of the tensors that only an update changes."""
    tree, tensors = state_tree.named(state)
    trained = {parameter.data_ptr() for parameter in model.parameters()}
    steady = {name for name, tensor in tensors.items() if name.startswith("optimizer.") or tensor.data_ptr() in trained}
    return tensors, {"tree": tree}, frozenset(steady)


def by_place(carried: Carried, spread: Spread | None) -> Mapping[str, Specs]:
    """What a microbatch carries on each rank of a replica."""
    return {"": specs_of_carried(carried)} if spread is None else spread.carried


def captured_carried(carried: Carried, spread: Spread | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Held]]:
    """The states of this worker's microbatches by name, and who holds those of all. Of a replica, the first rank gets
    those of all its ranks."""
    place = spread.place if spread else ""
    own = {
        carried_name(microbatch, name, place): tensor.detach()
        for microbatch, state in carried.mine.items()
        for name, tensor in state.items()
    }
    held = {
        carried_name(microbatch, name, at): Held(spec, holder)
        for microbatch, holder in carried.holders.items()
        for at, specs in by_place(carried, spread).items()
        for name, spec in specs.items()
    }
    return (spread.carried_of_all(own) if spread else own), held


Keep = Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]
"""What to keep of a tensor that is found at this place in the state."""


def _all_of_it(place: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
    del place
    return tensor


@dataclass(frozen=True)
class TakenUp:
    """A state as `capture` saw it, the checkpoint that it is from, and what is not as it was, in words."""

    state: Any
    manifest: Manifest
    differs: list[str]


def load(
    home: Home,
    here: Mapping[str, TensorSpec],
    spec: JobSpec,
    fingerprint: Fingerprint,
    carried: Carried = NOTHING,
    keep: Keep = _all_of_it,
) -> TakenUp:
    """The newest checkpoint of which every byte is right. `here` is what the model has. Raises
    CheckpointMismatch, which names what does not fit."""
    assert home.found is not None
    assert home.store is not None
    for manifest in _candidates(home):
        saved = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith("model.")}
        require_match(here, dataclasses.replace(manifest, tensors=saved))
        differs = differences(manifest, spec, fingerprint, home.force)
        try:
            state = state_of(home.store, manifest, home.seal, keep)
            if carried is not NOTHING:  # read later, by whoever needs it; but damage must show while there is a choice
                for problem in verify(home.store, _carried_part(manifest), home.seal):
                    raise problem
        except CheckpointDamaged as error:
            home.passed_over.append(error.what)
            continue
        return TakenUp(state, manifest, differs)
    raise CheckpointDamaged(
        f"none of the checkpoints in {home.store.url} can be used",
        cause="\n".join(home.passed_over),
        do="restore the files from a copy, or begin anew in another directory",
    )


def state_of(store: Store, manifest: Manifest, seal: Seal | None, keep: Keep) -> Any:
    """The tree of a checkpoint. Whoever shares a model reads all of it, since all must agree on what is damaged, but
    has no more in memory than one whole tensor beside what it keeps."""
    names = [name for name in manifest.tensors if not name.startswith(CARRIED)]
    with believed(manifest, store.url):
        places = state_tree.places(manifest.facts["tree"])
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in read_tensors(store, manifest, names, seal):
            tensors[name] = keep(places.get(name, ()), tensor)
            del tensor
        return state_tree.restored(manifest.facts["tree"], tensors)


def _carried_part(manifest: Manifest) -> Manifest:
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(CARRIED)}
    used = {piece.chunk for tensor in tensors.values() for piece in tensor.pieces}
    chunks = {digest: chunk for digest, chunk in manifest.chunks.items() if digest in used}
    return dataclasses.replace(manifest, tensors=tensors, chunks=chunks)


def carried_in(
    home: Home, manifest: Manifest, carried: Carried, spec: JobSpec, spread: Spread | None = None
) -> tuple[Make | None, str]:
    """How to read this rank's state of a microbatch, None if it begins anew; and what the user should know about it.
    The same on all ranks of a replica."""
    part, at = _carried_part(manifest), f"the checkpoint of step {manifest.step}"
    if not carried.is_active:
        text = f"{at} holds state that belongs to microbatches ({CARRIED}*); this training has none, so it is ignored"
        return None, text if part.tensors else ""
    anew = f"{carried.what} begins anew, so the result will not be that of a run without this interruption"
    if not part.tensors:
        return None, f"{at} does not hold {carried.what}: {anew}"
    wanted = {
        carried_name(microbatch, name, place): kind
        for microbatch in range(spec.microbatches)
        for place, specs in by_place(carried, spread).items()
        for name, kind in specs.items()
    }
    try:
        _require_same_cut(manifest, spec, carried.what)
        require_match(wanted, part)
    except CheckpointMismatch as error:
        if not home.force:
            raise
        return None, f"{error.what}: {anew}"

    def read(microbatch: int) -> State:
        assert home.store is not None
        names = {carried_name(microbatch, name, spread.place if spread else ""): name for name in carried.shapes}
        return {names[name]: tensor for name, tensor in read_tensors(home.store, manifest, names, home.seal)}

    return read, ""


def _require_same_cut(manifest: Manifest, spec: JobSpec, what: str) -> None:
    """Raises CheckpointMismatch. Equal shapes are not enough: the halves of two meshes are as long as each other."""
    before, now = _cut(_table(manifest, "job")), _cut(spec.model_dump())
    if before != now:
        raise CheckpointMismatch(
            f"the checkpoint of step {manifest.step} holds {what}, by ranks that share the model in another way",
            cause=f"saved with {before}; here it is {now}",
            do="go on with the mesh that it was saved with, with any number of replicas; or --resume force, to begin "
            "that part anew",
        )


def _cut(job: Mapping[str, Any]) -> str:
    told = [job.get("mesh"), job.get("sharing")]
    return "; ".join(str(words) for words in told if words) or "replicas of one rank"


@contextlib.contextmanager
def believed(manifest: Manifest, url: str) -> Iterator[None]:
    """A hash is no proof of good faith: whoever wrote the checkpoint may have written anything into its facts."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointMismatch(
            f"the checkpoint of step {manifest.step} in {url} does not hold the state of this training",
            cause=f"{type(error).__name__}: {error}",
            do="if it is not from this training, or from somebody whom you do not trust, use another one",
        ) from error


def _table(found: Manifest, name: str) -> Mapping[str, Any]:
    table = found.facts.get(name)
    return table if isinstance(table, dict) else {}


def _candidates(home: Home) -> Iterator[Manifest]:
    assert home.found is not None
    assert home.store is not None
    newest = home.found.step
    yield home.found

    def note(step: int, error: CheckpointDamaged) -> None:
        if step < newest:
            home.passed_over.append(error.what)

    for manifest in good_checkpoints(home.store, note, home.seal):
        if manifest.step < home.found.step:
            yield manifest


def differences(found: Manifest, spec: JobSpec, fingerprint: Fingerprint, force: bool) -> list[str]:
    """What is not as it was. Raises CheckpointMismatch when that would change what is computed, unless forced."""
    job, before = spec.model_dump(mode="json"), {**_BEFORE, **_table(found, "job")}
    keys = [key for key in job if key not in _TOLD_ELSEWHERE and before.get(key) != job[key]]
    changed = {key: (before.get(key), job[key]) for key in keys}
    changed = {key: pair for key, pair in changed.items() if key not in _OF_WAITING or _meant(key, pair)}
    may_differ = _MAY_DIFFER if spec.compile != "none" else (*_MAY_DIFFER, "recompute")  # compiled, it decides bits
    harmless = [_harmless(key, old, new) for key, (old, new) in changed.items() if key in may_differ]
    harmful = [f"{key} {old} -> {new}" for key, (old, new) in changed.items() if key not in may_differ]
    now, then = fingerprint.model_dump(mode="json"), _table(found, "fingerprint")
    if then.get("data") != now.get("data"):
        harmful.append("the data: another length, or other samples under the same ids")
    elsewhere = [f"{key} {then.get(key)} -> {now[key]}" for key in now if key != "data" and then.get(key) != now[key]]
    if harmful and not force:
        raise CheckpointMismatch(
            f"the checkpoint of step {found.step} was made by another training than the one that is asked for",
            cause="\n".join(harmful),
            do="ask for the same; or give another --name for a new run; or --resume force to go on all the same",
        )
    return [*harmful, *harmless, *elsewhere]


def _meant(key: str, pair: tuple[Any, Any]) -> tuple[Any, ...]:
    """What was and is meant; nothing where that is the same."""
    then, now = (one or _OF_WAITING[key] for one in pair)
    return () if then == now else (then, now)


def _harmless(key: str, old: Any, new: Any) -> str:
    """How workers wait for each other may change between two steps; that bits follow from it is said."""
    if key not in _OF_WAITING:
        return f"{key} {old} -> {new}"
    then, now = _meant(key, (old, new))
    text = f"{key} {then} -> {now}"
    if key == "staleness":
        text += "; from here on bits depend on who is faster" if new else "; bits depend on who was faster until here"
    return text


def check_own(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    missing, unknown = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    if missing or unknown:
        told = [f"only here: {', '.join(missing)}"] if missing else []
        told += [f"only in the checkpoint: {', '.join(unknown)}"] if unknown else []
        raise CheckpointMismatch(
            "the checkpoint has other things with state beside the model than this training",
            cause="\n".join(told),
            do="give the trainer the same schedule, callbacks and state objects as before",
        )
