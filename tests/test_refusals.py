"""Law 12: what cannot be done raises PosSwapError that names the argument; model and files stay as they were."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from hf_posswap import PosSwapError, list_schemes, patch_model, unpatch_model
from hf_posswap.edits import Hook, Replace
from hf_posswap.schemes.yarn import Yarn

from .families import FAMILIES, LENGTH, tokens
from .rows import logits

REFUSED = [
    # family, scheme, parameters, what the message must say
    ("llama", "yarm", {"factor": 4}, r"scheme='yarm' is unknown; did you mean 'yarn'\?"),
    ("llama", 7, {}, r"scheme=7 is unknown"),
    ("llama", "yarn", {"faktor": 4}, r"faktor=4 is not a parameter of this scheme; did you mean 'factor'\?"),
    ("llama", "linear", {"factor": 4, "beta_fast": 32}, r"beta_fast=32 is not a parameter"),
    ("llama", "nope", {"factor": 4}, r"factor=4 .* takes no parameters"),
    ("llama", "yarn", {}, r"give factor .* or target_length"),
    ("llama", "yarn", {"factor": 0.5}, r"factor=0.5 is too small"),
    ("llama", "yarn", {"factor": "4"}, r"factor='4' is not a finite number"),
    ("llama", "yarn", {"factor": float("nan")}, r"factor=nan is not a finite number"),
    ("llama", "yarn", {"factor": True}, r"factor=True is not a finite number"),
    ("llama", "yarn", {"factor": 4, "target_length": 128}, r"factor=4 was given together with target_length=128"),
    ("llama", "yarn", {"target_length": 16}, r"target_length=16 is not beyond the model's 32 tokens"),
    ("llama", "yarn", {"target_length": 64.5}, r"target_length=64.5 is not a positive integer"),
    ("llama", "yarn", {"factor": 4, "beta_fast": 1, "beta_slow": 2}, r"beta_fast=1 must be greater than beta_slow"),
    ("llama", "yarn", {"factor": 4, "truncate": "yes"}, r"truncate='yes' is neither True nor False"),
    ("llama", "yarn", {"factor": 4, "attention_factor": -1.0}, r"attention_factor=-1.0 must be greater than 0"),
    ("llama", "yarn", {"factor": 4, "rope_theta": 0}, r"rope_theta=0 must be greater than 0"),
    ("llama", "yarn", {"factor": 4, "layer_types": ("full_attention",)}, r"one rotary for all layers"),
    ("gemma3", "yarn", {"factor": 4, "layer_types": ("full",)}, r"'full' is unknown; this model's are"),
    ("gemma3", "yarn", {"factor": 4, "layer_types": ()}, r"layer_types=\(\) is not a list of names"),
    (
        "gemma3",
        "rope",
        {"rope_theta": 5e5, "layer_types": "full_attention"},
        r"='full_attention' is not a list of names",
    ),
    ("gemma3", "linear", {"factor": 4, "layer_types": [0]}, r"layer_types=\(0,\) is not a list of names"),
    ("llama", "llama3", {"factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}, r"high_freq_factor=1 must be"),
    ("llama", "linear", {"factor": 1}, r"would change nothing"),
    ("llama", "rope", {}, r"would change nothing"),
    ("llama", "rope", {"rope_theta": 10000.0}, r"would change nothing"),
    ("llama", "rope", {"pairing": "thirds"}, r"pairing='thirds' is unknown"),
    ("llama", "rope", {"pairing": "halves"}, r"would change nothing"),
    ("llama", "rope", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1.5 is greater than 1"),
    ("llama", "rope", {"partial_rotary_factor": 0.3}, r"partial_rotary_factor=0.3 rotates 4.8 of 16"),
    ("gpt_neox", "rope", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5 cannot replace 0.25"),
    ("gpt_neox", "rope", {"pairing": "interleaved"}, r"no q_proj and k_proj"),
    ("gpt_neox", "ntk", {"factor": 4}, None),
    ("llama", "longrope", {"factor": 4}, r"longrope: missing long_factor"),
    ("llama", "longrope", {"factor": 4, "long_factor": 4}, r"long_factor=4 is not a list of numbers"),
    ("llama", "longrope", {"factor": 4, "long_factor": [1.0] * 7}, r"long_factor=.* has 7 factors, .* turns 8 pairs"),
    (
        "llama",
        "longrope",
        {"factor": 4, "long_factor": [2.0] * 7 + [1.0]},
        r"falls from 2.0 to 1.0 at 7",
    ),
    ("llama", "longrope", {"factor": 4, "long_factor": []}, r"has 0 factors, .* turns 8 pairs"),
    ("llama", "longrope", {"factor": 4, "long_factor": [float("nan")] * 8}, r"holds nan at 0, .* finite number"),
    ("llama", "longrope", {"factor": 4, "long_factor": [-1.0] * 8}, r"holds -1.0 at 0, which is not positive"),
    (
        "llama",
        "longrope",
        {"factor": 4, "long_factor": [2.0] * 8, "short_factor": [1.5, 1.0] * 4},
        r"short_factor=.* falls from 1.5 to 1.0 at 1",
    ),
    ("llama", "rope", {"partial_rotary_factor": 0.1875}, r"rotates 3 of 16 dimensions, not an even number"),
    ("bert", "rope", {"partial_rotary_factor": 0.1875}, r"rotates 3 of 16 dimensions, not an even number"),
    ("llama", "proportional", {"partial_rotary_factor": 0.1875}, r"keeps 1.5 of 8 pairs"),
    ("llama", "longrope", {"factor": 4, "long_factor": [0.0] * 8}, r"holds 0.0 at 0, which is not positive"),
    ("llama", "longrope", {"factor": 4, "long_factor": ["1"] * 8}, r"holds '1' at 0, which is not a finite number"),
    ("llama", "longrope", {"factor": 4, "long_factor": [1] * 8, "short_factor": [1]}, r"short_factor=.* has 1 factors"),
    ("deepseek_v3", "longrope", {"factor": 4, "long_factor": [2.0] * 8}, r"attention_factor=None would reach only"),
    ("deepseek_v3", "yarn", {"factor": 4, "attention_factor": 1.2}, r"attention_factor=1.2 would reach only"),
    ("deepseek_v2", "yarn", {"factor": 4, "mscale": 1.0}, r"mscale=1.0 is one of two factors"),
    ("deepseek_v3", "rope", {"pairing": "halves"}, r"no q_proj and k_proj"),
    ("modernbert", "ntk-by-parts", {"factor": 4, "truncate": False}, r"truncate=False: this transformers"),
    ("llama", "ntk-by-parts", {"factor": 4, "attention_factor": 1.0}, r"attention_factor=1.0 is not a parameter"),
    ("llama", "proportional", {"factor": 4}, r"proportional: missing partial_rotary_factor"),
    ("llama", "proportional", {"partial_rotary_factor": 2}, r"partial_rotary_factor=2 is greater than 1"),
    ("llama", "proportional", {"partial_rotary_factor": 0.3}, r"keeps 2.4 of 8 pairs"),
    ("llama", "proportional", {"partial_rotary_factor": 1.0}, r"would change nothing"),
    ("gpt_neox", "proportional", {"partial_rotary_factor": 0.5}, r"cannot replace 0.25"),
    ("llama", "dynamic", {"factor": 4, "freeze_at": 32}, r"freeze_at=32 is not beyond the 32 tokens"),
    ("llama", "dynamic", {"factor": 4, "freeze_at": 0.5}, r"freeze_at=0.5 is not a positive integer"),
    ("phi3", "yarn", {"factor": 4}, r"the config of a Phi3ForCausalLM cannot hold it .*longrope.*could not be saved"),
    ("llama_yarn", "yarn", {"factor": 4}, r"would change nothing"),
    ("llama", "learned", {"max_positions": 64}, r"no table of position vectors to resize"),
    ("llama", "sinusoidal", {"max_positions": 64}, r"max_positions=64 sizes a table"),
    ("bert", "dynamic", {"factor": 4}, r"dynamic: its frequencies follow the longest position of a call, which Bert"),
    ("bert", "xpos", {}, r"xpos: keys that follow would grow with distance"),
    ("bert", "fire", {}, r"fire: it divides by how far a causal query can look"),
    ("bert", "logn", {}, r"logn: the tokens that a query sees are counted from its position, in causal models"),
    ("vit", "alibi", {}, r"alibi: the positions of ViTForImageClassification are a grid"),
    ("llama", "alibi", {"slopes": (0.5, 0.25)}, r"slopes holds 2 numbers and this model has 4 heads"),
    ("llama", "alibi", {"slopes": (0.5, 0.25, -1.0, 0.1)}, r"are not finite numbers >= 0"),
    ("llama", "t5", {"num_buckets": 30}, r"num_buckets=30 is not a multiple of 4"),
    ("llama", "t5", {"max_distance": 16}, r"max_distance=16 must be greater than 16"),
    ("llama", "kerple", {"kernel": "lag"}, r"kernel='lag' is unknown; did you mean 'log'"),
    ("llama", "sandwich", {"dim": 7}, r"dim=7 is odd"),
    ("llama", "xpos", {"scale_base": 0}, r"scale_base=0 must be greater than 0"),
    ("llama", "logn", {"original_max_position_embeddings": 1}, r"original_max_position_embeddings=1 is too small"),
    (
        "bert",
        "rope",
        {"relative_bias": "keep"},
        r"relative_bias='keep': BertForMaskedLM has no learned bias",
    ),
    ("bloom", "rope", {"relative_bias": "keep"}, r"relative_bias='keep': BloomForCausalLM has no learned bias"),
    (
        "deberta",
        "alibi",
        {"relative_bias": "keep"},
        r"relative_bias='keep': attention of DebertaForMaskedLM that carries alibi .* choice is 'silence'",
    ),
    ("layoutlmv3", "rope", {"relative_bias": "kept"}, r"relative_bias='kept' is unknown; did you mean 'keep'\?"),
    ("layoutlm", "rope", {"spatial_bias": "silence"}, r"spatial_bias='silence': .* no learned bias .* on a page"),
    ("layoutlmv3", "nope", {"spatial_bias": False}, r"spatial_bias=False is unknown; choose one of: keep, silence"),
    ("layoutlmv3", "learned", {"max_positions": 80, "combine": "concat"}, r"combine='concat' does not resize a table"),
    ("lilt", "sinusoidal", {"combine": "concat"}, r"combine='concat' is for models of one table of positions"),
    ("bert", "learned", {}, r"give exactly one of"),
    ("bert", "learned", {"max_positions": 64, "factor": 2}, r"give exactly one of"),
    ("bert", "learned", {"max_positions": 0}, r"max_positions=0 is not a positive integer"),
    ("bert", "learned", {"max_positions": LENGTH}, r"would change nothing"),
    ("bert", "learned", {"max_positions": 64, "init": "tiles"}, r"init='tiles' is unknown; did you mean 'tile'"),
    ("bert", "learned", {"image_size": 64}, r"image_size=64 is for image models"),
    ("bert", "learned", {"max_positions": 5000, "init": "hierarchical"}, r"reaches 1024 positions from 32, not 5000"),
    ("bert", "sinusoidal", {"layout": "half"}, r"layout='half' is unknown; did you mean 'halves'"),
    ("bert", "sinusoidal", {"scale": 2}, r"scale=2 is unknown"),
    ("bert", "sinusoidal", {"init": "fitted"}, r"init='fitted' is unknown; did you mean 'fit'"),
    ("bert", "sinusoidal", {"init": "fit", "scale": "none"}, r"scale='none' has no meaning beside init='fit'"),
    ("llama", "sinusoidal", {"init": "fit"}, r"init='fit' needs a table to reproduce"),
    (
        "bert",
        "learned",
        {"max_positions": 64, "init_seed": 3},
        r"init_seed=3 is not a natural number beside init='random'",
    ),
    (
        "bert",
        "learned",
        {"max_positions": 64, "init": "random", "init_seed": -1},
        r"init_seed=-1 is not a natural number",
    ),
    (
        "bert",
        "learned",
        {"max_positions": 64, "init": "random", "init_seed": "3"},
        r"init_seed='3' is not a natural number",
    ),
    ("bert", "sinusoidal", {"combine": "cat"}, r"combine='cat' is unknown; did you mean 'concat'"),
    ("bert", "sinusoidal", {"combine": "concat", "max_positions": 80}, r"max_positions=80: .* this model's has 32"),
    ("llama", "sinusoidal", {"combine": "concat", "max_positions": 80}, r"max_positions=80 sizes a table"),
    ("gpt2", "learned", {"combine": "concat", "factor": 2}, r"combine='concat' does not resize .*leave out factor"),
    ("gpt2", "learned", {"combine": "concat", "max_positions": 64}, r"max_positions=64: .* this model's has 32"),
    ("gpt2", "learned", {"combine": "concat", "init": "tile"}, r"init='tile' makes new rows from old ones"),
    ("gpt2", "learned", {"combine": "concat", "init": "random"}, r"init='random' draws rows"),
    ("llama", "learned", {"combine": "concat"}, r"give max_positions, the rows of the table"),
    ("vit", "learned", {"combine": "concat"}, r"combine='concat' is for text"),
    ("vit", "learned", {"image_size": 64, "init": "fit"}, r"init='fit' is for text"),
    ("vit", "learned", {"image_size": 50}, r"image_size=50 is not one or two multiples of the patch size 8"),
    ("vit", "learned", {"max_positions": 20}, r"max_positions=20 is for text; give image_size"),
    ("vit", "learned2d", {"image_size": 64, "resize": "cubic"}, r"resize='cubic' is unknown; did you mean 'bicubic'"),
    ("vit", "learned2d", {"image_size": 64, "resize": "tile", "antialias": True}, r"antialias=True .*resize='tile'"),
    ("vit", "learned2d", {}, r"learned2d\(\) would change nothing"),
    ("bert", "learned2d", {}, r"learned2d: it resizes a table of patches, and this model has a table of text"),
    ("llama", "learned2d", {"image_size": 64}, r"image_size=64 is for image models"),
    ("bert", "sincos2d", {}, r"sincos2d: it fills a table of an image's patches"),
    ("llama", "sincos2d", {}, r"sincos2d: it fills a table of an image's patches"),
    ("vit", "sincos2d", {"convention": "moco3"}, r"convention='moco3' is unknown; did you mean 'moco'"),
    ("vit", "sincos2d", {"init": "fit", "scale": "none"}, r"scale='none' has no meaning beside init='fit'"),
    ("vit", "sincos2d", {"num_frames": 4}, r"num_frames=4 is for video"),
    ("vit", "nope", {"num_channels": 0}, r"num_channels=0 is not a positive integer"),
    ("vit", "nope", {"num_channels": "rgb"}, r"num_channels='rgb' is not a positive integer"),
    ("vit", "nope", {"image_size": (32, 32, 32)}, r"image_size=\(32, 32, 32\) is not one or two positive numbers"),
    ("vit", "nope", {"patch_size": (2, 8, 8)}, r"patch_size=\(2, 8, 8\) has 3 numbers"),
    ("vit", "nope", {"patch_form": "conv"}, r"patch_form='conv' is unknown; did you mean 'convolution'"),
    ("vit", "nope", {"image_size": (48, 50)}, r"image_size=\(48, 50\) is not one or two multiples of the patch size 8"),
    ("bert", "nope", {"patch_form": "linear"}, r"patch_form='linear' is for image models"),
    ("vit", "learned", {"image_size": 64, "init": "hierarchical"}, r"init='hierarchical' is for text"),
    ("vit", "sinusoidal", {}, r"grid of patches; see 'sincos2d'"),
]
REFUSED = [row for row in REFUSED if row[3] is not None]


def state(model) -> dict:
    """Everything a failed patch could have touched."""
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "config object": id(model.config),
        "tensors": {k: (id(v), v.clone()) for k, v in [*model.named_parameters(), *model.named_buffers()]},
        "modules": [name for name, _ in model.named_modules()],
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()),
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "trainable": [p.requires_grad for p in model.parameters()],
    }


def unchanged(model, before: dict) -> None:
    after = state(model)
    for name, (identity, value) in before.pop("tensors").items():
        assert after["tensors"][name][0] == identity, name
        assert torch.equal(after["tensors"][name][1], value), name
    after.pop("tensors")
    assert after == before


@pytest.mark.parametrize(
    ("family", "scheme", "params", "says"), REFUSED, ids=[f"{r[0]}-{r[1]}-{r[2]}" for r in REFUSED]
)
def test_refused_and_untouched(family, scheme, params, says):
    model = FAMILIES[family].build()
    before = state(model)
    with pytest.raises(PosSwapError, match=says):
        patch_model(model, scheme, **params)
    unchanged(model, before)


@pytest.mark.parametrize(
    ("family", "scheme", "params", "says"), REFUSED, ids=[f"{r[0]}-{r[1]}-{r[2]}" for r in REFUSED]
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_a_patched_model_stays_patched(family, scheme, params, says):
    model = FAMILIES[family].build()
    params = {"max_positions": 64} if says == "would change nothing" and family == "bert" else params
    first = {"bert": ("sinusoidal", {"layout": "halves"}), "phi3": ("ntk", {"factor": 2})}.get(family, ("nope", {}))
    patch_model(model, first[0], **first[1])
    before = state(model)
    try:
        patch_model(model, scheme, **params)
    except PosSwapError:
        unchanged(model, before)


SIZES = [
    # family, its sizes, scheme, parameters, what the message must say
    ("gpt_neox", {"hidden_size": 80}, "yarn", {"factor": 4}, r"head_dim=20 rotates 5 dimensions, an odd number"),
    ("gpt_neox", {"rotary_pct": 0.125}, "ntk", {"factor": 4}, r"rotary dimension of 2 leaves no exponent"),
    ("gpt_neox", {"rotary_pct": 0.125}, "dynamic", {"factor": 4}, r"dynamic.* cannot be built by this model's own"),
    ("gpt_neox", {"rotary_pct": 0.125}, "dynamic", {"factor": 4, "freeze_at": 64}, r"a rotary dimension of 2 leaves"),
    ("gpt_neox", {}, "longrope", {"factor": 4, "long_factor": [2.0] * 8}, r"has 8 factors, and this model turns 2"),
    ("bert", {"hidden_size": 60}, "rope", {}, r"rope: head_dim=15 is odd; pairs of dimensions cannot be turned"),
    ("bert", {"hidden_size": 60}, "yarn", {"factor": 4}, r"yarn: head_dim=15 is odd"),
    ("llama", {"num_key_value_heads": 3}, "alibi", {}, r"heads=4 of Llama\w* is not a multiple of its .*_heads=3"),
    ("electra", {"embedding_size": 33}, "sinusoidal", {}, r"needs an even width .* this model's is 33"),
    ("electra", {"embedding_size": 33}, "learned", {"factor": 2, "init": "fit"}, r"init='fit' .* width is 33, an odd"),
    ("opt", {"word_embed_proj_dim": 32}, "learned", {"combine": "concat"}, r"of one width; .* have 32 and 64"),
]


@pytest.mark.parametrize(("family", "sizes", "scheme", "params", "says"), SIZES, ids=[f"{r[0]}-{r[2]}" for r in SIZES])
def test_sizes_that_a_scheme_cannot_use(family, sizes, scheme, params, says):
    model = FAMILIES[family].build(**sizes)
    before = state(model)
    with pytest.raises(PosSwapError, match=says):
        patch_model(model, scheme, **params)
    unchanged(model, before)


def test_model_without_a_site():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(PosSwapError, match=r"MambaForCausalLM .*'mamba'.* order by recurrence"):
        patch_model(model, "yarn", factor=4)


def test_attention_that_nothing_reaches():
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=64, n_positions=LENGTH, n_embd=64, n_layer=1, n_head=4))
    before = state(model)
    with pytest.raises(
        PosSwapError, match=r"OpenAIGPTLMHeadModel has an attention of its own that does not go through"
    ):
        patch_model(model, "alibi")
    unchanged(model, before)


def test_table_whose_neighbour_is_unknown():
    from transformers import LukeConfig, LukeForMaskedLM

    config = LukeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, entity_vocab_size=8, entity_emb_size=16,
    )  # fmt: skip
    with pytest.raises(PosSwapError, match=r"another table at luke.entity_embeddings.entity_embeddings whose part"):
        patch_model(LukeForMaskedLM(config), "nope")


def wrapped_by_compile():
    return torch.compile(FAMILIES["llama"].build(), backend="eager")


def wrapped_by_peft():
    peft = pytest.importorskip("peft")
    warnings.simplefilter("ignore", FutureWarning)  # peft's own calls into transformers
    return peft.get_peft_model(FAMILIES["llama"].build(), peft.LoraConfig(target_modules=["q_proj"]))


def wrapped_by_data_parallel():
    return torch.nn.DataParallel(FAMILIES["llama"].build())


@pytest.mark.parametrize("wrap", [wrapped_by_compile, wrapped_by_peft, wrapped_by_data_parallel])
def test_wrapped_model(wrap):
    model = wrap()
    with pytest.raises(PosSwapError, match="is not a transformers model; patch the model inside first"):
        patch_model(model, "yarn", factor=4)


@pytest.mark.parametrize("thing", [None, "llama", torch.nn.Linear(2, 2)])
def test_not_a_model(thing):
    with pytest.raises(PosSwapError, match="is not a transformers model"):
        patch_model(thing, "yarn", factor=4)


@pytest.fixture
def quantised(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    def make(family):
        source = FAMILIES[family].build()
        source.save_pretrained(tmp_path)
        return type(source).from_pretrained(tmp_path, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()))

    return make


def test_quantised_model_takes_swaps_of_the_config_only(quantised):
    model, ids = quantised("llama"), tokens(1, 40)
    before = logits(model, input_ids=ids)
    patch_model(model, "yarn", factor=4)
    assert not torch.equal(logits(model, input_ids=ids), before)
    unpatch_model(model)
    with pytest.raises(
        PosSwapError, match=r"rope\(pairing=...\) changes weights, and this LlamaForCausalLM is quantised"
    ):
        patch_model(model, "rope", pairing="interleaved")
    assert torch.equal(logits(model, input_ids=ids), before)


@pytest.mark.parametrize(("scheme", "params"), [("learned", {"max_positions": 64}), ("sinusoidal", {}), ("nope", {})])
def test_quantised_table_is_refused(quantised, scheme, params):
    with pytest.raises(PosSwapError, match="is quantised; patch it in full precision"):
        patch_model(quantised("gpt2"), scheme, **params)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "electra", "gpt2", "opt"])
def test_sequence_beyond_the_table(family):
    model = patch_model(FAMILIES[family].build(), "learned", max_positions=80)
    assert logits(model, input_ids=tokens(1, 80)).shape[1] == 80
    with pytest.raises(PosSwapError, match="a sequence of 81 tokens is longer than this model's 80 positions"):
        logits(model, input_ids=tokens(1, 81))


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_decoding_beyond_the_table(family):
    model = patch_model(FAMILIES[family].build(), "learned", max_positions=40)
    model.generation_config.eos_token_id = None
    assert model.generate(tokens(1, 30), max_new_tokens=10, do_sample=False).shape[1] == 40
    with pytest.raises(PosSwapError, match="a sequence of 41 tokens"):
        model.generate(tokens(1, 30), max_new_tokens=12, do_sample=False)


def test_nothing_to_undo():
    with pytest.raises(PosSwapError, match="is not patched"):
        unpatch_model(FAMILIES["llama"].build())


def test_parameters_beside_a_scheme_object():
    model = patch_model(FAMILIES["llama"].build(), Yarn(factor=4))
    assert model.config.rope_parameters["factor"] == 4
    with pytest.raises(PosSwapError, match=r"parameters \['factor'\] were given beside a Scheme object"):
        patch_model(model, Yarn(factor=4), factor=2)


def test_dry_run_changes_nothing_and_says_what_it_would_do():
    model = FAMILIES["llama"].build()
    before = state(model)
    text = str(patch_model(model, "yarn", factor=4, dry_run=True))
    unchanged(model, before)
    for part in ("yarn(factor=4)", "native", "config.max_position_embeddings: 32 -> 128", "model.rotary_emb.inv_freq"):
        assert part in text


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("edit", [Replace, Hook])
def test_failure_in_the_middle_of_a_patch_takes_everything_back(family, edit, monkeypatch):
    """Every edit in turn is made to fail after the ones before it were made."""
    scheme, params = ("yarn", {"factor": 4}) if family == "llama" else ("learned", {"max_positions": 64})
    real = edit.swap
    for fatal in range(40):
        model, count = FAMILIES[family].build(), [0]
        before = state(model)

        def swap(self, count=count, fatal=fatal):
            count[0] += 1
            if count[0] == fatal + 1:
                raise KeyboardInterrupt
            real(self)

        monkeypatch.setattr(edit, "swap", swap)
        try:
            patch_model(model, scheme, **params)
            break
        except KeyboardInterrupt:
            monkeypatch.setattr(edit, "swap", real)
            unchanged(model, before)
    assert fatal > 0 or edit is Hook


# --- tokenizer and processor


class Tokenizer:
    """The two things patching asks of a tokenizer; a real one goes through test_scripts.py."""

    def __init__(self, size: int, length: int) -> None:
        self.size, self.model_max_length = size, length

    def __len__(self) -> int:
        return self.size


def test_tokenizer_that_does_not_fit():
    model, tokenizer = FAMILIES["bert"].build(), Tokenizer(1000, 32)
    before = state(model)
    with pytest.raises(PosSwapError, match="tokenizer has 1000 tokens and this BertForMaskedLM has 64"):
        patch_model(model, "learned", max_positions=64, tokenizer=tokenizer)
    with pytest.raises(PosSwapError, match="tokenizer=str is not a tokenizer"):
        patch_model(model, "learned", max_positions=64, tokenizer="bert-base-uncased")
    unchanged(model, before)
    assert tokenizer.model_max_length == 32


@pytest.mark.parametrize(
    ("family", "scheme", "params", "limit"),
    [
        ("bert", "learned", {"max_positions": 80}, 80),
        ("roberta", "sinusoidal", {"max_positions": 80}, 80),
        ("opt", "learned", {"factor": 2}, 64),
        ("llama", "yarn", {"factor": 4}, 128),
        ("llama", "linear", {"target_length": 100}, 100),  # the config keeps 32; the tokenizer gets the true length
    ],
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_tokenizer_limit_moves_with_the_model(family, scheme, params, limit):
    model, tokenizer = FAMILIES[family].build(), Tokenizer(64, 32)
    patch_model(model, scheme, tokenizer=tokenizer, **params)
    assert tokenizer.model_max_length == limit
    unpatch_model(model, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 32
    patch_model(model, scheme, **params)
    patch_model(model, scheme, tokenizer=tokenizer, **params)  # the same patch again, now with the tokenizer
    assert tokenizer.model_max_length == limit


def test_image_processor_follows():
    from transformers import ViTImageProcessor

    model = FAMILIES["vit"].build()
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    patch_model(model, "learned", image_size=(48, 64), processor=processor)
    image = torch.randint(0, 255, (3, 100, 80), dtype=torch.uint8).numpy()
    assert logits(model, **processor(image, return_tensors="pt")).shape == (1, 2)
    unpatch_model(model, processor=processor)
    assert dict(processor.size) == {"height": 32, "width": 32}
    with pytest.raises(PosSwapError, match=r"processor=ViTImageProcessor.* model without images"):
        patch_model(FAMILIES["bert"].build(), "learned", max_positions=64, processor=processor)


def test_schemes_are_listed():
    names = list_schemes()
    assert names == sorted(names)
    assert set(names) >= {"nope", "rope", "linear", "ntk", "dynamic", "yarn", "llama3", "learned", "sinusoidal"}
