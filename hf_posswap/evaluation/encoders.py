"""What a longer context does to a text encoder: pseudo-perplexity, finding a sentence, and short texts as before.

Letters: B rows in a batch, L tokens of a text, special ones included, E width of an embedding.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PosSwapError
from ..runs import versions
from .perplexity import fingerprint
from .subjects import check_fits, evaluating, sample_of, takes
from .work import Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (what is hidden in the text, how it is asked for)
NEEDLES = [
    ("The lighthouse keeper fed seven grey cats every evening.", "Who looked after the cats at the lighthouse?"),
    ("Our bakery sells sourdough bread only on Thursdays.", "On which day can I buy sourdough?"),
    ("The old bridge over the river was closed after the flood.", "Why can nobody cross the river any more?"),
    ("My grandmother repaired violins in a small village.", "Who fixed musical instruments?"),
    ("The expedition reached the summit just before the storm.", "When did the climbers get to the mountain top?"),
    ("A purple comet was visible for three nights in March.", "What could be seen in the sky in spring?"),
    ("The museum lost its oldest painting in a fire.", "Which artwork was destroyed by flames?"),
    ("Doctors advised the sailor to eat more lemons.", "Which fruit was recommended to the seaman?"),
    ("The football team travelled home by night train.", "How did the players return?"),
    ("Farmers planted garlic between the rows of roses.", "What vegetable grows beside the flowers?"),
]
DEPTH = 0.75  # where in a long text the sentence stands


def pseudo_perplexity(
    model: nn.Module,
    documents: Sequence[Tensor],
    lengths: Iterable[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    targets: int = 64,
    batch_size: int = 1,
    name: str,
    upto: int | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """`{"name", "stage", "seconds", "points"}` of a masked model: loss (nats per token), pseudo-perplexity.

    Every target is masked by itself and predicted from the length - b tokens around it, b special ones beside them
    (Salazar and others, 2020, https://arxiv.org/abs/1910.14659). The same targets at every length, spread evenly over
    those that have the greatest length around them. upto: the longest length that this model is measured at.

    Raises PosSwapError where no document is long enough, or the tokenizer has no mask.
    """
    work, started = work or Work(), time.perf_counter()
    if tokenizer.mask_token_id is None:
        raise PosSwapError("tokenizer: it has no mask token; pseudo-perplexity is of masked language models")
    start, stop = special_tokens(tokenizer)
    around = {length: length - len(start) - len(stop) for length in sorted(set(lengths))}
    most, least = max(around.values()), min(around.values())
    if least < 2:
        raise PosSwapError(f"lengths={[*around]}: {min(around)} tokens leave no neighbours beside the special ones")
    places = [
        (i, p) for i, document in enumerate(documents) for p in range(most // 2, len(document) - (most + 1) // 2 + 1)
    ]
    places = [(i, p) for i, p in places if p < len(documents[i])]
    if not places:
        longest = max(map(len, documents))
        raise PosSwapError(
            f"no document is long enough: length={max(around)} needs {most} tokens and the longest has {longest}"
        )
    places = places[:: max(1, len(places) // targets)][:targets]
    points = []
    for length, size in around.items():
        if upto is not None and length > upto:
            continue
        check_fits(model, documents, [length], tokenizer.mask_token_id, name)
        rows = [(documents[i][p - size // 2 : p - size // 2 + size], size // 2) for i, p in places]
        batches = [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]

        def compute(batch: list[tuple[Tensor, int]]) -> list[float]:
            ids = torch.stack([torch.cat([torch.tensor(start), row, torch.tensor(stop)]).long() for row, _ in batch])
            return _masked_losses(model, ids, len(start) + batch[0][1], tokenizer.mask_token_id)

        key = {"measure": "pseudo-perplexity", "places": places, "length": length, "batch_size": batch_size}
        key |= {"model": sample_of(model), "documents": fingerprint(documents)["sha256"], "versions": versions()}
        with evaluating(model):
            losses = [loss for batch in work.map(key, batches, compute) for loss in batch]
        loss = math.fsum(losses) / len(losses)
        points.append({"length": length, "loss": loss, "perplexity": math.exp(loss), "targets": len(losses)})
    return {"name": name, "stage": None, "seconds": round(time.perf_counter() - started, 3), "points": points}


def find_sentence(
    model: nn.Module,
    filler: Sequence[int],
    lengths: Iterable[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    cut: int | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """`{"name", "stage", "seconds", "points"}`: is the right one of texts that differ in one sentence nearest to a
    question about it; the sentence stands at three quarters of the text.

    filler: token ids of a long text. A point has `accuracy`, the share of questions whose text is nearest (chance 1 in
    10), and `reciprocal_rank`. cut: read the first so many tokens only, as a model that ends there must; recorded.
    """
    work, started, points = work or Work(), time.perf_counter(), []
    hidden = [tokenizer(needle, add_special_tokens=False)["input_ids"] for needle, _ in NEEDLES]
    asked = [wrapped(tokenizer, tokenizer(question, add_special_tokens=False)["input_ids"]) for _, question in NEEDLES]
    for length in sorted(set(lengths)):
        texts = [wrapped(tokenizer, hide(filler, needle, length - special_count(tokenizer))) for needle in hidden]
        if any(len(text) != length for text in texts):
            raise PosSwapError(f"length={length} needs more text than the {len(filler)} tokens that were given")
        texts = [text[:cut] for text in texts]
        key = {"measure": "find a sentence", "texts": texts, "asked": asked}
        key |= {"model": sample_of(model), "versions": versions()}
        with evaluating(model):
            vectors = torch.tensor(work.map(key, [*asked, *texts], lambda ids: embed(model, ids).tolist()))
        places = ranks(vectors[: len(asked)], vectors[len(asked) :])
        points.append(
            {
                "length": length,
                "accuracy": sum(rank == 1 for rank in places) / len(places),
                "reciprocal_rank": sum(1 / rank for rank in places) / len(places),
                "tokens_read": len(texts[0]),
            }
        )
    return {"name": name, "stage": None, "seconds": round(time.perf_counter() - started, 3), "points": points}


def similarity_shift(
    model: nn.Module, base: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase, *, name: str, work: Work | None = None
) -> dict[str, Any]:
    """What a swap does to short texts: `vector`, 1 - cosine between a text's embedding and the base's of it; and
    `similarity`, the mean change of the cosine between two texts. Means over the sentences and questions above.

    base: what `short_vectors` gives for the unpatched model.
    """
    vectors = short_vectors(model, tokenizer, work)
    before, after = torch.stack([*base]), torch.stack(vectors)
    pairs = torch.triu_indices(len(after), len(after), 1).unbind()
    change = ((after @ after.T)[pairs] - (before @ before.T)[pairs]).abs().mean()
    shift = (1 - (after * before).sum(-1)).mean()
    longest = max(len(wrapped(tokenizer, tokenizer(t, add_special_tokens=False)["input_ids"])) for t in _short())
    return {"name": name, "length": longest, "vector": float(shift), "similarity": float(change)}


def short_vectors(model: nn.Module, tokenizer: PreTrainedTokenizerBase, work: Work | None = None) -> list[Tensor]:
    """The embeddings (E,) of the sentences and questions above, as float64."""
    texts = [wrapped(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in _short()]
    key = {"measure": "short texts", "texts": texts, "model": sample_of(model), "versions": versions()}
    with evaluating(model):
        found = (work or Work()).map(key, texts, lambda ids: embed(model, ids).tolist())
    return [torch.tensor(vector, dtype=torch.float64) for vector in found]


@torch.no_grad()
def embed(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """The sentence embedding (E,): mean of the last hidden states, of length 1, as sentence-transformers makes it."""
    states = model.base_model(torch.tensor([[*ids]], device=model.device)).last_hidden_state[0]
    return unit(states.mean(0).cpu().double())


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def hide(filler: Sequence[int], needle: Sequence[int], length: int) -> list[int]:
    """`length` tokens of a text, the same but for one sentence at DEPTH."""
    where = int(DEPTH * length)
    return [*filler[:where], *needle, *filler[where:]][:length]


def wrapped(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    start, stop = special_tokens(tokenizer)
    return [*start, *ids, *stop]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after one text."""
    inside = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    at = next(i for i in range(len(whole)) if whole[i : i + len(inside)] == inside)
    return whole[:at], whole[at + len(inside) :]


def special_count(tokenizer: PreTrainedTokenizerBase) -> int:
    return sum(map(len, special_tokens(tokenizer)))


def ranks(queries: Tensor, documents: Tensor) -> list[float]:
    """Rank of the right document for every query; equal ones share the mean of their places."""
    scores = queries @ documents.T
    right = scores.diagonal()[:, None]
    above = (scores > right + 1e-6).sum(1)
    level = ((scores - right).abs() <= 1e-6).sum(1)
    return (above + (level + 1) / 2).tolist()


def shuffled(ids: Sequence[int], start: int) -> list[int]:
    """Everything from `start` on in another order, but for the first and last token."""
    start = max(1, min(start, len(ids) - 1))
    middle = list(ids[start:-1])
    random.Random(0).shuffle(middle)
    return [*ids[:start], *middle, *ids[-1:]]


def _short() -> list[str]:
    return [needle for needle, _ in NEEDLES] + [question for _, question in NEEDLES]


@torch.no_grad()
def _masked_losses(model: nn.Module, ids: Tensor, place: int, mask: int) -> list[float]:
    """-log p of the token at `place` of each row (B, L) where it is masked."""
    ids = ids.to(model.device)
    answers, asked = ids[:, place].clone(), ids.clone()
    asked[:, place] = mask
    options = {"attention_mask": torch.ones_like(asked)} if takes(model, "attention_mask") else {}
    logits = model(input_ids=asked, **options).logits[:, place]
    return F.cross_entropy(logits.double(), answers, reduction="none").tolist()
