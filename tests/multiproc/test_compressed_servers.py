# SPDX-License-Identifier: Apache-2.0
"""Parameter servers with ``--compress`` on real processes: the bits of a compressed all-reduce, checkpoints included.

How many bytes are pushed is counted in contract/test_server_codecs.py; deaths are in chaos/test_servers_compressed.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import Finished, run_python, run_unisono
from multiproc.scripts import SMALL
from unisono.checkpoint.listing import newest_good
from unisono.checkpoint.reading import read_tensors
from unisono.checkpoint.store import open_store
from unisono.core import events

MODELS = Path(__file__).with_name("train_model.py")
SERVERS = ("--strategy", "ps", "--microbatches", "4")
FOUR = {"UNISONO_MICROBATCHES": "4"}

# Large enough for codes to be worth it, with a schedule, a clipped norm and a short last batch.
SCRIPT = """
import torch
from torch import nn

import unisono

torch.manual_seed(1)
inputs = torch.randn(77, 6)
DATA = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
unisono.Trainer(
    model, optimizer, loss=nn.functional.cross_entropy, data=DATA, batch_size=8, epochs=3, eval_data=DATA,
    schedule=schedule, clip=unisono.Clip(norm=0.5),
).fit()
"""


def outcome(finished: Finished) -> tuple[str, list[float], dict[str, float]]:
    assert finished.result is not None
    losses = [event.loss for event in finished.events_of(events.StepFinished)]
    return finished.weights_sha256, losses, finished.result["metrics"]


@pytest.mark.parametrize(
    ("codec", "teams"),
    [
        ("int8", ((1, 1), (2, 2), (3, 0))),
        ("onebit", ((2, 1), (4, 0))),
        ("randomk:0.1", ((3, 2),)),
        ("powersgd:2", ((2, 2),)),
    ],
)
def test_servers_give_the_bits_of_a_compressed_all_reduce(
    codec: str, teams: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """By hash, by every step's loss, by the evaluation; and they are not those of an uncompressed one."""
    alone = outcome(run_python(SCRIPT, tmp_path, env=FOUR | {"UNISONO_COMPRESS": codec}))
    assert alone[0] != run_python(SCRIPT, tmp_path, env=FOUR).weights_sha256
    for workers, servers in teams:
        asked = (*SERVERS, "--servers", str(servers), "--compress", codec)
        finished = run_unisono(SCRIPT, tmp_path, *asked, workers=workers)
        assert outcome(finished) == alone, f"{workers} workers, {servers} servers"


def test_a_network_with_convolutions_and_batch_norm_does_too(tmp_path: Path) -> None:
    alone = outcome(run_python(MODELS, tmp_path, "cnn", env=FOUR | {"UNISONO_COMPRESS": "topk:0.05"}))
    asked = (*SERVERS, "--servers", "2", "--copies", "2", "--compress", "topk:0.05")
    assert outcome(run_unisono(MODELS, tmp_path, *asked, workers=2, script_args=("cnn",))) == alone


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("--strategy", "ps", "--servers", "2"), ("--strategy", "allreduce")),
        (("--strategy", "allreduce"), ("--strategy", "ps", "--servers", "1")),
        (("--strategy", "ps", "--servers", "1"), ("--strategy", "ps", "--servers", "0")),
    ],
    ids=["servers, then all-reduce", "all-reduce, then servers", "fewer servers"],
)
def test_a_checkpoint_holds_what_was_not_sent_yet_whichever_strategy_goes_on(
    first: tuple[str, ...], then: tuple[str, ...], tmp_path: Path
) -> None:
    codec = "onebit"
    alone = outcome(run_python(SCRIPT, tmp_path, env=FOUR | {"UNISONO_COMPRESS": codec}))
    named = ("--microbatches", "4", "--name", "r", "--compress", codec)
    run_unisono(SCRIPT, tmp_path, *named, *first, "--stop-after", "13", workers=2)
    resumed = run_unisono(SCRIPT, tmp_path, *named, *then, workers=3)
    assert [event.step for event in resumed.events_of(events.Resumed)] == [13]
    assert not [event for event in resumed.events_of(events.Notice) if event.code.startswith("carried")]
    assert outcome(resumed) == alone


def test_what_a_codec_cannot_encode_is_refused(tmp_path: Path) -> None:
    text = "fit(nn.Linear(4, 2).half())\n"
    asked = ("--strategy", "ps", "--compress", "int8")
    finished = run_unisono(SMALL + text, tmp_path, *asked, workers=1, expect=None)
    assert finished.exit_code not in (0, 1), finished.output
    assert "--compress int8 cannot take effect" in finished.output
    assert "codecs are for float32" in finished.output


def test_with_staleness_what_codes_have_not_said_is_in_the_checkpoint_and_taken_up(tmp_path: Path) -> None:
    """That it is said in the end is shown in contract/test_owing.py."""
    script = SCRIPT.replace("schedule=schedule, clip=unisono.Clip(norm=0.5)", "schedule=schedule")
    named = (*SERVERS, "--staleness", "inf", "--compress", "topk:0.05", "--name", "r")
    owed = []
    for workers, servers, more in ((2, "1", ("--stop-after", "16")), (1, "2", ())):
        finished = run_unisono(script, tmp_path, *named, "--servers", servers, *more, workers=workers)
        assert finished.run_dir is not None
        store = open_store(str(finished.run_dir / "checkpoints"))
        manifest = newest_good(store)
        assert manifest is not None
        names = [name for name in manifest.tensors if name.startswith("owed.")]
        tensors = [tensor for _, tensor in read_tensors(store, manifest, names)]
        owed.append((manifest.step, any(bool(tensor.any()) for tensor in tensors)))
        assert "carried-lost" not in [event.code for event in finished.events_of(events.Notice)]
    assert [event.step for event in finished.events_of(events.Resumed)] == [16]
    assert owed == [(16, True), (30, True)]
