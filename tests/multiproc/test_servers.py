# SPDX-License-Identifier: Apache-2.0
"""Parameter servers on real processes: the bits of all-reduce at staleness 0, a good result with any other staleness.

Also: checkpoints that either strategy takes up from the other, and what is said to those who ask for what cannot be.
What happens when processes die is in chaos/test_servers_chaos.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from multiproc.running import Finished, run_command, run_python, run_unisono
from multiproc.scripts import SMALL
from unisono.core import events

MODELS = Path(__file__).with_name("train_model.py")
SERVERS = ("--strategy", "ps")
ASKED = ("--microbatches", "4")
FOUR = {"UNISONO_MICROBATCHES": "4"}

# Everything that a slice must keep up with: groups with settings of their own, a layer that thaws in the middle, one
# that is never used, a schedule, a clipped norm; 77 samples in batches of 8 leave 5 for the last batch of an epoch.
SCRIPT = """
import torch
from torch import nn

import unisono

torch.manual_seed(1)
inputs = torch.randn(77, 6)
DATA = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(6, 12), nn.Linear(12, 2), nn.Linear(3, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.last(self.drop(self.first(x).tanh()))


class Thaw(unisono.Callback):
    def on_start(self, trainer):
        self.layer, self.seen = trainer.model.first, 0
        self.layer.requires_grad_(False)

    def on_step(self, info):
        self.seen += 1
        if self.seen == 7:
            self.layer.requires_grad_(True)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


torch.manual_seed(2)
model = Net()
groups = [{"params": [*model.first.parameters(), *model.unused.parameters()]},
          {"params": model.last.parameters(), "weight_decay": 0.1, "lr": 0.01}]
optimizer = torch.optim.AdamW(groups, lr=0.02)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
unisono.Trainer(
    model, optimizer, loss=nn.functional.cross_entropy, data=DATA, batch_size=8, epochs=3, eval_data=DATA,
    schedule=schedule, clip=unisono.Clip(norm=0.5), callbacks=[Thaw()],
).fit()
"""

# Four clouds of points that a small network tells apart, in 120 steps; uneven last batches.
CLOUDS = """
import torch
from torch import nn

import unisono

torch.manual_seed(3)
targets = torch.arange(330) % 4
points = torch.randn(330, 8) * 0.5 + torch.nn.functional.one_hot(targets, 8) * 2
DATA = torch.utils.data.TensorDataset(points, targets)
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
unisono.Trainer(
    model, optimizer, loss=nn.functional.cross_entropy, data=DATA, batch_size=32, epochs=11, eval_data=DATA
).fit()
"""


def losses(finished: Finished) -> list[float]:
    return [event.loss for event in finished.events_of(events.StepFinished)]


def outcome(finished: Finished) -> tuple[str, list[float], dict[str, float]]:
    assert finished.result is not None
    return finished.weights_sha256, losses(finished), finished.result["metrics"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """SCRIPT on one worker, without servers."""
    return run_python(SCRIPT, tmp_path_factory.mktemp("calm"), env=FOUR)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """CLOUDS, with everybody waiting for everybody."""
    return run_python(CLOUDS, tmp_path_factory.mktemp("calm"), env=FOUR)


# --- staleness 0


@pytest.mark.parametrize(
    ("model", "counts"), [("cnn", ((2, 1), (4, 3))), ("lm", ((1, 2), (2, 0))), ("mlp", ((1, 3), (3, 2)))]
)
def test_without_staleness_servers_give_the_bits_of_all_reduce(
    model: str, counts: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """By hash, by every step's loss, by the evaluation."""
    alone = outcome(run_python(MODELS, tmp_path, model, env=FOUR))
    for workers, servers in counts:
        asked = (*ASKED, *SERVERS, "--servers", str(servers))
        finished = run_unisono(MODELS, tmp_path, *asked, workers=workers, script_args=(model,))
        assert outcome(finished) == alone, f"{workers} workers, {servers} servers"
        (formed,) = finished.events_of(events.MembershipChanged)
        assert len(formed.members) == workers + servers
        assert [first == last for first, last in formed.ranges] == [False] * workers + [True] * servers


def test_slices_keep_up_with_layers_that_thaw_groups_schedules_and_clipping(expected: Finished, tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, *ASKED, *SERVERS, "--servers", "2", workers=2)
    assert outcome(finished) == outcome(expected)


def test_one_process_alone_is_its_own_server(expected: Finished, together: Finished, tmp_path: Path) -> None:
    assert outcome(run_python(SCRIPT, tmp_path, env=FOUR | {"UNISONO_STRATEGY": "ps"})) == outcome(expected)
    loose = {"UNISONO_STRATEGY": "ps", "UNISONO_STALENESS": "inf"}
    assert_learnt(run_python(CLOUDS, tmp_path, env=FOUR | loose), together)


# --- staleness


def assert_learnt(finished: Finished, together: Finished) -> None:
    """All steps, every sample once an epoch, a finite loss all along, and in the end about that of all together."""
    steps = finished.events_of(events.StepFinished)
    assert (steps[-1].step, steps[-1].samples) == (121, 330 * 11)
    assert all(math.isfinite(step.loss) for step in steps)
    assert finished.result is not None
    assert together.result is not None
    assert finished.result["steps"] == 121
    assert finished.result["metrics"]["loss"] < together.result["metrics"]["loss"] + 0.05
    assert steps[0].loss > 0.5, "the task is too easy to tell anything"


@pytest.mark.parametrize(
    ("staleness", "workers", "servers", "more", "read_ahead"),
    [
        ("2", 3, 1, (), False),
        ("inf", 2, 2, (), True),
        ("2", 2, 2, ("--fresh", "push"), False),
        ("inf", 3, 0, ("--fresh", "push"), False),
    ],
)
def test_with_staleness_the_loss_is_near_the_synchronous_one(
    staleness: str,
    workers: int,
    servers: int,
    more: tuple[str, ...],
    read_ahead: bool,
    together: Finished,
    tmp_path: Path,
) -> None:
    assert together.result is not None
    assert together.result["metrics"]["loss"] < 0.1
    asked = (*ASKED, *SERVERS, "--servers", str(servers), "--staleness", staleness, *more)
    text = CLOUDS.replace("data=DATA, b", "data=unisono.Data(DATA, loader_processes=1), b") if read_ahead else CLOUDS
    finished = run_unisono(text, tmp_path, *asked, workers=workers)
    assert_learnt(finished, together)
    leads = [(int(lead), count) for told in finished.events_of(events.Staleness) for lead, count in told.leads.items()]
    assert sum(count for _, count in leads) == 121 * workers, "each piece is begun once"
    assert max(lead for lead, _ in leads) <= float(staleness)
    for worker in map(str, range(workers, workers + servers)):
        spent = [step.timings[worker] for step in finished.events_of(events.StepFinished)]
        assert sum(one["communication"] for one in spent) > 5 * sum(one["compute"] for one in spent), "it only serves"
    shown = run_command(tmp_path, "show", str(finished.run_dir)).output
    made = f"{121 * workers} pushed, {121 * workers} acknowledged, {121 * workers} applied, none lost"
    assert made in shown
    assert "staleness.svg" in shown


@pytest.mark.parametrize(
    ("compress", "more"),
    [
        ("int8", ("--staleness", "2")),
        ("topk:0.05", ("--staleness", "inf", "--fresh", "push", "--servers", "2", "--copies", "2")),
    ],
)
def test_with_codes_both_ways_it_learns_too(
    compress: str, more: tuple[str, ...], together: Finished, tmp_path: Path
) -> None:
    """Wide enough for codes; with a schedule inside rounds, and weights of microbatches that are counted."""
    schedule = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50)\nunisono.Trainer("
    more_of_trainer = "eval_data=DATA, schedule=schedule, count=lambda batch: float((batch[1] + 1).sum())"
    text = CLOUDS.replace("24", "300").replace("unisono.Trainer(", schedule).replace("eval_data=DATA", more_of_trainer)
    finished = run_unisono(text, tmp_path, *ASKED, *SERVERS, "--compress", compress, *more, workers=2)
    steps = finished.events_of(events.StepFinished)
    assert (steps[-1].step, steps[-1].samples, steps[-1].lr) == (121, 330 * 11, pytest.approx(0.05 / 100))
    assert finished.result is not None
    assert together.result is not None
    assert finished.result["metrics"]["loss"] < together.result["metrics"]["loss"] + 0.05


def test_with_more_servers_than_weights_the_losses_are_still_told(tmp_path: Path) -> None:
    text = "fit(nn.Linear(4, 2, bias=False), max_steps=8)\n"
    finished = run_unisono(SMALL + text, tmp_path, *SERVERS, "--servers", "9", "--staleness", "inf", workers=1)
    assert all(0.1 < loss < 3 for loss in losses(finished)), losses(finished)


def test_with_staleness_a_step_that_is_not_finite_is_skipped_or_the_wish_refused(tmp_path: Path) -> None:
    text = """
DATA.tensors[0][5] = float("nan")
fit(on_nonfinite="skip")
"""
    finished = run_unisono(SMALL + text, tmp_path, *SERVERS, "--staleness", "1", workers=1, expect=None)
    assert finished.exit_code == 0 or "on_nonfinite" in finished.output, finished.output


# --- checkpoints


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((*SERVERS, "--servers", "2"), ("--strategy", "allreduce")),
        (("--strategy", "allreduce"), (*SERVERS, "--servers", "0")),
    ],
    ids=["servers, then all-reduce", "all-reduce, then servers"],
)
def test_a_checkpoint_of_one_strategy_is_taken_up_by_the_other(
    first: tuple[str, ...], then: tuple[str, ...], expected: Finished, tmp_path: Path
) -> None:
    """Stopped in the middle of an epoch, with momentum, a schedule and a thawed layer on the way."""
    named = (*ASKED, "--name", "r")
    stopped = run_unisono(SCRIPT, tmp_path, *named, *first, "--stop-after", "13", workers=2)
    assert losses(stopped) == losses(expected)[:13]
    resumed = run_unisono(SCRIPT, tmp_path, *named, *then, workers=2)
    assert [event.step for event in resumed.events_of(events.Resumed)] == [13]
    assert outcome(resumed) == outcome(expected)


def test_a_run_goes_on_with_waiting_and_without_from_the_same_checkpoints(together: Finished, tmp_path: Path) -> None:
    """Stopped where it was told, in the middle of a round, and with it said what that does to the bits."""
    named = (*ASKED, "--name", "r")
    loose = (*SERVERS, "--staleness", "inf", "--stop-after", "40")
    stopped = run_unisono(CLOUDS, tmp_path, *named, *loose, workers=2)
    assert stopped.result is not None
    assert stopped.result["steps"] == 40
    waited = run_unisono(CLOUDS, tmp_path, *named, "--strategy", "allreduce", "--stop-after", "80", workers=2)
    assert "staleness inf -> 0; bits depend on who was faster until here" in waited.output
    again = (*SERVERS, "--staleness", "2", "--fresh", "push", "--delayed", "scale", "--round-steps", "4")
    resumed = run_unisono(CLOUDS, tmp_path, *named, *again, workers=2)
    first, second = resumed.events_of(events.Resumed)
    assert (first.step, second.step) == (40, 80)
    assert sorted(second.differs) == [
        "delayed nothing -> scale",
        "fresh pull -> push",
        "round_steps 16 -> 4",
        "staleness 0 -> 2; from here on bits depend on who is faster",
    ]
    assert_learnt(resumed, together)
    steps = [event.step for event in resumed.events_of(events.StepFinished)]
    assert steps == [11, 22, 33, 40, *range(41, 81), 84, 88, 92, 96, 99, 103, 107, 110, 114, 118, 121]


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--servers", "1"), ["servers", "--strategy ps"]),
        (("--staleness", "2"), ["staleness", "--strategy ps"]),
        (("--strategy", "local", "--servers", "1"), ["servers", "--strategy ps"]),
        ((*SERVERS, "--staleness", "x"), ["staleness", "number of steps", "inf"]),
        ((*SERVERS, "--staleness", "-1"), ["staleness", "number of steps", "inf"]),
        ((*SERVERS, "--servers", "-1"), ["servers = -1"]),
        ((*SERVERS, "--servers", "x"), ["--servers", "integer"]),
        ((*SERVERS, "--local-servers", "2"), ["2 local servers", "--servers 2"]),
        ((*SERVERS, "--local-servers", "0"), ["--local-servers 0", "nobody can join", "--listen"]),
        (("--local-servers", "1"), ["local_servers", "--strategy ps"]),
        ((*SERVERS, "--fresh", "push"), ["with staleness 0", "--fresh"]),
        ((*SERVERS, "--staleness", "1", "--fresh", "pulled"), ["fresh", "'pull'"]),
        ((*SERVERS, "--staleness", "1", "--fresh", "push", "--delayed", "compensate"), ["--fresh pull"]),
        ((*SERVERS, "--round-steps", "4"), ["with staleness 0", "--round-steps"]),
        (("--round-steps", "4"), ["round_steps", "--strategy ps"]),
        ((*SERVERS, "--noise-every", "9"), ["noise_every 9 cannot take effect", "gradient"]),
        (("--strategy", "pss"), ["strategy", "'ps'"]),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_refused_before_anything_starts(
    options: tuple[str, ...], says: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SMALL + "fit()\n")
    finished = run_command(tmp_path, "run", "train.py", *options, expect=2)
    for text in ("UNI-1001", *says):
        assert text in finished.output, finished.output
    assert "Traceback" not in finished.output
    assert not (tmp_path / "runs").exists()


OWN_LOOP = """
loader = torch.utils.data.DataLoader(DATA, batch_size=8)
model = nn.Linear(4, 2)
unisono.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
"""


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("fit(optimizer=torch.optim.LBFGS)", (), ["LBFGS cannot run on parameter servers", "several times a step"]),
        ("fit(optimizer=torch.optim.Adafactor)", (), ["Adafactor cannot run on parameter servers", "depends on"]),
        (OWN_LOOP, ("--staleness", "1"), ["--staleness and a loop of one's own", "--staleness 0", "kvstore"]),
        ("fit()", ("--compress", "auto"), ["--strategy ps and --compress auto", "predicted", "--compress int8"]),
        ("fit()", ("--staleness", "1", "--compress", "powersgd:2"), ["powersgd:2 cannot be used", "whole matrices"]),
        ("fit(nn.Linear(4, 2).double())", ("--staleness", "1", "--compress", "int8"), ["codecs are for float32"]),
        ("fit()", ("--local-steps", "4"), ["--local-steps cannot take effect", "--strategy local"]),
    ],
    ids=["LBFGS", "Adafactor", "own loop", "auto", "low rank", "double", "local steps"],
)  # fmt: skip
def test_a_script_that_servers_cannot_run_ends_with_the_reason(
    text: str, options: tuple[str, ...], says: list[str], tmp_path: Path
) -> None:
    finished = run_unisono(SMALL + text + "\n", tmp_path, *SERVERS, *options, workers=1, expect=None)
    assert finished.exit_code not in (0, 1), finished.output
    for words in says:
        assert words in finished.output, finished.output
    assert finished.output.count("UNI-") == 1, finished.output
    assert "Traceback" not in finished.output
