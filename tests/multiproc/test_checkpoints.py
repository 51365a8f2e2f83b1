# SPDX-License-Identifier: Apache-2.0
"""Saving and going on, as a user meets it: what is saved, what must be as it was, and what is said when it is not."""

from __future__ import annotations

import signal
from pathlib import Path

from multiproc.running import Finished, run_command, run_python, run_unisono
from multiproc.scripts import SMALL
from unisono.core import events

# Ends the whole run, once, at the step that the file "die" names.
MORTAL = (
    SMALL
    + """
import signal


def die(step):
    time.sleep(0.05)
    if Path("die").exists() and step == int(Path("die").read_text()):
        if WORKER == 0:
            Path("die").unlink()
            os.kill(os.getppid() if os.environ.get("UNISONO_RUN") else os.getpid(), signal.SIGKILL)
        time.sleep(60)


"""
)
NAMED = ("--name", "r", "--checkpoint-every", "2")


def killed_at(step: int, script: str, folder: Path, *options: str, workers: int = 2) -> None:
    (folder / "die").write_text(str(step))
    run_unisono(script, folder, *NAMED, *options, workers=workers, expect=-signal.SIGKILL)


def saved(finished: Finished) -> list[int]:
    return [event.step for event in finished.events_of(events.CheckpointSaved)]


def test_a_save_asked_for_by_one_worker_happens_on_all_and_own_state_comes_back(tmp_path: Path) -> None:
    script = """
class Counter:
    def __init__(self):
        self.value, self.history = 0, torch.zeros(3)

    def state_dict(self):
        return {"value": self.value, "history": self.history}

    def load_state_dict(self, state):
        self.value, self.history = state["value"], state["history"]


counter, model = Counter(), nn.Linear(4, 2)


def count(step):
    counter.value += step
    counter.history[step % 3] += step
    if WORKER == 1 and step == 3:
        trainer.save()
    die(step)
    if step == 8 and WORKER == 0:
        print("COUNTED", counter.value, counter.history.tolist())


trainer = unisono.Trainer(
    model, torch.optim.Adam(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy, data=DATA, batch_size=8,
    max_steps=8, callbacks=[Every(count)], state={"counter": counter},
)
trainer.fit()
"""
    calm = run_unisono(MORTAL + script, tmp_path, workers=1)
    rare = ("--name", "r", "--checkpoint-every", "never")
    (tmp_path / "die").write_text("6")
    run_unisono(MORTAL + script, tmp_path, *rare, expect=-signal.SIGKILL)
    finished = run_unisono(MORTAL + script, tmp_path, *rare, workers=3)
    assert saved(finished) == [4], "after the step that carries the wish to all; and none at the end: never is never"
    assert [event.step for event in finished.events_of(events.Resumed)] == [4]
    assert finished.weights_sha256 == calm.weights_sha256
    assert "COUNTED 36 [9.0, 12.0, 15.0]" in calm.log()
    assert "COUNTED 36 [9.0, 12.0, 15.0]" in finished.log()


def test_what_decides_the_bits_must_be_as_it_was_and_what_differs_is_named(tmp_path: Path) -> None:
    script = """
import sys

HIDDEN, BATCH = (Path("settings").read_text() if Path("settings").exists() else "3 8").split()
model = nn.Sequential(nn.Linear(4, int(HIDDEN)), nn.Linear(int(HIDDEN), 2))
fit(model, batch_size=int(BATCH), callbacks=[Every(die)], max_steps=6)
"""
    script = MORTAL + script
    calm = run_unisono(script, tmp_path, workers=1)
    killed_at(5, script, tmp_path)
    refused = run_unisono(script, tmp_path, *NAMED, "--seed", "3", expect=2).output
    assert "runs/r holds another training" in refused
    assert "seed None -> 3" in refused
    (tmp_path / "settings").write_text("5 8")
    refused = run_unisono(script, tmp_path, *NAMED, expect=32).output
    assert "UNI-3022" in refused
    assert "model.0.weight has the shape [5, 4] here and [3, 4] in the checkpoint" in refused
    (tmp_path / "settings").write_text("3 16")
    refused = run_unisono(script, tmp_path, *NAMED, expect=32).output
    assert "batch_size 8 -> 16" in refused
    assert "--resume force" in refused
    forced = run_unisono(script, tmp_path, *NAMED, "--resume", "force")
    assert "not as before: batch_size 8 -> 16" in forced.output
    (tmp_path / "settings").unlink()
    never = run_unisono(script, tmp_path, *NAMED, "--resume", "never", expect=2).output
    assert "already holds a run" in never
    assert calm.weights_sha256 != forced.weights_sha256


def test_a_finished_run_may_be_given_more_and_is_told_apart_from_one_that_runs(tmp_path: Path) -> None:
    script = MORTAL + "fit(max_steps=int(Path('steps').read_text()), callbacks=[Every(die)])\n"
    (tmp_path / "steps").write_text("9")
    calm = run_unisono(script, tmp_path, workers=1)
    (tmp_path / "steps").write_text("5")
    first = run_unisono(script, tmp_path, *NAMED)
    assert (saved(first)[0], saved(first)[-1]) == (2, 5)
    again = run_command(tmp_path, "resume", "r", "--workers", "1")
    assert first.weights_sha256 in again.output
    (tmp_path / "steps").write_text("9")
    more = run_unisono(script, tmp_path, *NAMED, workers=3)
    assert "not as before: max_steps 5 -> 9" in more.output
    assert more.weights_sha256 == calm.weights_sha256
    assert [event.step for event in more.events_of(events.StepFinished)] == list(range(1, 10))
    shown = run_command(tmp_path, "show", "r").output
    assert "finished" in shown
    assert more.weights_sha256 in shown.replace("\n", "")


def test_a_run_that_was_wanted_back_goes_on_inside_its_epoch(tmp_path: Path) -> None:
    """Stopped after the third of four steps; with evaluations, which must be those of a run that was not."""
    script = (
        MORTAL
        + """
def leave(step):
    die(step)
    if Path("leave").exists() and step == 6 and WORKER == 0:
        Path("leave").unlink()
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1)


fit(max_steps=None, epochs=3, eval_data=DATA, callbacks=[Every(leave)], optimizer=torch.optim.Adam)
"""
    )
    calm = run_unisono(script, tmp_path, workers=1)
    (tmp_path / "leave").touch()
    stopped = run_unisono(script, tmp_path, *NAMED, expect=75)
    assert "go on   unisono resume r  (from step " in stopped.output
    assert stopped.result is not None
    assert 6 <= stopped.result["steps"] < 12
    finished = run_unisono(script, tmp_path, *NAMED, workers=3)
    assert finished.weights_sha256 == calm.weights_sha256
    assert finished.result is not None
    assert calm.result is not None
    assert finished.result["history"] == calm.result["history"]
    assert [event.step for event in finished.events_of(events.StepFinished)] == list(range(1, 13))


def test_own_loops_and_plain_python_go_on_too(tmp_path: Path) -> None:
    own = """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
loader = torch.utils.data.DataLoader(DATA, batch_size=8, shuffle=True)
run, loader = unisono.attach(model, optimizer, loader, travels={"schedule": schedule})
done = 0
for epoch in range(3):
    for inputs, labels in loader:
        run.backward(nn.functional.cross_entropy(model(inputs), labels))
        if run.step():
            schedule.step()
            die(run.state.step)
run.finish()
"""
    calm = run_unisono(MORTAL + own, tmp_path, workers=1)
    killed_at(7, MORTAL + own, tmp_path)
    finished = run_unisono(MORTAL + own, tmp_path, *NAMED, workers=3)
    assert next(event.step for event in finished.events_of(events.Resumed)) in (4, 5, 6)
    assert finished.weights_sha256 == calm.weights_sha256

    alone = MORTAL + "fit(max_steps=9, callbacks=[Every(die)], optimizer=torch.optim.Adam)\n"
    expected = run_python(alone, tmp_path).weights_sha256
    (tmp_path / "die").write_text("6")
    env = {"UNISONO_RUN_DIR": "alone", "UNISONO_CHECKPOINT_EVERY": "2"}
    run_python(alone, tmp_path, env=env, expect=-signal.SIGKILL)
    assert run_python(alone, tmp_path, env=env).weights_sha256 == expected
