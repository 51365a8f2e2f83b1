# SPDX-License-Identifier: Apache-2.0
"""Which module is cut how: decided from names, sizes and structure alone, without any process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tensor_models import GPT2, LENGTH, VOCABULARY, WIDTH, Decoder, GPT2Attention, Llama, Plain, Translator
from unisono.core.errors import SetupError
from unisono.parallel.tensor_plan import Cut, plan_for
from unisono.parallel.tensor_sequence import check_length


def cuts(model: nn.Module, ways: int = 2, own: dict[str, str] | None = None) -> dict[str, str]:
    return {name: sharding.how for name, sharding in plan_for(model, ways, own).sharded.items()}


def refusal(model: nn.Module, ways: int, own: dict[str, str] | None = None) -> str:
    with pytest.raises(SetupError) as caught:
        plan_for(model, ways, own)
    return str(caught.value)


def test_a_llama_is_cut_everywhere_but_in_its_norms() -> None:
    plan = plan_for(Llama(), 4)
    layer = {f"layers.0.self_attn.{n}_proj": "columns" for n in "qkv"} | {"layers.0.self_attn.o_proj": "rows"}
    layer |= {"layers.0.mlp.gate_proj": "columns", "layers.0.mlp.up_proj": "columns", "layers.0.mlp.down_proj": "rows"}
    other = {name.replace(".0.", ".1."): how for name, how in layer.items()}
    assert cuts(Llama(), 4) == layer | other | {"embed_tokens": "rows", "lm_head": "columns"}
    assert set(plan.whole) == {
        "norm",
        *(f"layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")),
    }
    assert plan.numbers == {}
    assert plan.head == "lm_head"
    assert plan.stacks == (("layers.0", "layers.1"),)
    assert not plan.no_sequence


def test_a_gpt_has_its_fused_matrix_cut_by_heads_and_the_numbers_it_reshapes_by() -> None:
    plan = plan_for(GPT2(), 2)
    assert plan.cuts["h.0.attn.c_attn.weight"] == Cut(1, 3)
    assert plan.cuts["h.0.attn.c_attn.bias"] == Cut(0, 3)
    assert plan.cuts["h.0.attn.c_proj.weight"] == Cut(0)
    assert "h.0.attn.c_proj.bias" not in plan.cuts
    assert {n.removeprefix("h.0."): v for n, v in plan.numbers.items() if n.startswith("h.0.")} == {
        "attn.num_heads": 2,
        "attn.split_size": 16,
        "attn.c_attn.nf": 48,
        "mlp.c_fc.nf": 64,
    }
    assert plan.whole["wpe"] == "embeddings of positions and kinds are small"
    assert plan.cuts["wte.weight"] == plan.cuts["lm_head.weight"] == Cut(0)


@pytest.mark.parametrize("build", [Decoder, Translator])
def test_attention_of_torch_itself_is_cut_by_heads_under_its_own_names(build: type[nn.Module]) -> None:
    plan = plan_for(build(), 2)
    attentions = [name for name, module in build().named_modules() if isinstance(module, nn.MultiheadAttention)]
    assert attentions
    for name in attentions:
        assert plan.cuts[f"{name}.in_proj_weight"] == plan.cuts[f"{name}.in_proj_bias"] == Cut(0, 3)
        assert plan.cuts[f"{name}.out_proj.weight"] == Cut(1)
        assert f"{name}.out_proj.bias" not in plan.cuts
    assert not plan.no_sequence


def test_the_plan_of_a_model_on_the_meta_device_is_the_same() -> None:
    with torch.device("meta"):
        model = GPT2()
    assert plan_for(model, 2) == plan_for(GPT2(), 2)


def test_a_table_for_people_has_layers_of_one_kind_in_one_line() -> None:
    lines = plan_for(Llama(), 2).describe().splitlines()
    assert [line.split(maxsplit=3) for line in lines if "up_proj" in line] == [
        ["layers.*.mlp.up_proj", "2", "x", "columns, 1/2 on each rank"]
    ]
    assert any(line.startswith("norm ") and "a norm is small" in line for line in lines)


@pytest.mark.parametrize(
    ("model", "ways", "says"),
    [
        (Llama(heads=8, kv_heads=2), 4, "layers.*.self_attn.o_proj: 2 key and value heads / 4 ranks = 0.5 a rank"),
        (Llama(heads=4, kv_heads=4), 8, "layers.*.self_attn.o_proj: 4 heads / 8 ranks = 0.5 a rank (2 times)"),
        (Llama(hidden=66), 4, "layers.*.mlp.down_proj: 66 features / 4 ranks = 16.5 a rank (2 times)"),
        (Llama(hidden=66), 4, "take tp = 1, 2, which divides everything"),
        (Llama(hidden=66), 4, "{'layers.*.mlp.down_proj': 'whole'}"),
        (Decoder(), 3, "4 heads / 3 ranks = 1.33333 a rank"),
        (nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 2)), 2, "33 features / 2 ranks = 16.5 a rank"),
        (Llama(), 0, "a model cannot be cut into 0"),
    ],
)
def test_what_does_not_divide_is_said_with_its_arithmetic(model: nn.Module, ways: int, says: str) -> None:
    assert says in refusal(model, ways)


def test_the_cure_that_the_message_names_works() -> None:
    plan = plan_for(Llama(hidden=66), 4, {"layers.*.mlp.down_proj": "whole"})
    assert plan.whole["layers.0.mlp.down_proj"] == "your plan says so"
    assert plan.whole["layers.0.mlp.up_proj"] == "your plan decides on other layers of 'layers.0.mlp'"
    assert plan.sharded["layers.0.self_attn.q_proj"].how == "columns"


def test_a_vocabulary_that_does_not_divide_stays_whole_and_is_named() -> None:
    plan = plan_for(GPT2(vocabulary=65), 2)
    assert plan.whole["lm_head"] == "its 65 features are no multiple of 2: 65 / 2 = 32.5"
    assert plan.whole["wte"] == "its weight is also that of 'lm_head', which stays whole"
    with pytest.raises(SetupError, match="parts of the vocabulary"):
        plan.require(sequence=False, loss=True)


class DividesItsInput(GPT2Attention):
    def forward(self, x: Tensor) -> Tensor:
        width = x.size(-1)
        return x.view(*x.shape[:-1], self.num_heads, width // self.num_heads)


class Nameless(nn.Module):
    def __init__(self, **numbers: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        vars(self).update(numbers)


class WithBias(Nameless):
    def __init__(self) -> None:
        super().__init__(num_heads=4)
        self.relative_attention_bias = nn.Embedding(8, 4)


class WithWideNorm(Nameless):
    def __init__(self) -> None:
        super().__init__(num_heads=4)
        self.q_norm = nn.LayerNorm(WIDTH)


class Interleaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)


class TiedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x).to(self.up.weight.dtype)  # asking for its type is not reading it
        return self.down(self.up(x)) @ self.words.weight.T


def test_a_weight_that_another_module_reads_itself_cannot_be_cut_by_your_plan_either() -> None:
    assert plan_for(TiedByHand(), 2).sharded.keys() == {"up", "down"}
    assert "whose weight the forward of 'the model' reads itself" in refusal(TiedByHand(), 2, {"words": "rows"})


@pytest.mark.parametrize(
    ("model", "layer", "why"),
    [
        (DividesItsInput(4, 0.0), "c_attn", "divides a width that it reads from its input by self.num_heads"),
        (Nameless(), "q_proj", "neither n_heads nor head_dim"),
        (Nameless(num_heads=5), "q_proj", "its number of heads cannot be known: it has num_heads = 5"),
        (Nameless(num_heads=4, head_dim=4), "q_proj", "num_heads = 4 is neither its 8 query heads nor its 8 key heads"),
        (WithBias(), "o_proj", "'relative_attention_bias' may belong to single heads"),
        (WithWideNorm(), "q_proj", "'q_norm' is a norm over all heads together"),
        (TiedByHand(), "words", "the forward of 'the model' reads its weight itself"),
        (Interleaved(), "query_key_value", "models differ in the order"),
        (nn.MultiheadAttention(8, 2, add_zero_attn=True), "out_proj", "add a key that no single head owns"),
        (nn.ModuleDict({"only": nn.Linear(4, 4)}), "only", "nothing says what follows it"),
        (nn.Sequential(nn.LSTM(4, 4)), "0", "LSTM cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_named_with_the_reason(model: nn.Module, layer: str, why: str) -> None:
    plan = plan_for(model, 2)
    assert why in plan.whole[layer]
    assert layer not in plan.sharded


def test_an_own_plan_pairs_columns_and_rows_wherever_they_are() -> None:
    model = nn.ModuleDict({"grow": nn.Linear(4, 8), "inner": nn.ModuleDict({"shrink": nn.Linear(8, 4)})})
    plan = plan_for(model, 2, {"grow": "columns", "*.shrink": "rows"})
    assert [(unit.name, unit.columns, unit.rows) for unit in plan.units] == [("", ("grow",), "inner.shrink")]
    assert not plan.sharded["grow"].alone


def test_an_own_attention_has_its_heads_counted() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads, self.n_kv_heads = 4, 2
            self.ask, self.answer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.keep, self.tell = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    own = {"ask": "columns", "keep": "columns", "tell": "columns", "answer": "rows"}
    assert plan_for(Mine(), 2, own).numbers == {"n_heads": 2, "n_kv_heads": 1}
    assert "2 key and value heads / 4 ranks" in refusal(Mine(), 4, own)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"layers.*.mpl": "whole"}, "matches no module"),
        ({"lm_haed": "whole"}, "did you mean 'lm_head'?"),
        ({"lm_head": "colums"}, "did you mean 'columns'?"),
        ({"layers.*.mlp": "columns"}, "it matches 2 modules of kind LlamaMLP"),
    ],
)
def test_a_pattern_without_effect_is_an_error(own: dict[str, str], says: str) -> None:
    assert says in refusal(Llama(), 2, own)


def test_a_tied_weight_cannot_be_cut_two_ways() -> None:
    assert "whose weight is also that of 'lm_head'" in refusal(GPT2(), 2, {"wte": "columns"})


def test_the_first_pattern_that_matches_decides() -> None:
    own = {"layers.0.mlp.*": "whole", "layers.*.mlp.*_proj": "columns"}
    found = cuts(Llama(), 2, own)
    assert not any(name.startswith("layers.0.mlp") for name in found)
    assert found["layers.1.mlp.down_proj"] == "columns"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Plain(), "the attention of 'body.0' is not a module of its own"),
        (nn.Transformer(8, 2, 1, 1, 16), "batch_first=True"),
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), "no list of blocks"),
    ],
)
def test_a_model_whose_sequences_cannot_be_cut_says_why(model: nn.Module, why: str) -> None:
    with pytest.raises(SetupError) as caught:
        plan_for(model, 2).require(sequence=True, loss=False)
    assert why in str(caught.value)


def test_a_module_that_stays_whole_inside_a_block_stops_sequence_parallelism_unless_you_vouch_for_it() -> None:
    model = Llama()
    for layer in model.layers:
        layer.extra = nn.Linear(WIDTH, WIDTH)
    assert "'layers.0.extra' stays whole" in plan_for(model, 2).no_sequence
    assert not plan_for(model, 2, {"layers.*.extra": "sequence"}).no_sequence


def test_a_sequence_that_does_not_divide_is_said_with_its_arithmetic() -> None:
    check_length(LENGTH, 4)
    with pytest.raises(SetupError, match="18 positions cannot be cut into 4") as caught:
        check_length(18, 4)
    assert "18 / 4 = 4.5 positions a rank" in str(caught.value)


def test_the_output_layer_is_known_by_its_vocabulary() -> None:
    assert plan_for(Plain(), 2).head == "out"
    assert VOCABULARY % 2 == 0
