"""What is trained: positions alone, and LoRA with what goes beside it; each counted, saved and taken up again."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_posswap import PosSwapError, describe, from_pretrained, patch_model
from hf_posswap.card import card
from hf_posswap.scheme import make_scheme
from hf_posswap.training.loop import finetune, load
from hf_posswap.training.trained import position_parameters

from .small import BLOCK, bert, gpt2, llama, losses

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
IDS = torch.arange(20)[None]


def changed(model, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(
    ("make", "scheme", "trained"),
    [
        (llama, "t5", {"model.posswap.buckets"}),
        (llama, "kerple", None),
        (gpt2, "learned", {"transformer.wpe.weight"}),
        (bert, None, {"bert.embeddings.position_embeddings.weight"}),
    ],
)
def test_positions_alone_are_trained_at_their_own_rate(make, scheme, trained, arguments, tokenizer, bert_tokenizer):
    model = make() if scheme is None else patch_model(make(), scheme, **({"max_positions": 64} if make is gpt2 else {}))
    names = set(position_parameters(model))
    assert names == trained or (trained is None and names)
    before = copy.deepcopy(model.state_dict())
    asked = replace(arguments, train="positions", positions_learning_rate=0.5, learning_rate=1e-9, max_grad_norm=0)
    log = finetune(model, bert_tokenizer if make is bert else tokenizer, replace(asked, lr_scheduler_type="constant"))
    assert changed(model, before) == names
    moved = max((model.state_dict()[name] - before[name]).abs().max() for name in names)
    assert moved > 0.1  # AdamW's first steps are as long as the learning rate
    assert log.trained_parameters == sum(before[name].numel() for name in names)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_positions_have_their_own_rate_beside_the_others(arguments, tokenizer):
    model = patch_model(llama(), "t5")
    before = copy.deepcopy(model.state_dict())
    asked = {"positions_learning_rate": 0.5, "learning_rate": 1e-4, "lr_scheduler_type": "constant", "max_steps": 1}
    log = finetune(model, tokenizer, replace(arguments, warmup_steps=0, **asked))
    after = model.state_dict()
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    positions = {name for name in moved if "posswap" in name}
    assert all(moved[name] == pytest.approx(0.5, rel=1e-3) for name in positions)
    assert all(0 < moved[name] < 1.01e-4 for name in moved.keys() - positions)
    assert log.entries[0]["learning_rate"] == 1e-4


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "nope"])
def test_a_scheme_without_parameters_has_no_positions_to_train(scheme, arguments, tokenizer):
    model = patch_model(llama(), scheme, **({"factor": 2} if scheme == "yarn" else {}))
    with pytest.raises(PosSwapError, match="train='positions': LlamaForCausalLM has no parameters of positions"):
        finetune(model, tokenizer, replace(arguments, train="positions"))
    assert all(parameter.requires_grad for parameter in model.parameters())


LORA = {
    "yarn": partial(patch_model, scheme="yarn", factor=2),
    "t5": partial(patch_model, scheme="t5", per_layer=True),
    "unpatched": lambda model: model,
}


@pytest.mark.parametrize("scheme", LORA)
@pytest.mark.parametrize("beside", [True, False])
def test_lora_trains_adapters_and_what_goes_beside_them(scheme, beside, arguments, tokenizer):
    pytest.importorskip("peft")
    model = LORA[scheme](llama())
    before, kinds = copy.deepcopy(model.state_dict()), {name: type(m) for name, m in model.named_modules()}
    asked = replace(arguments, train="lora", lora_rank=2, lora_norms=beside, lora_embeddings=beside)
    log = finetune(model, tokenizer, asked)
    assert losses(log)[-1] < losses(log)[1]
    found = changed(model, before)
    linear = {name for name in before if name.endswith("_proj.weight")}
    extra = {name for name in before if "norm" in name or "embed_tokens" in name} if beside else set()
    positions = {name for name in before if "posswap" in name}
    assert found == linear | extra | positions
    for name in linear:
        assert torch.linalg.matrix_rank(model.state_dict()[name] - before[name], atol=1e-5) <= 2
    count = sum(before[name].numel() for name in extra | positions)
    count += sum(2 * sum(before[name].shape) for name in linear)
    assert log.trained_parameters == count
    # an ordinary model again, and an ordinary checkpoint
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert "peft_config" not in vars(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(from_pretrained(arguments.output_dir)(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.parametrize("scheme", LORA)
def test_a_checkpoint_of_adapters_is_a_model_and_goes_on_as_the_run_did(scheme, tmp_path, arguments, tokenizer):
    pytest.importorskip("peft")
    asked = replace(arguments, train="lora", lora_rank=2, save_steps=2)
    model = LORA[scheme](llama())
    base = copy.deepcopy(model).eval()(IDS).logits
    whole = finetune(model, tokenizer, asked)
    out = Path(arguments.output_dir)
    assert torch.equal(from_pretrained(out / "base")(IDS).logits, base)
    # the last checkpoint is the model at the end, merged
    torch.testing.assert_close(from_pretrained(out / "checkpoint-4")(IDS).logits, model.eval()(IDS).logits)
    again = replace(asked, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(out / "checkpoint-2"))
    resumed, its_tokenizer = load(again)
    assert losses(finetune(resumed, its_tokenizer, again)) == losses(whole)
    assert torch.equal(resumed.eval()(IDS).logits, model(IDS).logits)
    other = replace(again, output_dir=str(tmp_path / "3"), lora_rank=3)
    with pytest.raises(PosSwapError, match="lora_rank=3 differs from the 2 of the run"):
        finetune(*load(other), other)


def test_a_failed_run_of_adapters_leaves_the_model_as_it_was(arguments, tokenizer):
    pytest.importorskip("peft")
    model = patch_model(llama(), "yarn", factor=2)
    before, kinds = copy.deepcopy(model.state_dict()), {name: type(m) for name, m in model.named_modules()}
    for change, message in (
        ({"lora_targets": ["nothing_proj"]}, r"lora_targets=\['nothing_proj'\]: "),
        ({"max_start_loss": 0.1}, "max_start_loss=0.1: the first loss"),
    ):
        with pytest.raises(PosSwapError, match=message):
            finetune(model, tokenizer, replace(arguments, train="lora", **change))
        assert {name: type(m) for name, m in model.named_modules()} == kinds
        assert not changed(model, before)
        assert model.state_dict().keys() == before.keys()
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_adapters_on_gpt2_which_keeps_its_weights_the_other_way_round(arguments, tokenizer):
    pytest.importorskip("peft")
    asked = replace(arguments, block_size=BLOCK, train="lora", lora_targets=["c_attn"], save_steps=4)
    model = gpt2()
    before = copy.deepcopy(model.state_dict())
    finetune(model, tokenizer, asked)
    assert "transformer.h.0.attn.c_attn.weight" in changed(model, before)
    last = from_pretrained(Path(arguments.output_dir, "checkpoint-4"))(IDS).logits
    torch.testing.assert_close(last, model.eval()(IDS).logits)


def test_the_card_says_how_it_was_trained(arguments, tokenizer):
    pytest.importorskip("peft")
    model = patch_model(llama(), "yarn", factor=2)
    asked = replace(arguments, train="lora", distil=0.5, curriculum=[8], curriculum_steps=2)
    log = finetune(model, tokenizer, asked, llama())
    text = card(arguments.output_dir)
    assert f"| trained | LoRA of rank 8, merged: {log.trained_parameters:,} of {log.parameters:,} parameters |" in text
    assert f"was {log.entries[0]['task_loss']:.4f}, {log.entries[-1]['task_loss']:.4f} |" in text
    assert "| curriculum | 8 tokens, 2 steps each |" in text
    assert f"| first rows | {log.start['unpatched']:.4f} before the swap" in text
    assert f"| peak memory | {log.peak_memory_gib:.2f} GiB in a process |" in text
    assert 0.05 < log.peak_memory_gib < 64


def test_a_scheme_is_fitted_to_the_training_text(arguments, texts, tokenizer, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    asked = replace(arguments, model=str(tmp_path / "base"), fit_tokens=3 * BLOCK, max_steps=1)
    scheme = make_scheme("t5", {"per_layer": True})
    model, _ = load(asked, scheme)
    rows = [tokenizer(path.read_text())["input_ids"] + [256] for path in sorted(texts.glob("*.py"))]
    ids = torch.tensor([i for row in rows if len(row) > 5 for i in row])
    drawn = torch.randperm(len(ids) // BLOCK, generator=torch.Generator().manual_seed(asked.seed))[:3]
    same = patch_model(llama(), scheme, fit=[torch.stack([ids[i * BLOCK : (i + 1) * BLOCK] for i in drawn])])
    assert describe(model).fit == describe(same).fit
    assert describe(model).fit.tokens == 3 * BLOCK
    for name, value in position_parameters(same).items():
        assert torch.equal(model.get_parameter(name), value)


@pytest.mark.parametrize(
    ("changes", "scheme", "says"),
    [
        ({"fit_tokens": BLOCK - 1}, "t5", r"fit_tokens=31: rows have 32 tokens, and the text fills \d+ of them"),
        ({"fit_tokens": 10**9}, "t5", r"give a number from 32 to \d+"),
        ({"fit_tokens": BLOCK}, "nope", "fit= was given, and nope has no parameters"),
        ({"fit_tokens": BLOCK}, None, "fit_tokens=32 was given without --scheme"),
    ],
)
def test_a_fit_that_cannot_be(changes, scheme, says, arguments, tokenizer, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    asked = replace(arguments, model=str(tmp_path / "base"), **changes)
    with pytest.raises(PosSwapError, match=says):
        load(asked, None if scheme is None else make_scheme(scheme, {}))
