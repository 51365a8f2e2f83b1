# SPDX-License-Identifier: Apache-2.0
"""Whole trainings whose checkpoints lie in a bucket: a real S3 server, behind a proxy on a bad day.

One request in twenty fails, an upload stalls, everybody is killed; the run succeeds, or goes on elsewhere from what is
in the bucket alone. What a store does with each single operation is in tests/contract/test_store.py.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from labs.faulty_http import KINDS, Faults, faulty_http
from labs.s3_server import BUCKET, S3Server, s3_server
from multiproc.running import run_unisono, start_unisono
from multiproc.scripts import SMALL
from unisono.checkpoint.listing import list_steps, read_manifest
from unisono.checkpoint.reading import verify
from unisono.checkpoint.retrying import Patience
from unisono.checkpoint.seal import VARIABLE, find_seal
from unisono.checkpoint.store import open_store
from unisono.core import events

STEPS = 30
NO_HANG_S = 60.0
# With a file called "hold", the step that it names does not end before that file is gone.
SCRIPT = (
    SMALL
    + f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(300_000), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x) * self.frozen.abs().mean()


def after(step):
    time.sleep(0.05)
    while Path("hold").exists() and step == int(Path("hold").read_text()):
        time.sleep(0.05)


fit(Net(), torch.optim.AdamW, max_steps={STEPS}, callbacks=[Every(after)])
"""
)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def calm_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("calm")
    return run_unisono(SCRIPT, folder, "--microbatches", "4", workers=1).weights_sha256


def options(url: str, every: int = 5) -> tuple[str, ...]:
    return ("--microbatches", "4", "--checkpoint-every", str(every), "--checkpoint-to", url)


def test_errors_and_a_stalled_upload_cost_time_and_nothing_else(s3: S3Server, tmp_path: Path, calm_hash: str) -> None:
    """The upload that stalls is one of the last save, the only one that nothing later can take the place of."""
    faults, url, hold = Faults(share=0.05, seed=4), s3.url("stalled"), tmp_path / "hold"
    hold.write_text(str(STEPS - 1))
    with (
        faulty_http(s3.port, faults) as proxy,
        s3.environment(proxy.endpoint),
        start_unisono(SCRIPT, tmp_path, *options(url, every=20)) as started,
    ):
        started.until(lambda: _saved_at_least(started.events, 20), "the only save before the last", NO_HANG_S)
        faults.stall = "^PUT .*/chunks/"
        hold.unlink()
        finished = started.wait(NO_HANG_S)
    assert finished.weights_sha256 == calm_hash
    assert proxy.injected["stall"] == 1
    assert sum(proxy.injected[kind] for kind in KINDS) > 0
    first, last = finished.events_of(events.CheckpointSaved)
    assert (first.step, last.step) == (20, STEPS)
    assert last.seconds >= Patience().attempt_s, "it was not the upload that stalled which was cut and repeated"
    with s3.environment():
        store = open_store(url)
        assert list_steps(store)[-1] == STEPS
        for step in list_steps(store):
            assert verify(store, read_manifest(store, step)) == []


def test_everybody_killed_and_gone_on_elsewhere_from_an_encrypted_bucket(
    s3: S3Server, tmp_path: Path, calm_hash: str
) -> None:
    here, elsewhere, url = tmp_path / "here", tmp_path / "elsewhere", s3.url("sealed")
    here.mkdir()
    elsewhere.mkdir()
    (here / "hold").write_text("18")
    key = {VARIABLE: secrets.token_hex(32)}
    with faulty_http(s3.port, Faults(share=0.05, seed=6)) as proxy, s3.environment(proxy.endpoint):
        with start_unisono(SCRIPT, here, *options(url), env=key) as started:
            started.until(lambda: _saved_at_least(started.events, 10), "a checkpoint", NO_HANG_S)
            started.send(signal.SIGKILL)
            started.wait(expect=-signal.SIGKILL)
        begun_s = time.monotonic()
        again = run_unisono(SCRIPT, elsewhere, *options(url), workers=3, env=key, timeout_s=NO_HANG_S)
        assert time.monotonic() - begun_s < NO_HANG_S
    assert again.weights_sha256 == calm_hash
    assert [event.step >= 10 for event in again.events_of(events.Resumed)] == [True]
    assert sum(proxy.injected[kind] for kind in KINDS) > 0
    assert again.run_dir is not None
    _assert_hidden(s3, "sealed", again.run_dir / "final.safetensors")
    with s3.environment():
        store = open_store(url)
        assert verify(store, read_manifest(store, STEPS), find_seal(environ=key)) == []


def _saved_at_least(seen: list[events.Event], step: int) -> bool:
    return any(isinstance(event, events.CheckpointSaved) and event.step >= step for event in seen)


def _assert_hidden(s3: S3Server, folder: str, weights: Path) -> None:
    """No sixteen bytes of any tensor lie in any object. The weights are those of the last checkpoint."""
    client = s3.client()
    objects = {name: client.cat_file(name) for name in client.find(f"{BUCKET}/{folder}")}
    chunks = [name for name in objects if "/chunks/" in name]
    assert chunks
    assert all(name.endswith(".sealed") for name in chunks)
    with safe_open(weights, framework="numpy") as file:
        tensors = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    assert len(tensors["frozen"]) > 1_000_000
    for tensor, data in tensors.items():
        probe = data[-16:]
        found = [name for name, content in objects.items() if len(probe) == 16 and probe in content]
        assert not found, f"{tensor} can be read in {found}"
