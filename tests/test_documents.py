"""Document models: what a swap of the order of words leaves of the page, and what it refuses of it.

LayoutLMv2, and LayoutXLM which is its architecture, run here with a stand-in for detectron2's visual backbone
(`detectron.py`): text, layout and attention are transformers' own.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LayoutLMv3ImageProcessor, LayoutLMv3Processor, LayoutLMv3Tokenizer

from hf_posswap import PosSwapError, RecalibrationWarning, describe, from_pretrained, patch_model, probe, unpatch_model

from .families import FAMILIES, FRACTIONS, LENGTH, PAD, VOCAB, tokens, with_page
from .rows import DOCUMENTS, logits

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")

EVERY = (*DOCUMENTS, "udop")
WITH_IMAGE = ("layoutlmv2", "layoutlmv3")
KEEP, SILENT = {"relative_bias": "keep"}, {"slopes": (0.0, 0.0, 0.0, 0.0)}
UDOP = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
    "image_size": 32,
    "patch_size": 16,
    "decoder_start_token_id": 0,
    "pad_token_id": PAD,
}


def build(family: str) -> transformers.PreTrainedModel:
    """Every bias of a size that is seen: they are drawn small, and LayoutLMv2 and v3 never train them."""
    if family == "udop":
        torch.manual_seed(0)
        model = transformers.UdopForConditionalGeneration(transformers.UdopConfig(**UDOP)).eval()
    else:
        model = FAMILIES[family].build()
    for name, parameter in model.named_parameters():
        if "rel_pos_" in name or "relative_attention_bias" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def page(model: transformers.PreTrainedModel, length: int = 20) -> dict[str, torch.Tensor]:
    """Two rows of words, the first padded at its end; for UDOP what its decoder reads, too."""
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    mask[0, length - 5 :] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    decoder = {"decoder_input_ids": ids[:, :6]} if model.config.is_encoder_decoder else {}
    return with_page(model, {"input_ids": ids, "attention_mask": mask}) | decoder


def read(model: transformers.PreTrainedModel, **changed: torch.Tensor) -> torch.Tensor:
    """Logits of the real tokens."""
    inputs = page(model) | changed
    found = logits(model, **inputs)
    return found if model.config.is_encoder_decoder else found[inputs["attention_mask"].bool()]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() <= 2e-5 * b.abs().max().clamp(min=1.0)


# --- what stays


@pytest.mark.parametrize("init", ["tile", "hierarchical", "fit", "random"])
@pytest.mark.parametrize("family", DOCUMENTS)
def test_short_pages_of_an_extended_model_are_read_as_before_and_long_ones_to_their_end(family: str, init: str):
    model = build(family)
    before = read(model)
    patch_model(model, "learned", max_positions=20 * LENGTH, init=init)
    assert torch.equal(read(model), before)
    long = tokens(1, 20 * LENGTH)
    last = long.clone()
    last[0, -1] = 4 + (last[0, -1] - 3) % (VOCAB - 4)
    a, b = (logits(model, input_ids=ids) for ids in (long, last))
    assert a.shape[1] == 20 * LENGTH
    assert (a[0, -1] - b[0, -1]).abs().max() > 1e-3
    with pytest.raises(PosSwapError, match=f"longer than this model's {20 * LENGTH} positions"):
        logits(model, input_ids=tokens(1, 20 * LENGTH + 1))


@pytest.mark.parametrize("family", DOCUMENTS)
@pytest.mark.parametrize("scheme", ["rope", "alibi", "t5", "kerple", "sandwich", "yarn"])
def test_what_works_inside_attention_reads_pages_of_any_length(family: str, scheme: str):
    model = patch_model(build(family), scheme, **({"factor": 4} if scheme == "yarn" else {}))
    assert logits(model, input_ids=tokens(1, 10 * LENGTH)).isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [family for family in EVERY if family not in FAMILIES or FAMILIES[family].fused])
def test_attention_that_goes_through_this_package_is_the_models_own(family: str, backend: str):
    """A bias of nothing, beside what the model itself adds: by transformers' own forward, positions silenced."""
    keep = KEEP if family in (*WITH_IMAGE, "udop") else {}
    own, here = build(family), patch_model(build(family), "alibi", **SILENT, **keep)
    has_table = family != "udop"  # which is then the one thing to be silenced
    expected = read(patch_model(own, "nope", **keep) if has_table else own)
    here.set_attn_implementation(backend)
    close(read(here), expected)


@pytest.mark.parametrize("family", WITH_IMAGE)
def test_image_tokens_count_from_0_as_they_do_in_the_models_own_bias(family: str):
    """T5's buckets with the model's own values, in its place: the same distances, between text and image too."""
    own = build(family)
    buckets = own.base_model.encoder.rel_pos_bias.weight.detach().T
    buckets = buckets / 16**0.5 if family == "layoutlmv3" else buckets  # it divides its biases as its logits
    here = patch_model(build(family), "t5", num_buckets=32, max_distance=128)
    (table,) = (parameter for name, parameter in here.named_parameters() if name.endswith("posswap.buckets"))
    table.data.copy_(buckets)
    expected = read(patch_model(own, "nope", **KEEP))
    close(read(here), expected)
    assert (read(patch_model(build(family), "nope")) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("scheme", ["nope", "rope", "alibi"])
@pytest.mark.parametrize("family", WITH_IMAGE)
def test_image_tokens_keep_their_vectors(family: str, scheme: str):
    model, entering = build(family), []
    inputs = page(model)
    length = inputs["input_ids"].shape[1]
    model.base_model.encoder.layer[0].register_forward_pre_hook(lambda _, args: entering.append(args[0][:, length:]))
    logits(model, **inputs)
    logits(patch_model(model, scheme), **inputs)
    assert entering[0].shape[1] > 4
    assert torch.equal(*entering)


def test_a_table_that_image_tokens_read_too_says_so():
    rewritten = patch_model(build("layoutlmv2"), "sinusoidal", dry_run=True)
    extended = patch_model(build("layoutlmv2"), "learned", max_positions=80, init="tile", dry_run=True)
    assert "the 6 image tokens read the first rows of this table, which change too" in str(rewritten)
    assert "image tokens" not in str(extended)


# --- what is decided of biases

BIASED = ("layoutlmv2", "layoutlmv3", "bros", "udop")


@pytest.mark.parametrize("family", BIASED)
def test_spatial_bias_is_kept_or_silenced(family: str, tmp_path: Path):
    kept = patch_model(build(family), "t5")
    silent = patch_model(build(family), "t5", spatial_bias="silence")
    assert (read(kept) - read(silent)).abs().max() > 1e-3
    spatial = ("rel_pos_x_bias", "rel_pos_y_bias", "bbox_projection", "biases.1", "biases.2")
    for name, parameter in silent.named_parameters():
        if any(part in name for part in spatial):
            assert not parameter.any(), name
            assert not parameter.requires_grad, name
    shown = {site.site: site for site in describe(silent).sites}["page"]
    assert (shown.had, shown.has) == ("boxes, bias", "boxes")
    assert "their bias silenced" in shown.detail
    assert "their bias kept" in str(describe(kept))
    silent.save_pretrained(tmp_path)
    assert torch.equal(read(from_pretrained(tmp_path)), read(silent))
    before = read(build(family))
    assert torch.equal(read(unpatch_model(silent)), before)


@pytest.mark.parametrize("family", ["layoutlmv2", "layoutlmv3", "udop"])
def test_relative_bias_is_kept_or_silenced(family: str):
    sites = []
    for decided in (None, "keep", "silence"):
        model = patch_model(build(family), "rope", relative_bias=decided)
        sites.append((read(model), {site.site: site.has for site in describe(model).sites}["bias"]))
    assert [has for _, has in sites] == ["none", "t5", "none"]
    assert torch.equal(sites[0][0], sites[2][0])
    assert (sites[0][0] - sites[1][0]).abs().max() > 1e-3
    patch_model(model, "rope", relative_bias="keep")  # another decision is another swap
    assert torch.equal(read(model), sites[1][0])


def test_both_biases_are_said_to_be_there():
    model = patch_model(build("layoutlmv3"), "alibi", relative_bias="keep")
    assert {site.site: site.has for site in describe(model).sites}["bias"] == "t5 + alibi"


# --- UDOP, an encoder-decoder

UDOP_SWAPS = [("nope", {}), ("rope", {}), ("alibi", {}), ("t5", {}), ("alibi", KEEP)]
UDOP_SWAPS += [("yarn", {"factor": 4, "original_max_position_embeddings": LENGTH})]


@pytest.mark.parametrize(("scheme", "params"), UDOP_SWAPS, ids=str)
def test_udop_is_swapped_saved_and_undone(scheme: str, params: dict, tmp_path: Path):
    model = build("udop")
    before, config = read(model), model.config.to_dict()
    patch_model(model, scheme, **params)
    after = read(model)
    assert (after - before).abs().max() > 1e-3
    assert probe(model).faults == ()
    inputs = page(model)
    del inputs["decoder_input_ids"]
    model.generation_config.eos_token_id = None
    runs = [model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*runs)
    model.save_pretrained(tmp_path)
    assert torch.equal(read(from_pretrained(tmp_path)), after)
    undone = unpatch_model(patch_model(build("udop"), scheme, **params))
    assert torch.equal(read(undone), before)
    assert undone.config.to_dict() == config


# --- what is refused

OUTSIDE = [(0, 0, 1001, 4), (-1, 0, 3, 3)]
TURNED = [(9, 0, 3, 5), (0, 9, 5, 3)]


@pytest.mark.parametrize("box", OUTSIDE + TURNED, ids=str)
@pytest.mark.parametrize("family", EVERY)
def test_box_that_is_none_of_this_page_is_refused_in_one_line(family: str, box: tuple):
    model = patch_model(build(family), "rope")
    inputs = page(model)
    boxes = inputs["bbox"].clone()
    boxes[1, 3] = torch.tensor(box) / (1000 if model.config.model_type in FRACTIONS else 1)
    reason = "is not on the page" if box in OUTSIDE else "has x1 < x0 or y1 < y0"
    with pytest.raises(PosSwapError, match=rf"^bbox\[1, 3\]=\(.*\) {reason}") as raised:
        logits(model, **inputs | {"bbox": boxes})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", DOCUMENTS)
def test_corners_of_the_page_are_on_it(family: str):
    model = patch_model(build(family), "learned", max_positions=80, init="tile")
    inputs = page(model)
    whole = torch.tensor([0, 0, 1000, 1000])
    boxes = (whole / 1000 if model.config.model_type in FRACTIONS else whole).expand_as(inputs["bbox"])
    assert logits(model, **inputs | {"bbox": boxes}).isfinite().all()


# --- outside of the model


@pytest.fixture
def processor() -> LayoutLMv3Processor:
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "Ġa", "Ġb"])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = LayoutLMv3Tokenizer(vocab=vocabulary, merges=[], model_max_length=LENGTH)
    return LayoutLMv3Processor(LayoutLMv3ImageProcessor(apply_ocr=False), tokenizer)


def test_processor_reads_as_far_as_the_model(processor: LayoutLMv3Processor):
    model = patch_model(build("layoutlmv3"), "learned", max_positions=80, init="tile", processor=processor)
    assert processor.tokenizer.model_max_length == 80
    size = processor.image_processor.size
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    words, boxes = ["a", "b"] * 60, [[10, 10, 20, 20]] * 120
    read = processor(image, words, boxes=boxes, truncation=True, return_tensors="pt")
    assert read["input_ids"].shape == (1, 80)
    assert processor.image_processor.size == size
    unpatch_model(model, processor=processor)
    assert processor.tokenizer.model_max_length == LENGTH


def test_processor_of_another_model_is_refused(processor: LayoutLMv3Processor):
    model = FAMILIES["layoutlmv3"].build(vocab_size=6)
    before = logits(model, input_ids=torch.tensor([[4, 5, 4]]))
    with pytest.raises(PosSwapError, match="it does not fit"):
        patch_model(model, "learned", max_positions=80, init="tile", processor=processor)
    assert torch.equal(logits(model, input_ids=torch.tensor([[4, 5, 4]])), before)
    assert processor.tokenizer.model_max_length == LENGTH


def test_warns_where_a_bias_is_taken_from_a_model_that_is_only_extended():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecalibrationWarning)
        patch_model(build("layoutlmv3"), "learned", max_positions=80, init="tile")
        with pytest.raises(RecalibrationWarning):
            patch_model(build("layoutlmv3"), "learned", max_positions=80, init="tile", relative_bias="silence")


def test_what_replaces_positions_is_fitted_on_pages():
    """Words whose vectors turn with their place: what positions add follows from distances, and T5 can learn it."""

    def turning() -> transformers.PreTrainedModel:
        model = build("layoutlm")
        places = torch.arange(LENGTH)[:, None] * 0.5 ** torch.arange(32)
        model.layoutlm.embeddings.position_embeddings.weight.data = torch.cat([places.sin(), places.cos()], -1)
        return model

    batches = [page(turning(), LENGTH)]
    original = read(turning())
    cold = patch_model(turning(), "t5", per_layer=True)
    fitted = patch_model(turning(), "t5", per_layer=True, fit=batches)
    assert describe(fitted).fit.tokens == batches[0]["attention_mask"].sum()
    assert (read(fitted) - original).square().mean() < (read(cold) - original).square().mean()
    with pytest.raises(PosSwapError, match=r"fit=.*pixel_values.*not understood"):
        patch_model(turning(), "t5", fit=[batches[0] | {"pixel_values": torch.zeros(2, 3, 8, 8)}])
