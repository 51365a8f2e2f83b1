# SPDX-License-Identifier: Apache-2.0
"""Replicas of several ranks on real processes: the training of one process, the same bits for any number of them.

The last batch of an epoch has 5 samples in 4 microbatches, so shares are uneven and some ranks have nothing to do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from multiproc.running import Finished, run_python, run_unisono
from unisono.core import events
from unisono.core.mesh import parse_mesh
from unisono.core.run_dir import RunDir

SCRIPT = Path(__file__).with_name("train_decoder.py")
TOLERANCE = 1e-9  # of losses in float64, after 6 steps
FOUR = ("--microbatches", "4")


def train(folder: Path, mesh: str, *arguments: str, options: tuple[str, ...] = (), expect: int = 0) -> Finished:
    asked = ("--mesh", mesh, *FOUR, *options)
    return run_unisono(SCRIPT, folder, *asked, workers=None, script_args=arguments, timeout_s=120, expect=expect)


def losses(finished: Finished) -> list[float]:
    return [event.loss for event in finished.events_of(events.StepFinished)]


def norms(finished: Finished) -> list[float]:
    return [event.grad_norm or 0.0 for event in finished.events_of(events.StepFinished)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def of(*arguments: str) -> Finished:
        return run_unisono(SCRIPT, tmp_path_factory.mktemp("alone"), *FOUR, workers=1, script_args=arguments)

    return of


@pytest.mark.parametrize(
    ("mesh", "arguments"),
    [
        ("fsdp=2", ()),
        ("fsdp=3", ("tied", "unit='layer'")),
        ("fsdp=2", ("zero=1",)),
        ("fsdp=2", ("zero=2", "meta")),
        ("tp=2", ()),
        ("tp=2", ("sequence=True", "loss=True")),
        ("tp=4", ("tied",)),
        ("pp=2", ()),
        ("pp=2", ("tied", "meta", "schedule='gpipe'")),
        ("pp=2", ("schedule='interleaved'",)),
        ("pp=3", ("boundaries=('blocks.1', 'norm')", "chunks=4")),
        ("pp=2", ("untold", "boundaries=('blocks.2',)")),
        ("fsdp=2", ("fused",)),
        ("tp=2", ("fused",)),
        ("fsdp=2,tp=2", ("fused", "as-loss")),
        ("fsdp=2", ("counted",)),
        ("pp=2", ("counted",)),
        ("dp=2,fsdp=2", ()),
        ("dp=2,tp=2", ("meta",)),
        ("dp=2,pp=2", ("schedule='zero-bubble'", "meta")),
        ("fsdp=2,tp=2", ("tied", "meta")),
        ("fsdp=2,tp=2", ("tied", "sequence=True", "loss=True")),
        ("fsdp=2,pp=2", ("tied", "counted", "uneven")),
        ("dp=2,fsdp=2,tp=2", ("unit='layer'",)),
        ("dp=2,pp=2,tp=2", ("tied", "meta", "sequence=True")),
    ],
    ids=str,
)
def test_every_mesh_trains_like_one_process(mesh: str, arguments: tuple[str, ...], tmp_path: Path, alone) -> None:
    whole = alone(*(word for word in arguments if word in ("tied", "meta", "fused", "counted", "uneven")))
    cut = train(tmp_path, mesh, *arguments)
    assert losses(cut) == pytest.approx(losses(whole), rel=TOLERANCE)
    assert norms(cut) == pytest.approx(norms(whole), rel=TOLERANCE)
    assert cut.result["metrics"] == pytest.approx(whole.result["metrics"], rel=TOLERANCE)
    weights = [load_file(RunDir(finished.run_dir).weights) for finished in (cut, whole)]
    assert list(weights[0]) == list(weights[1])
    for name, value in weights[0].items():
        assert value == pytest.approx(weights[1][name], rel=1e-6, abs=1e-8), name
    assert_the_pipeline_was_told(cut, mesh)


def assert_the_pipeline_was_told(finished: Finished, mesh: str) -> None:
    """Once, with a picture: after the third step, which is short, the next full one."""
    stages, told = parse_mesh(mesh).pp, finished.events_of(events.StagesTimed)
    assert finished.run_dir is not None
    picture = RunDir(finished.run_dir).pipeline
    assert picture.exists() == (stages > 1)
    assert [(event.step, len(event.bubbles)) for event in told] == ([(4, stages)] if stages > 1 else [])
    if told:
        assert all(0 <= bubble < 1 for bubble in told[0].bubbles)
        assert f"measured: {told[0].schedule}" in picture.read_text()


@pytest.mark.parametrize(
    ("inner", "replicas"),
    [
        ("fsdp=2", (1, 2, 3)),
        ("tp=2", (1, 2, 3)),
        ("pp=2", (1, 2, 3)),
        ("fsdp=2,tp=2", (1, 2)),
        ("pp=2,tp=2", (1, 2)),
    ],
)
def test_the_number_of_replicas_does_not_show_in_the_bits(
    inner: str, replicas: tuple[int, ...], tmp_path: Path
) -> None:
    """With dropout, which belongs to the microbatch, whoever computes it."""
    found = {dp: train(tmp_path, f"dp={dp},{inner}", "dropout").weights_sha256 for dp in replicas}
    assert len(set(found.values())) == 1, found


def test_a_step_of_one_microbatch_is_the_same_training(tmp_path: Path) -> None:
    """Its gradients stay where torch has put them."""
    one = ("--microbatches", "1")
    whole = run_unisono(SCRIPT, tmp_path, *one, workers=1)
    cut = run_unisono(SCRIPT, tmp_path, "--mesh", "fsdp=2", *one, workers=None)
    assert losses(cut) == pytest.approx(losses(whole), rel=TOLERANCE)
    assert norms(cut) == pytest.approx(norms(whole), rel=TOLERANCE)


def test_zero_stages_are_the_same_training(tmp_path: Path) -> None:
    found = {stage: train(tmp_path, "fsdp=2", options=("--zero", str(stage))).weights_sha256 for stage in (1, 2, 3)}
    assert len(set(found.values())) == 1, found


def test_a_pipeline_is_cut_by_measured_times_and_there_again_when_the_run_goes_on(tmp_path: Path, alone) -> None:
    """The first layer is slow while that is measured, and not when the run goes on."""
    (tmp_path / "pace").write_text("0.03")
    told = "stages begin at blocks.0, by measured times"
    asked, options = ("slow", "cost='time'"), ("--name", "measured")
    first = train(tmp_path, "pp=2", *asked, options=(*options, "--stop-after", "3"))
    assert told in first.output
    (tmp_path / "pace").unlink()
    second = train(tmp_path, "pp=2", *asked, options=options)
    assert told in second.output
    assert "measured_stages" not in second.output, "nothing has changed"
    assert losses(second) == pytest.approx(losses(alone()), rel=TOLERANCE)


def test_parts_that_lie_in_the_hosts_memory_are_the_same_training(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace(
        "import unisono\n",
        "import unisono\nfrom unisono.parallel import sharded\n\n\n"
        "def told(module, *, shard=sharded.fully_shard, **options):\n"
        "    print('cut', type(module).__name__, type(options.get('offload_policy')).__name__)\n"
        "    return shard(module, **options)\n\n\n"
        "sharded.fully_shard = told\n",
        1,
    )
    asked = ("--mesh", "fsdp=2", *FOUR)
    there, here = (run_unisono(script, tmp_path, *asked, *how, workers=None) for how in (("--offload",), ()))
    assert losses(there) == losses(here)
    assert there.weights_sha256 == here.weights_sha256
    assert "cut Root CPUOffloadPolicy" in there.log()
    assert "CPUOffloadPolicy" not in here.log()


@pytest.mark.parametrize(
    ("mesh", "arguments", "words"),
    [
        ("tp=3", (), ("cannot be cut into 3 equal parts", "take tp = 1, 2, 4")),
        ("pp=8", ("schedule='gpipe'",), ("8 stages", "7 layers")),
        ("fsdp=8", (), ("8 ranks share a microbatch of 4 samples",)),
        ("pp=2", ("schedule='fastest'",), ("fastest",)),
        ("pp=2", ("cost='money'",), ("money", "time, operations, parameters")),
        ("pp=2", ("cost='time'", "meta"), ("on the meta device cannot be timed",)),
        ("fsdp=2", ("unit='matrix'",), ("'matrix'", "block, layer")),
        ("tp=2", ("plan={'no.such': 'rows'}",), ("no.such",)),
        ("pp=2", ("fused",), ("--mesh pp=2 and objective",)),
        ("pp=2", ("fused", "as-loss"), ("--mesh pp=2 and a loss with weights",)),
        ("pp=2,tp=2", ("untold", "boundaries=('blocks.2',)"), ("traced", "pipeline_layers()")),
    ],
)
def test_what_cannot_be_is_said_before_the_first_step(
    mesh: str, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    finished = train(tmp_path, mesh, *arguments, expect=11)
    assert all(word in finished.output for word in words), finished.output
    assert not losses(finished)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp=2", ("--compile", "whole")),
        ("fsdp=2", ("--strategy", "ps")),
        ("fsdp=2", ("--compress", "int8")),
        ("fsdp=2", ("--compress", "auto")),
    ],
)
def test_what_has_not_been_made_to_go_together_is_refused(mesh: str, options: tuple[str, str], tmp_path: Path) -> None:
    finished = train(tmp_path, mesh, options=options, expect=11)
    assert f"--mesh {mesh} and" in finished.output
    assert options[1] in finished.output
    assert not losses(finished)


@pytest.mark.parametrize(
    ("mesh", "how", "arguments"),
    [
        ("fsdp=2", "full", ()),
        ("fsdp=2", "selective", ()),
        ("tp=2", "full", ("sequence=True",)),
        ("tp=2", "selective", ("dropout",)),
        ("pp=2", "selective", ()),
        ("fsdp=2,pp=2", "full", ("schedule='interleaved'",)),
    ],
)
def test_recomputed_blocks_of_a_cut_model_change_nothing(
    mesh: str, how: str, arguments: tuple[str, ...], tmp_path: Path, alone
) -> None:
    whole = alone(*(word for word in arguments if word == "dropout"))
    cut = train(tmp_path, mesh, *arguments, options=("--recompute", how))
    assert losses(cut) == pytest.approx(losses(whole), rel=TOLERANCE)


def test_a_traced_pipeline_calls_no_blocks_and_recomputes_all_between_its_boundaries(tmp_path: Path, alone) -> None:
    script = SCRIPT.read_text().replace(
        "import unisono\n",
        "import unisono\nimport unisono.train.recomputing as recomputing\n\n\n"
        "def told(inner, *args, checkpoint=recomputing.checkpoint, **kwargs):\n"
        "    print('to be recomputed:', type(inner.args[0]).__name__)\n"
        "    return checkpoint(inner, *args, **kwargs)\n\n\n"
        "recomputing.checkpoint = told\n",
        1,
    )
    asked = ("--mesh", "pp=2", *FOUR, "--recompute", "full")
    cut = run_unisono(script, tmp_path, *asked, workers=None, script_args=("untold", "boundaries=('blocks.2',)"))
    assert losses(cut) == pytest.approx(losses(alone()), rel=TOLERANCE)
    assert "to be recomputed: GraphModule" in cut.log()
    assert "to be recomputed: Block" not in cut.log()


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2,tp=2", "pp=2"])
def test_bf16_on_a_mesh_learns_as_on_one_process(mesh: str, tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace("torch.set_default_dtype(torch.float64)", "pass")
    asked = (*FOUR, "--precision", "bf16")
    whole = run_unisono(script, tmp_path, *asked, workers=1)
    cut = run_unisono(script, tmp_path, "--mesh", mesh, *asked, workers=None)
    assert losses(cut) == pytest.approx(losses(whole), rel=0.02)


def test_a_mesh_needs_the_command(tmp_path: Path) -> None:
    finished = run_python(SCRIPT, tmp_path, env={"UNISONO_MESH": "fsdp=2"}, expect=None)
    assert finished.exit_code
    assert "unisono run" in finished.output
    assert "--mesh fsdp=2" in finished.output
