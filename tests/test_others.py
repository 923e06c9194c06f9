"""Life with others: what people do to a model after a swap gives what the swapped model gives. Absent packages skip."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

from hf_posswap import PosSwapError, from_pretrained, patch_model, probe, unpatch_model

from .families import FAMILIES, tokens
from .rows import Row, logits

# what the others still call by an older name is theirs to change
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")


@pytest.fixture(autouse=True)
def deprecations():
    """As above: transformers 5.17's own pipeline calls `generate` in a way that it announces the end of."""


NATIVE = Row("yarn", "llama", {"factor": 4})
PORTABLE = Row("alibi", "llama", native=False)
LEARNS = Row("t5", "llama", native=False)
both = pytest.mark.parametrize("row", [NATIVE, PORTABLE], ids=lambda row: row.id)
swaps = pytest.mark.parametrize("row", [NATIVE, PORTABLE, LEARNS], ids=lambda row: row.id)
IDS = tokens(2, 40)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: 258 of them."""
    import demo

    return demo.byte_tokenizer()


def of_bytes(row: Row) -> torch.nn.Module:
    """The row's model with room for the byte tokenizer's ids, patched."""
    return row.patched(vocab_size=258, pad_token_id=0, bos_token_id=None, eos_token_id=1)


def lora(model: torch.nn.Module) -> torch.nn.Module:
    """The model under an adapter that changes it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    return peft.get_peft_model(model, settings).eval()


@swaps
def test_peft_adapter_is_saved_and_reloaded_on_the_reloaded_base(row: Row, tmp_path: Path):
    peft = pytest.importorskip("peft")
    model = row.patched()
    model.save_pretrained(tmp_path / "base")
    adapted = lora(model)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted, input_ids=IDS)
    base = from_pretrained(tmp_path / "base")
    assert not torch.equal(logits(base, input_ids=IDS), expected)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(again, input_ids=IDS), expected)


@swaps
def test_peft_adapter_of_a_saved_base_is_loaded_with_it(row: Row, tmp_path: Path):
    row.patched().save_pretrained(tmp_path / "base")
    adapted = lora(from_pretrained(tmp_path / "base"))
    adapted.save_pretrained(tmp_path / "adapter")
    again = from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(again, input_ids=IDS), logits(adapted, input_ids=IDS))


@both
def test_peft_adapter_beside_the_config_is_loaded_onto_the_unpatched_base(row: Row, tmp_path: Path):
    """As one adapts a model of the hub: only the adapter and the config are published."""
    row.source().save_pretrained(tmp_path / "base")
    model = row.patch(from_pretrained(tmp_path / "base"))
    adapted = lora(model)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.config.save_pretrained(tmp_path / "adapter")
    again = from_pretrained(tmp_path / "adapter", dtype=torch.float32).eval()
    assert torch.equal(logits(again, input_ids=IDS), logits(adapted, input_ids=IDS))


@pytest.mark.parametrize(
    "row", [LEARNS, Row("rope", "opt", {"fit": [IDS[:, :20]]}, native=False)], ids=lambda row: row.id
)
def test_peft_adapter_is_refused_on_a_base_without_the_parameters_of_its_swap(row: Row, tmp_path: Path):
    """Or without the weights that text chose."""
    row.source().save_pretrained(tmp_path / "base")
    adapted = lora(row.patch(from_pretrained(tmp_path / "base")))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.config.save_pretrained(tmp_path / "adapter")
    with pytest.raises(PosSwapError, match="save the patched base"):
        from_pretrained(tmp_path / "adapter")


def test_peft_adapter_is_refused_on_a_base_with_another_swap(tmp_path: Path):
    NATIVE.patched().save_pretrained(tmp_path / "base")
    adapted = lora(patch_model(from_pretrained(tmp_path / "base"), "linear", factor=2))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.config.save_pretrained(tmp_path / "adapter")
    with pytest.raises(PosSwapError, match=r"linear.*yarn"):
        from_pretrained(tmp_path / "adapter")


def test_peft_adapter_without_a_base_is_refused(tmp_path: Path):
    lora(NATIVE.patched()).save_pretrained(tmp_path)
    with pytest.raises(PosSwapError, match="names no base"):
        from_pretrained(tmp_path)


@swaps
def test_peft_adapter_is_merged_saved_and_reloaded(row: Row, tmp_path: Path):
    merged = lora(row.patched()).merge_and_unload()
    merged.save_pretrained(tmp_path)
    reloaded = from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded, input_ids=IDS), logits(merged, input_ids=IDS))
    assert probe(reloaded).ok


def by_torchao():
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


def by_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True)


@pytest.mark.parametrize("quantised", [by_torchao, by_bitsandbytes])
def test_quantised_base_takes_a_swap_of_its_config_and_refuses_one_of_its_weights(quantised, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    FAMILIES["llama"].build().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised(), dtype=torch.float32)
    before = logits(model, input_ids=IDS)
    with pytest.raises(PosSwapError, match="quantised"):
        patch_model(model, "rope", pairing="interleaved")
    assert torch.equal(logits(model, input_ids=IDS), before)
    patch_model(model, "yarn", factor=4)
    assert probe(model).ok
    assert not torch.equal(logits(model, input_ids=IDS), before)
    assert torch.equal(logits(unpatch_model(model), input_ids=IDS), before)


@both
def test_torch_compile(row: Row):
    model = row.patched()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, input_ids=IDS), logits(model, input_ids=IDS))


@swaps
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_live_apart(row: Row, way):
    model = row.patched()
    expected = logits(model, input_ids=IDS)
    twin = way(model)
    assert torch.equal(logits(twin, input_ids=IDS), expected)
    patch_model(twin, "linear", factor=2)
    assert torch.equal(
        logits(twin, input_ids=IDS), logits(Row("linear", "llama", {"factor": 2}).patched(), input_ids=IDS)
    )
    assert torch.equal(logits(model, input_ids=IDS), expected)


@swaps
def test_torch_save_of_the_whole_model(row: Row):
    model, file = row.patched(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False), input_ids=IDS), logits(model, input_ids=IDS))


@both
def test_pipeline_and_generate_agree(row: Row, tokenizer):
    model, text = of_bytes(row), "def swap(model):"
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    asked = {"max_new_tokens": 50, "do_sample": False}
    generated = model.generate(**inputs, **asked)
    whole = logits(model, input_ids=generated)[0, inputs["input_ids"].shape[1] - 1 : -1].argmax(-1)
    assert generated.shape[1] > 40  # beyond what the model was trained at
    assert torch.equal(whole, generated[0, inputs["input_ids"].shape[1] :])
    (said,) = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, **asked)
    assert said["generated_text"] == tokenizer.decode(generated[0], skip_special_tokens=True)


@pytest.mark.parametrize("scheme", ["learned", "sinusoidal"])
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_sentence_transformers_loads_a_patched_bert(scheme: str, tokenizer, tmp_path: Path):
    sentence = pytest.importorskip("sentence_transformers")
    model = FAMILIES["bert"].build(vocab_size=258, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    patch_model(model, scheme, tokenizer=tokenizer, max_positions=80)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = sentence.SentenceTransformer(str(tmp_path), device="cpu")
    assert encoder.max_seq_length == 80
    text = "positions " * 7
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    assert 32 < inputs["input_ids"].shape[1] <= 80
    with torch.no_grad():
        expected = model.base_model(**inputs).last_hidden_state.mean(1)[0]
    torch.testing.assert_close(torch.tensor(encoder.encode(text)), expected)


@both
def test_lm_eval_takes_the_model_in_memory(row: Row, tokenizer):
    """Its log-likelihoods are the model's own, of a text longer than the model was trained at."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = of_bytes(row)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    assert harness.max_length == (128 if row is NATIVE else 32)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", max_length=128)
    context, continuation = " the swap of positions in a model that" * 2, " was trained"
    request = Instance("loglikelihood", {}, (context, continuation), 0)
    ((found, _),) = harness.loglikelihood([request], disable_tqdm=True)
    ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
    spoken = logits(model, input_ids=ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    assert found == pytest.approx(float(spoken[-len(continuation) :].sum()), rel=1e-4)


def train(trainer) -> Path:
    """Two steps; the folder of the checkpoint that the trainer wrote by itself."""
    trainer.train()
    return Path(trainer.args.output_dir) / "checkpoint-2"


TWO_STEPS = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}


@swaps
def test_trainer_trains_it_and_its_checkpoint_loads(row: Row, tmp_path: Path):
    model = row.patched()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 48)]
    checkpoint = train(Trainer(model, TrainingArguments(str(tmp_path), **TWO_STEPS, **QUIET), train_dataset=rows))
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    reloaded = from_pretrained(checkpoint)
    assert torch.equal(logits(reloaded, input_ids=IDS), logits(model.eval(), input_ids=IDS))


@swaps
def test_sft_trainer_trains_it_and_its_checkpoint_loads(row: Row, tokenizer, tmp_path: Path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    model = of_bytes(row)
    before = logits(model, input_ids=IDS)
    texts = Dataset.from_dict({"text": ["the positions of a model", "are swapped, then trained"] * 4})
    settings = trl.SFTConfig(str(tmp_path), max_length=64, bf16=False, **TWO_STEPS, **QUIET)
    checkpoint = train(trl.SFTTrainer(model, settings, train_dataset=texts, processing_class=tokenizer))
    after = logits(model.eval(), input_ids=IDS)
    assert not torch.equal(after, before)
    assert torch.equal(logits(from_pretrained(checkpoint), input_ids=IDS), after)
