"""Retrieval: prompts of the length asked for, the authors' passkey as described, greedy answers, right ones."""

from __future__ import annotations

import random
import re

import demo
import pytest
import torch

from hf_posswap import PosSwapError
from hf_posswap.evaluation import retrieve
from hf_posswap.evaluation.prompts import ASSOCIATIONS, FILLER, NAMES, TASKS, Prompt, Strict, Yarn
from hf_posswap.evaluation.retrieval import greedy, passkey_context

from .families import FAMILIES, tokens

LENGTH = 700


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte."""
    return demo.byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"].build(vocab_size=258, pad_token_id=0, bos_token_id=None, eos_token_id=1)


def read(tokenizer, prompt: Prompt) -> str:
    return tokenizer.decode(prompt.ids)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [LENGTH, 1500])
def test_prompts_fill_their_length_and_hold_what_is_asked(tokenizer, task, length):
    asker = Strict(tokenizer, task, samples=2, depths=(0.0, 0.5, 1.0))
    asked = asker.prompts(length)
    for _, prompt in asked:
        text = read(tokenizer, prompt)
        assert length - asker.slack() <= len(prompt.ids) + prompt.new_tokens <= length
        assert len(prompt.ids) == len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert not text.endswith("?")  # a base model goes on with the answer
        assert all(answer in text for answer in prompt.answers)
        assert prompt.new_tokens >= len(" and ".join(prompt.answers))
    again = Strict(tokenizer, task, samples=2, depths=(0.0, 0.5, 1.0)).prompts(length)
    assert asked == again
    other = Strict(tokenizer, task, samples=2, depths=(0.0, 0.5, 1.0), seed=1).prompts(length)
    assert asked != other


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_a_passkey_stands_at_its_depth_between_sentences(tokenizer, depth):
    prompt = Strict(tokenizer, "passkey").prompt(3000, depth, 0)
    body = read(tokenizer, prompt).split("\n")[1]
    (key,) = prompt.answers
    before, after = body.split(f"The pass key is {key}. Remember it. {key} is the pass key.")
    assert len(before) / (len(before) + len(after)) == pytest.approx(depth, abs=0.02)
    assert before.strip().startswith(" ".join(FILLER)[: len(before.strip())][:40])
    assert (before.strip() + " " + after.strip()).strip().count(FILLER[3]) > 20


def test_a_chain_of_variables_is_in_order_and_common_words_are_common(tokenizer):
    for depth in (0.0, 0.3, 1.0):
        prompt = Strict(tokenizer, "variables").prompt(1200, depth, 0)
        chain = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", read(tokenizer, prompt))
        assert [name for name, _ in chain] == list(prompt.answers)
        assert [what for _, what in chain[1:]] == list(prompt.answers[:-1])
    ((depth, prompt),) = Strict(tokenizer, "common_words", samples=1).prompts(3000)
    assert depth is None  # the whole list counts
    words = re.findall(r"\d+\. (\w+)", read(tokenizer, prompt))
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    assert {word for _, word in counts[:3]} == set(prompt.answers)
    assert counts[2][0] > 2 * counts[3][0]


def test_an_association_shares_no_word_with_its_question():
    small = {"the", "for", "has", "in", "a", "of", "to", "is", "at", "every", "could", "us", "which", "person", "an"}
    for needle, question in ASSOCIATIONS:
        said, asked = (set(re.findall(r"[a-z]+", text.lower())) - small for text in (needle.format(""), question))
        assert said
        assert asked
        assert not any(a[:4] == b[:4] for a in said for b in asked), (needle, question)
    parts = TASKS["association"](random.Random(0))
    assert parts.answers[0] in NAMES


def yarn_text(n: int, p: int, key: int) -> str:
    """Transcribed from the description of jquesnelle/yarn, eval/passkey.py."""
    garbage = " ".join(
        ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."] * 10000
    )
    task = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there."
    )
    line = f"The pass key is {key}. Remember it. {key} is the pass key."
    return "\n".join([task, garbage[:p], line, garbage[p:n], "What is the pass key? The pass key is"])


def test_yarn_prompts_are_the_transcription(tokenizer):
    asker = Yarn(tokenizer, samples=5)
    shares = []
    for sample in range(5):
        prompt = asker.prompt(2000, sample)
        text, (key,) = read(tokenizer, prompt), prompt.answers
        lines = text.split("\n")
        n, p = len(lines[1]) + len(lines[3]), len(lines[1])
        assert n % 128 == 0
        assert text == yarn_text(n, p, int(key))
        assert len(prompt.ids) < 2000 <= len(tokenizer(yarn_text(n + 128, p, int(key)))["input_ids"])
        assert 1 <= int(key) <= 50000
        shares.append(p / n)
    assert len({round(share, 2) for share in shares}) == 5
    assert prompt.new_tokens == 10


def test_what_counts_as_right(tokenizer):
    prompt = Prompt([1], ("123", "45"), 9)
    strict, yarn = Strict(tokenizer, "passkey"), Yarn(tokenizer)
    assert strict.right(prompt, " 123 and 45.") == 1
    assert strict.right(prompt, " 1234, then 45") == 0.5
    assert strict.right(Prompt([1], ("Alma",), 9), "It was ALMA!") == 1
    assert yarn.right(Prompt([1], ("123",), 9), " 0123. No, 77") == 1
    assert yarn.right(Prompt([1], ("123",), 9), " 77, no, 123") == 0
    assert yarn.right(Prompt([1], ("123",), 9), "?") == 0


def test_decoding_is_greedy_whatever_the_checkpoint_says(model):
    ids = tokens(1, 20)
    expected = ids
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    first = greedy(model, ids, 12)
    assert torch.equal(first, expected[:, 20 : 20 + first.shape[1]])
    before = dict(vars(model.generation_config))
    try:
        given = {"do_sample": True, "temperature": 9.0, "top_k": 50, "repetition_penalty": 5.0, "num_beams": 2}
        for name, value in given.items():
            setattr(model.generation_config, name, value)
        assert torch.equal(greedy(model, ids, 12), first)
    finally:
        vars(model.generation_config).update(before)


def test_points_say_what_the_model_said_and_how_long_the_prompts_were(model, tokenizer, monkeypatch):
    asker = Strict(tokenizer, "multivalue", samples=2, depths=(0.0, 1.0))
    found = retrieve(model, asker, [LENGTH], name="m")
    assert [(point["length"], point["depth"]) for point in found["points"]] == [(LENGTH, 0.0), (LENGTH, 1.0)]
    for point in found["points"]:
        prompts = [asker.prompt(LENGTH, point["depth"], k) for k in range(2)]
        sizes = [len(prompt.ids) for prompt in prompts]
        assert (point["shortest_prompt"], point["longest_prompt"], point["prompts"]) == (min(sizes), max(sizes), 2)
        losses = []
        for prompt in prompts:
            answer = tokenizer(" " + " and ".join(prompt.answers))["input_ids"]
            ids = torch.tensor([prompt.ids + answer])
            with torch.no_grad():
                spoken = model(ids).logits.double().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            losses.append(-spoken[-len(answer) :].mean().item())
        assert point["answer_loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
        assert point["accuracy"] == 0  # untrained
    answers = {tuple(p.ids): p.answers for _, p in asker.prompts(LENGTH)}

    def said(model, ids, count):
        return torch.tensor([tokenizer(" ".join(answers[tuple(ids[0].tolist())][:3]))["input_ids"]])

    monkeypatch.setattr("hf_posswap.evaluation.retrieval.greedy", said)
    assert {point["accuracy"] for point in retrieve(model, asker, [LENGTH], name="m")["points"]} == {0.75}


def test_passkey_context_is_the_greatest_length_that_passes():
    points = [{"length": n, "accuracy": a} for n, a in [(1, 1.0), (2, 0.7), (4, 0.9), (8, 0.5)]]
    assert passkey_context(points) == {"context": 4, "accuracy": pytest.approx((1.0 + 0.7 + 0.9) / 3)}
    assert passkey_context(points[3:]) == {"context": None, "accuracy": None}


def test_a_cut_or_padded_prompt_fails_the_run(model, tokenizer, monkeypatch):
    asker = Strict(tokenizer, "passkey", samples=1, depths=(0.5,))
    whole = asker.prompt(LENGTH, 0.5, 0)
    for ids in (whole.ids[40:], whole.ids * 2):
        monkeypatch.setattr(
            Strict, "prompts", lambda self, n, ids=ids: [(0.5, Prompt(ids, whole.answers, whole.new_tokens))]
        )
        with pytest.raises(
            PosSwapError, match=rf"a prompt of passkey has {len(ids)} tokens where {LENGTH} were asked for"
        ):
            retrieve(model, asker, [LENGTH], name="m")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: Strict(t, "passky"), "task='passky' is unknown; did you mean 'passkey'"),
        (lambda t: Strict(t, "passkey", samples=0), "samples=0 is not a positive integer"),
        (lambda t: Strict(t, "passkey", depths=(2,)), r"depths=\[2\] are not numbers from 0 to 1"),
        (lambda t: Strict(t, "passkey", chat=True), "chat=True: this tokenizer has no chat template"),
        (lambda t: Yarn(t, "multikey"), "protocol 'yarn' has the passkey only"),
        (
            lambda t: Strict(t, "passkey").prompts(100),
            "length=100 is too short for passkey; without any filler it takes",
        ),
    ],
)
def test_refusals(tokenizer, make, says):
    with pytest.raises(PosSwapError, match=says):
        make(tokenizer)


def test_a_chat_template_asks_and_leaves_the_beginning_out():
    tokenizer = demo.byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    text = read(tokenizer, Strict(tokenizer, "passkey", chat=True).prompt(LENGTH, 0.5, 0))
    assert text.startswith("<user>")
    assert text.endswith("What is the pass key?<assistant>")


def test_a_length_beyond_the_table_is_refused(tokenizer):
    small = FAMILIES["gpt2"].build(vocab_size=258)
    with pytest.raises(PosSwapError, match="length 700 is longer than its 32 positions"):
        retrieve(small, Strict(tokenizer, "passkey"), [LENGTH], name="m")
