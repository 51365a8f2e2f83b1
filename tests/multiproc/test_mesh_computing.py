# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a replica compute their parts: narrow, compiled, and without a fixed order between replicas."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from multiproc.running import Finished, run_unisono
from unisono.core import events
from unisono.core.run_dir import RunDir

SCRIPT = Path(__file__).with_name("train_decoder.py").read_text()
FLOATS = SCRIPT.replace("torch.set_default_dtype(torch.float64)", "pass")
LOUD = FLOATS.replace("return nn.functional.cross_entropy", "return 66 * nn.functional.cross_entropy")
# The gradient of what the first layer gives overflows, once, in the third step.
ONCE = (
    FLOATS.replace(
        "        return self.tokens(x) + self.positions(torch.arange(x.shape[1]))\n",
        "        out = self.tokens(x) + self.positions(torch.arange(x.shape[1]))\n"
        "        global STEP\n"
        "        if out.requires_grad and STEP == 3:\n"
        "            STEP = 0\n"
        "            out.register_hook(lambda gradient: gradient * 1e38 * 1e38)\n"
        "        return out\n",
    )
    .replace(
        "if __name__ ==",
        "STEP = 1\n\n\nclass Count(unisono.Callback):\n    def on_step(self, info):\n        global STEP\n"
        "        STEP = info.step + 1\n\n\nif __name__ ==",
    )
    .replace("        parallel=", "        callbacks=[Count()],\n        parallel=")
)
# A compiler takes its time for every kernel and every shape: no attention, no short batch, and nothing is evaluated.
SHORT = (
    SCRIPT.replace("self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), ", "self.norm2 = ")
    .replace("        x = x + self.drop(self.attention(self.norm1(x)))\n", "")
    .replace("8, 37", "8, 32")
    .replace("        eval_data=data,\n", "")
)
FOUR = ("--microbatches", "4")


def train(script: str, folder: Path, *options: str, arguments: tuple[str, ...] = (), env=None) -> Finished:
    workers = None if "--mesh" in options else 1
    return run_unisono(script, folder, *FOUR, *options, workers=workers, script_args=arguments, timeout_s=280, env=env)


def losses(finished: Finished) -> list[float]:
    return [event.loss for event in finished.events_of(events.StepFinished)]


def skipped(finished: Finished) -> list[tuple[int, str]]:
    return [(event.step, event.because) for event in finished.events_of(events.StepSkipped)]


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def alone() -> Finished:
        return train(LOUD, tmp_path_factory.mktemp("loud"), "--precision", "fp16")

    return alone


@pytest.mark.parametrize("inner", ["fsdp=2", "tp=2", "pp=2"])
def test_steps_that_overflow_fp16_are_skipped_by_all_ranks_of_all_replicas_alike(
    inner: str, tmp_path: Path, loud
) -> None:
    one, two = (train(LOUD, tmp_path, "--mesh", f"dp={dp},{inner}", "--precision", "fp16") for dp in (1, 2))
    assert one.result is not None
    assert one.result["skipped_steps"] == len(skipped(one)) > 0
    assert losses(one)
    assert skipped(one) == skipped(two)
    assert one.weights_sha256 == two.weights_sha256
    if inner != "pp=2":  # gradients of its chunks are smaller, and overflow later
        assert skipped(one) == skipped(loud())
        assert losses(one) == pytest.approx(losses(loud()), rel=0.02)


def test_a_step_is_skipped_by_all_ranks_where_the_part_of_one_overflows(tmp_path: Path) -> None:
    """Of a pipeline's two stages only the first has the bad gradient; the second would go on with another scale."""
    asked = ("--precision", "fp16")
    whole, cut = train(ONCE, tmp_path, *asked), train(ONCE, tmp_path, "--mesh", "pp=2", *asked)
    assert [step for step, _ in skipped(whole)] == [3]
    assert skipped(cut) == skipped(whole)
    assert losses(cut) == pytest.approx(losses(whole), rel=0.02)
    assert len(losses(cut)) == 5


def test_replicas_may_add_in_any_order_if_the_script_says_so(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "        clip=", "        exact=False,\n        callbacks=[Tell()],\n        clip="
    ).replace(
        "if __name__ ==",
        "class Tell(unisono.Callback):\n    def on_start(self, trainer):\n"
        "        print('added by', type(trainer._job.strategy._reducer).__name__)\n\n\nif __name__ ==",
    )
    whole, cut = train(SCRIPT, tmp_path), train(script, tmp_path, "--mesh", "dp=2,fsdp=2")
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-9)
    assert "added by BackendReducer" in cut.log()


@pytest.mark.parametrize("inner", ["fsdp=2", "tp=2", "pp=2"])
def test_compiled_blocks_of_a_cut_model_train_as_one_process_does(
    inner: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = tmp_path_factory.getbasetemp() / "compiled"  # the second run finds the code of the first
    env = {"TORCHINDUCTOR_CACHE_DIR": str(kept)}
    whole = train(SHORT, tmp_path)
    found = [train(SHORT, tmp_path, "--mesh", f"dp={dp},{inner}", "--compile", "blocks", env=env) for dp in (1, 2)]
    assert losses(found[0]) == pytest.approx(losses(whole), rel=1e-9)
    assert found[0].weights_sha256 == found[1].weights_sha256
    assert any(kept.rglob("*.py"))
    assert not [event for event in found[0].events_of(events.Notice) if event.code == "graph-breaks"]


NORMED = SCRIPT.replace(
    "class Block(nn.Module):",
    "class Norm(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.batch = nn.BatchNorm1d(WIDTH)\n\n    def forward(self, x):\n"
    "        return self.batch(x.transpose(1, 2)).transpose(1, 2)\n\n\nclass Block(nn.Module):",
).replace("nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)", "Norm(), Attention(), nn.LayerNorm(WIDTH)")


def test_batch_norm_sees_all_samples_of_a_microbatch(tmp_path: Path) -> None:
    """Of three ranks, some have none in the short batch. Running statistics are among what is compared."""
    whole = train(NORMED, tmp_path)
    found = [train(NORMED, tmp_path, "--mesh", f"dp={dp},fsdp=3") for dp in (1, 2)]
    assert losses(found[0]) == pytest.approx(losses(whole), rel=1e-9)
    assert found[0].weights_sha256 == found[1].weights_sha256
    weights = [load_file(RunDir(finished.run_dir).weights) for finished in (found[0], whole)]
    assert any("running_var" in name for name in weights[0])
    for name, value in weights[0].items():
        assert value == pytest.approx(weights[1][name], rel=1e-6, abs=1e-8), name


def test_a_buffer_that_follows_the_samples_of_one_rank_is_refused(tmp_path: Path) -> None:
    """Also where the step has one microbatch, whose buffers are nobody else's business otherwise."""
    script = SCRIPT.replace("        self.tokens, self.positions = tokens, positions\n",
        "        self.tokens, self.positions = tokens, positions\n"
        "        self.register_buffer('seen', torch.zeros(()))\n",
    ).replace("        keep_pace()\n", "        keep_pace()\n        self.seen += x.double().mean()\n")  # fmt: skip
    asked = ("--mesh", "fsdp=2", "--microbatches", "1")
    finished = run_unisono(script, tmp_path, *asked, workers=None, expect=11)
    assert "embed.seen changes in the forward pass" in finished.output
