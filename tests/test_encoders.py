"""Encoders and image models by length and size, against plain references; a model that did not change."""

from __future__ import annotations

import demo
import pytest
import torch
import torch.nn.functional as F

from hf_posswap import PosSwapError, patch_model
from hf_posswap.evaluation import encoders, images

from .families import FAMILIES, pixels, tokens

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")


def bert(positions: int = 32):
    return FAMILIES["bert"].build(vocab_size=261, max_position_embeddings=positions)


DOCUMENTS = [tokens(1, 300)[0], tokens(1, 200, seed=1)[0], tokens(1, 40, seed=2)[0]]


def test_special_tokens_are_those_around_a_text(bert_tokenizer):
    assert encoders.special_tokens(bert_tokenizer) == ([bert_tokenizer.cls_token_id], [bert_tokenizer.sep_token_id])
    assert encoders.special_tokens(demo.byte_tokenizer()) == ([], [])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pseudo_perplexity_masks_one_token_at_a_time(bert_tokenizer, batch_size):
    model = patch_model(bert(), "learned", max_positions=96)
    options = {"targets": 7, "batch_size": batch_size, "name": "m"}
    points = encoders.pseudo_perplexity(model, DOCUMENTS, [16, 96], bert_tokenizer, **options)["points"]
    assert [(point["length"], point["targets"]) for point in points] == [(16, 7), (96, 7)]
    places = [(d, p) for d, n in ((0, 300), (1, 200)) for p in range(47, n - 47 + 1)]
    places = places[:: len(places) // 7][:7]
    for point, around in zip(points, (14, 94), strict=True):
        losses = []
        for document, place in places:
            ids = DOCUMENTS[document].tolist()[place - around // 2 : place - around // 2 + around]
            answer, ids[around // 2] = ids[around // 2], bert_tokenizer.mask_token_id
            whole = torch.tensor([[bert_tokenizer.cls_token_id, *ids, bert_tokenizer.sep_token_id]])
            with torch.no_grad():
                logits = model(whole).logits[0, 1 + around // 2].double()
            losses.append(-logits.log_softmax(-1)[answer].item())
        assert point["loss"] == pytest.approx(sum(losses) / 7, rel=1e-5)


def test_a_base_is_measured_up_to_its_end_and_short_texts_are_refused(bert_tokenizer):
    points = encoders.pseudo_perplexity(bert(), DOCUMENTS, [16, 96], bert_tokenizer, targets=3, name="base", upto=32)[
        "points"
    ]
    assert [point["length"] for point in points] == [16]
    with pytest.raises(PosSwapError, match="length=400 needs 398 tokens and the longest has 300"):
        encoders.pseudo_perplexity(bert(), DOCUMENTS, [400], bert_tokenizer, name="m")
    with pytest.raises(PosSwapError, match="it has no mask token"):
        encoders.pseudo_perplexity(bert(), DOCUMENTS, [16], demo.byte_tokenizer(), name="m")


def test_a_sentence_beyond_the_end_is_out_of_reach(bert_tokenizer):
    """The texts of a model that ends before the sentence are all alike: a place in the middle, never the first."""
    filler = list(range(10, 250)) * 40
    (point,) = encoders.find_sentence(bert(128), filler, [512], bert_tokenizer, name="base", cut=128)["points"]
    assert point == {"length": 512, "accuracy": 0, "reciprocal_rank": pytest.approx(1 / 5.5), "tokens_read": 128}
    long = patch_model(bert(128), "learned", max_positions=512)
    (point,) = encoders.find_sentence(long, filler, [512], bert_tokenizer, name="m")["points"]
    assert point["tokens_read"] == 512
    assert point["reciprocal_rank"] != pytest.approx(1 / 5.5)
    with pytest.raises(PosSwapError, match="length=512 needs more text than the 200 tokens"):
        encoders.find_sentence(bert(128), filler[:200], [512], bert_tokenizer, name="m")


def test_ranks_share_the_places_of_equal_ones():
    queries = torch.eye(3, dtype=torch.float64)
    documents = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.4, 0.2], [0.0, 0.4, 0.2]], dtype=torch.float64)
    assert encoders.ranks(queries, documents) == [1.0, 2.5, 1.5]


def test_short_texts_stay_where_they_were_or_the_shift_says_how_far_they_moved(bert_tokenizer):
    model, sentence = bert(128), encoders.NEEDLES[3][0]
    before = encoders.short_vectors(model, bert_tokenizer)
    ids = bert_tokenizer(sentence, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    with torch.no_grad():
        expected = F.normalize(model.bert(ids).last_hidden_state[0].double().mean(0), dim=0)
    torch.testing.assert_close(before[3], expected, rtol=1e-5, atol=1e-6)
    tiled = patch_model(bert(128), "learned", max_positions=256, init="tile")
    found = encoders.similarity_shift(tiled, before, bert_tokenizer, name="m")
    assert found["vector"] == pytest.approx(0, abs=1e-6)
    assert found["similarity"] == pytest.approx(0, abs=1e-6)
    silent = patch_model(bert(128), "nope")
    found = encoders.similarity_shift(silent, before, bert_tokenizer, name="m")
    after = encoders.short_vectors(silent, bert_tokenizer)
    assert found["vector"] == pytest.approx(sum(1 - float(a @ b) for a, b in zip(before, after, strict=True)) / 20)
    assert found["vector"] > 1e-4
    assert found["length"] == max(len(text) for pair in encoders.NEEDLES for text in pair) + 2


# --- images


def test_features_at_the_base_s_own_size_are_the_base_s():
    base, pictures = FAMILIES["vit"].build(), list(pixels(40))
    before = images.features(base, pictures, 32)
    points = images.feature_shift(base, pictures, [32, 48], before, name="base")["points"]
    assert points[0] == {"length": 32, "shift": pytest.approx(0, abs=1e-9), "images": 2}
    resized = F.interpolate(torch.stack(pictures), (48, 48), mode="bicubic", antialias=True)
    with torch.no_grad():
        after = base.vit(resized, interpolate_pos_encoding=True).last_hidden_state[:, 0].double()
    expected = 1 - F.cosine_similarity(after, torch.stack(before)).mean()
    assert points[1]["shift"] == pytest.approx(float(expected), rel=1e-5)
    assert points[1]["shift"] > 1e-4


def test_a_swapped_image_model_is_measured_at_its_own_size():
    base, pictures = FAMILIES["vit"].build(), list(pixels(40))
    before = images.features(base, pictures, 32)
    swapped = patch_model(FAMILIES["vit"].build(), "learned", image_size=48)
    found = images.feature_shift(swapped, pictures, [48], before, name="m")["points"]
    interpolated = images.feature_shift(base, pictures, [48], before, name="base")["points"]
    assert found[0]["shift"] == pytest.approx(interpolated[0]["shift"], rel=1e-3)  # the same table, resampled once
    with pytest.raises(PosSwapError, match="size=33 is not a whole number of this model's patches"):
        images.features(base, pictures, 33)


def test_pictures_are_read_in_order_and_an_empty_folder_is_refused(tmp_path):
    from PIL import Image
    from transformers import ViTImageProcessor

    for name, grey in {"b.png": 255, "a.png": 0}.items():
        Image.new("L", (8, 6), grey).save(tmp_path / name)
    dark, light = images.read_images(str(tmp_path), ViTImageProcessor(do_resize=True, size={"height": 4, "width": 4}))
    assert dark.shape == (3, 6, 8)
    assert float(dark.mean()) == -1
    assert float(light.mean()) == pytest.approx(1)
    with pytest.raises(PosSwapError, match="holds no picture"):
        images.read_images(str(tmp_path / "none"), ViTImageProcessor())
