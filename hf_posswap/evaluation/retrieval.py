"""Retrieval by length and depth: whether a model finds in a long text what it is asked for, greedily decoded."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PosSwapError
from ..runs import versions
from .losses import window_losses
from .prompts import Prompt, Strict, Yarn
from .protocols import Window
from .subjects import check_fits, evaluating, sample_of
from .work import Work

PASSES = 0.8  # of the prompts of a length: the YaRN authors' "passkey context" is the greatest such length


def retrieve(
    model: nn.Module, asker: Strict | Yarn, lengths: Iterable[int], *, name: str, work: Work | None = None
) -> dict[str, Any]:
    """`{"name", "stage", "seconds", "points"}`, a point per length and depth (None where the task has no depth).

    A point has `accuracy`, the mean share of right answers; `answer_loss`, nats per token of the right answer after
    the prompt, which tells models apart that never answer right; the number of prompts, and the shortest and longest
    one's real token count. Decoding is greedy whatever the checkpoint's generation config says.

    Raises PosSwapError for a prompt that is longer than its length, or that leaves room for more filler.
    """
    work, lengths, started = work or Work(), sorted(set(lengths)), time.perf_counter()
    points = []
    for length in lengths:
        asked = asker.prompts(length)
        check_fits(model, [torch.tensor(prompt.ids) for _, prompt in asked], [length], None, name)
        for _, prompt in asked:
            _check_length(prompt, length, asker)
        work.label = f"{work.label.partition(', length')[0]}, length {length}"
        key = {
            "measure": f"retrieval {asker.name}",
            "prompts": hashlib.sha256(repr(asked).encode()).hexdigest(),
            "model": sample_of(model),
            "versions": versions(),
        }
        with evaluating(model):
            found = work.map(key, [prompt for _, prompt in asked], lambda prompt: _answer(model, asker, prompt))
        for depth in dict.fromkeys(depth for depth, _ in asked):
            rows = [(prompt, one) for (at, prompt), one in zip(asked, found, strict=True) if at == depth]
            sizes = [one["tokens"] for _, one in rows]
            points.append(
                {
                    "length": length,
                    "depth": depth,
                    "accuracy": math.fsum(one["right"] for _, one in rows) / len(rows),
                    "answer_loss": math.fsum(one["loss"] for _, one in rows) / len(rows),
                    "prompts": len(rows),
                    "shortest_prompt": min(sizes),
                    "longest_prompt": max(sizes),
                    "first_answer": found[asked.index((depth, rows[0][0]))]["said"],
                }
            )
    return {"name": name, "stage": None, "seconds": round(time.perf_counter() - started, 3), "points": points}


def passkey_context(points: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The YaRN authors' two numbers: the greatest length with PASSES of the keys right, and the mean over all up to it.

    Both None where no length passes.
    """
    by_length: dict[int, list[float]] = {}
    for point in points:
        by_length.setdefault(point["length"], []).append(point["accuracy"])
    means = {length: sum(values) / len(values) for length, values in by_length.items()}
    passed = [length for length, value in means.items() if value >= PASSES]
    if not passed:
        return {"context": None, "accuracy": None}
    upto = [value for length, value in means.items() if length <= max(passed)]
    return {"context": max(passed), "accuracy": sum(upto) / len(upto)}


@torch.no_grad()
def _answer(model: nn.Module, asker: Strict | Yarn, prompt: Prompt) -> dict[str, Any]:
    ids = torch.tensor([prompt.ids], device=model.get_input_embeddings().weight.device)
    said = asker.tokenizer.decode(greedy(model, ids, prompt.new_tokens)[0], skip_special_tokens=True)
    answer = asker.tokenizer(" " + " and ".join(prompt.answers), add_special_tokens=False, verbose=False)["input_ids"]
    whole = torch.tensor(prompt.ids + answer)
    (loss,) = window_losses(model, [whole], [Window(0, 0, len(whole), len(answer))], work=Work(shared=False))
    return {"right": asker.right(prompt, said), "loss": loss / len(answer), "tokens": ids.shape[1], "said": said}


def greedy(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """The next tokens (1, up to `count`) after ids (1, S): always the likeliest, with a cache."""
    eos = model.generation_config.eos_token_id
    stop = eos[0] if isinstance(eos, list) else eos
    options = {  # what a checkpoint's own generation config may have otherwise
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "max_length": None,
        "use_cache": True,
    }
    mask = torch.ones_like(ids)
    new = model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=stop or 0, **options)
    return new[:, ids.shape[1] :]


def _check_length(prompt: Prompt, length: int, asker: Strict | Yarn) -> None:
    """A prompt is as long as fits: no longer, and shorter by less than a step of filler."""
    most = asker.room(length, prompt)
    if not most - asker.slack() <= len(prompt.ids) <= most:
        raise PosSwapError(
            f"a prompt of {asker.task} has {len(prompt.ids)} tokens where {length} were asked for; from "
            f"{most - asker.slack()} to {most} were right"
        )
