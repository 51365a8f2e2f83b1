# SPDX-License-Identifier: Apache-2.0
"""What a trainer must have, on real workers: every feature gives the same bits on three workers as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import Finished, run_command, run_python, run_unisono

HEAD = """
import random, sys
import torch, unisono
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)

def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
"""


def agree(body: str, tmp_path: Path, *arguments: str, workers: int = 3, microbatches: int = 5) -> Finished:
    """Run on one process and on `workers`; fail unless weights, losses and metrics are the same."""
    script = HEAD + body
    alone = run_python(script, tmp_path, *arguments, env={"UNISONO_MICROBATCHES": str(microbatches)})
    many = run_unisono(script, tmp_path, "--microbatches", str(microbatches), workers=workers, script_args=arguments)
    assert many.result["workers"] == workers
    assert many.weights_sha256 == alone.weights_sha256
    assert [e.loss for e in many.events if e.kind == "step_finished"] == [
        e.loss for e in alone.events if e.kind == "step_finished"
    ]
    assert many.result["history"] == alone.result["history"]
    return many


KITCHEN_SINK = """
class Noisy(Dataset):
    def __init__(self): self.x, self.y = data(47)
    def __len__(self): return 47
    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(6) + 0.1 * random.random(), self.y[i]

model = mlp()
model[0].bias.requires_grad_(False)
optimizer = torch.optim.RMSprop([
    {"params": model[0].parameters(), "lr": 0.01}, {"params": model[3].parameters(), "lr": 0.02, "weight_decay": 0.01}
])
unisono.Trainer(
    model, optimizer, loss=nn.functional.cross_entropy, batch_size=13, epochs=4,
    data=unisono.Data(Noisy(), split=sys.argv[1], loader_processes=int(sys.argv[2])),
    eval_data=TensorDataset(*data(20, 1)),
    clip=unisono.Clip(norm=1.0, value=0.2), l1=1e-3, metrics={"accuracy": unisono.accuracy},
    schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), schedule_every="epoch",
    early_stop=unisono.EarlyStop(metric="loss", patience=2),
).fit()
"""


def test_blocks_augmentation_groups_frozen_parameters_clipping_l1_plateau_and_early_stop(tmp_path: Path) -> None:
    without = agree(KITCHEN_SINK, tmp_path, "blocks", "0")
    with_loaders = run_unisono(
        HEAD + KITCHEN_SINK, tmp_path, "--microbatches", "5", workers=2, script_args=("blocks", "2")
    )
    assert with_loaders.weights_sha256 == without.weights_sha256, "loader processes changed the bits"
    steps = [event for event in without.events if event.kind == "step_finished"]
    assert steps[0].grad_norm is not None
    assert steps[-1].samples == 47 * (len(steps) // 4)


def test_shuffled_samples_and_loader_processes(tmp_path: Path) -> None:
    agree(KITCHEN_SINK, tmp_path, "samples", "1")


STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(41):
            length = random.randint(2, 6)
            yield torch.randn(6) , torch.randint(3, ()), length

def masked(samples):
    inputs, targets, lengths = torch.utils.data.default_collate(samples)
    return inputs * (torch.rand_like(inputs) > 0.1), targets, lengths

def objective(model, batch):
    inputs, targets, lengths = batch
    return (nn.functional.cross_entropy(model(inputs), targets, reduction="none") * lengths).sum() / lengths.sum()

model = mlp()
unisono.Trainer(
    model, torch.optim.Adam(model.parameters(), lr=0.01), objective=objective, batch_size=12, epochs=2,
    data=unisono.Data(Stream(), loader_processes=int(sys.argv[1]), collate=masked), count=lambda batch: batch[2].sum(),
).fit()
"""


def test_an_iterable_dataset_with_token_weights_agrees_and_reads_every_sample_once(tmp_path: Path) -> None:
    hashes = set()
    for loaders in ("0", "1"):
        finished = agree(STREAM, tmp_path, loaders)
        hashes.add(finished.weights_sha256)
        assert finished.result["samples"] == 2 * 41
    assert len(hashes) == 1


NOISE = """
class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(0.01 * torch.randn_like(p))

class FirstReading(Dataset):
    file = None
    def __len__(self): return 30
    def __getitem__(self, i):
        if self.file is None: self.file = open("numbers.bin", "rb")
        self.file.seek(24 * i)
        return torch.frombuffer(bytearray(self.file.read(24)), dtype=torch.float32), i % 3

class Rows(unisono.Callback):
    def on_start(self, trainer):
        trainer.model[2].eval()  # dropout stays off, also after evaluations
        self.file = open(f"rows-{len(sys.argv)}.txt", "a")
    def on_step(self, info):
        assert not model[2].training
        print(info.step, file=self.file)

import os
data(30)[0].numpy().tofile(f"numbers-{os.getpid()}.bin")
os.replace(f"numbers-{os.getpid()}.bin", "numbers.bin")  # whole, for workers who read it already
model = mlp()
rows = Rows()
unisono.Trainer(
    model, Langevin(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy, batch_size=10, epochs=3,
    data=unisono.Data(FirstReading(), loader_processes=int(sys.argv[1])), eval_data=TensorDataset(*data(11, 1)),
    callbacks=[rows],
).fit()
"""


def test_noisy_optimizers_lazily_opened_files_and_frozen_dropout(tmp_path: Path) -> None:
    finished = agree(NOISE, tmp_path, "2")
    rows = (tmp_path / "rows-2.txt").read_text().split()
    assert sorted(map(int, rows)) == sorted([*range(1, 10)] * 4), "files that the script left open lost their end"
    assert (
        finished.weights_sha256
        == run_python(HEAD + NOISE, tmp_path, "0", env={"UNISONO_MICROBATCHES": "5"}).weights_sha256
    )


LBFGS = """
x, y = data(30)
model = nn.Linear(6, 3)
unisono.Trainer(
    model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), loss=nn.functional.cross_entropy,
    data=TensorDataset(x, y), batch_size=30, max_steps=3,
).fit()
"""


def test_an_optimizer_that_evaluates_several_times_a_step(tmp_path: Path) -> None:
    finished = agree(LBFGS, tmp_path)
    losses = [event.loss for event in finished.events if event.kind == "step_finished"]
    assert losses == sorted(losses, reverse=True)


SYNCHRONISED = """
x, y = data(40)
model = nn.Sequential(
    nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
)
unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy, data=TensorDataset(x, y),
    eval_data=TensorDataset(*data(11, 1)), batch_size=20, epochs=3, batch_norm="synchronised",
).fit()
assert not any("forward" in vars(module) for module in model.modules()), "the modules were not given back"
"""


def test_synchronised_batch_norm(tmp_path: Path) -> None:
    agree(SYNCHRONISED, tmp_path)


CHANGES = """
class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
    def forward(self, x): return self.a(x) if x[0, 0] > 0 else self.b(x)

class Thaw(unisono.Callback):
    def on_start(self, trainer): self.trainer = trainer
    def on_step(self, info):
        if info.step == 3: model.a.requires_grad_(False)
        if info.step == 5: model.a.requires_grad_(True)
        if info.step == 8 and (len(sys.argv) == 1 or not info.is_first_worker): self.trainer.stop()

x, y = data(40)
model = Branch()
unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy, data=TensorDataset(x, y),
    batch_size=10, epochs=9, callbacks=[Thaw()],
).fit()
"""


def test_freezing_thawing_silent_parameters_and_a_stop_asked_by_one_worker(tmp_path: Path) -> None:
    finished = agree(CHANGES, tmp_path)
    assert finished.result["steps"] == 9, "asked during step 8's report, carried by step 9, stopped after it"
    assert finished.result["stopped_early"] == "the script asked to stop"
    notices = [event.text for event in finished.events if event.kind == "notice"]
    assert len([text for text in notices if "a.weight" in text and "no gradient" in text]) == 1
    assert "unused" not in "".join(notices)
    by_another = run_unisono(HEAD + CHANGES, tmp_path, "--microbatches", "5", workers=2, script_args=("others",))
    assert by_another.weights_sha256 == finished.weights_sha256


OWN_LOOP = """
class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(4), nn.Linear(16, 3)
    def forward(self, x):
        x = self.norm(self.a(x).view(-1, 4, 4)).flatten(1)
        return self.b(nn.functional.dropout(x, 0.2, self.training))

train_set = TensorDataset(*data(32))
model = WithNorm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
if sys.argv[1] == "trainer":
    unisono.Trainer(
        model, optimizer, loss=nn.functional.cross_entropy, data=train_set, batch_size=15, epochs=2, schedule=schedule
    ).fit()
else:
    run, loader = unisono.attach(model, optimizer, DataLoader(train_set, batch_size=15, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            run.backward(nn.functional.cross_entropy(model(x), y))
            if run.step():
                schedule.step()
    run.finish()
"""


def test_an_own_loop_gives_the_bits_of_the_trainer(tmp_path: Path) -> None:
    """32 samples in batches of 15: the last step has two, so that some workers have none and yet step along."""
    own = agree(OWN_LOOP, tmp_path, "own")
    trainer = run_python(HEAD + OWN_LOOP, tmp_path, "trainer", env={"UNISONO_MICROBATCHES": "5"})
    assert own.weights_sha256 == trainer.weights_sha256
    assert own.result["steps"] == trainer.result["steps"] == 6


HALF = """
train_set = TensorDataset(*data(32))
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run, loader = unisono.attach(model, optimizer, DataLoader(train_set, batch_size=16, shuffle=True))
for x, y in loader:
    run.backward(nn.functional.cross_entropy(model(x), y))
    if run.step() == (sys.argv[1] == "after a step"):
        break
run.finish()
"""


def test_an_own_loop_may_be_left_after_a_step_and_not_within_one(tmp_path: Path) -> None:
    left = run_python(HEAD + HALF, tmp_path, "after a step")
    assert left.result["steps"] == 1
    refused = run_python(HEAD + HALF, tmp_path, "within one", expect=1)
    assert "in the middle of step 1" in refused.output
    assert "UNI-1201" in run_command(tmp_path, "show", str(refused.run_dir)).output


FOREIGN = """
model, scale = mlp(), nn.Parameter(torch.ones(()))
unisono.Trainer(
    model, torch.optim.SGD([*model.parameters(), scale], lr=0.1), data=TensorDataset(*data(32)), batch_size=16,
    epochs=1,
    loss=lambda out, y: nn.functional.cross_entropy(out * scale, y),
).fit()
"""


def test_parameters_that_are_not_in_the_model_are_refused(tmp_path: Path) -> None:
    assert "not in the model" in run_unisono(HEAD + FOREIGN, tmp_path, expect=11).output


DISAGREE = """
from unisono.train.context import current
model = mlp()
options = {"batch_size": 16, "max_steps": 4, "lr": 0.1}
options[sys.argv[1]] *= 1 + current().worker
unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=options.pop("lr")), loss=nn.functional.cross_entropy,
    data=TensorDataset(*data(64)), **options,
).fit()
"""


@pytest.mark.parametrize(("option", "named"), [("max_steps", "max_steps"), ("lr", "optimizer settings")])
def test_workers_that_were_set_up_differently_are_told_apart_at_once(option: str, named: str, tmp_path: Path) -> None:
    finished = run_unisono(HEAD + DISAGREE, tmp_path, script_args=(option,), expect=13, timeout_s=40)
    assert f"worker 1 was set up with another {named} than worker 0" in finished.output


def test_the_environment_gives_defaults_and_bad_values_in_it_are_refused(tmp_path: Path) -> None:
    asked = {"UNISONO_MICROBATCHES": "6", "UNISONO_SEED": "5"}
    finished = run_unisono(HEAD + INEXACT, tmp_path, script_args=("exact",), env=asked)
    assert finished.result["microbatches"] == 6
    assert run_python(HEAD + INEXACT, tmp_path, "exact", env=asked).weights_sha256 == finished.weights_sha256
    for variable in ("UNISONO_SEED", "UNISONO_THREADS"):
        refused = run_unisono(HEAD + INEXACT, tmp_path, script_args=("exact",), env={variable: "many"}, expect=2)
        assert "many" in refused.output
        assert "environment" in refused.output


INEXACT = """
x, y = data(48)
model = nn.Linear(6, 3)
unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy, data=TensorDataset(x, y),
    eval_data=TensorDataset(x, y), batch_size=24, epochs=3, exact=sys.argv[1] == "exact",
).fit()
"""


def test_without_exactness_the_result_is_close_and_says_so(tmp_path: Path) -> None:
    exact = run_unisono(HEAD + INEXACT, tmp_path, workers=3, script_args=("exact",))
    loose = run_unisono(HEAD + INEXACT, tmp_path, workers=3, script_args=("loose",))
    assert loose.result["metrics"]["loss"] == pytest.approx(exact.result["metrics"]["loss"], rel=1e-4)
    assert "not exact" in loose.output
    assert "not exact" not in exact.output
