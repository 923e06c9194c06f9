"""LongRoPE's search for the factors of a model: an evolution over what its perplexity on long text says.

LongRoPE, section 3.2 and algorithm 1, https://arxiv.org/abs/2402.13753: a population that starts from linear, NTK and
YaRN, mutation and crossover, and a constraint that a slower pair of dimensions is never stretched less than a faster
one. The paper's second unknown, the number of first tokens left un-scaled, has no place in transformers' format.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import examine
from .errors import PosSwapError
from .patching import patch_model, patch_of, unpatch_model
from .planning.rotary import rotary_geometry, scaled_layer_types
from .scheme import make_scheme

STARTS = ("linear", "ntk", "yarn")


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """The settings, with the paper's values (its appendix A.3).

    population: candidates at the start. parents: those that live on after a generation. mutations, crossovers: new
    candidates per generation. generations. mutation_rate: share of the factors that a mutation changes. widest: the
    largest factor tried, in units of the context's. seed: of every draw.
    """

    population: int = 64
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16
    generations: int = 40
    mutation_rate: float = 0.3
    widest: float = 1.25
    seed: int = 0

    def __post_init__(self) -> None:
        for argument in ("population", "parents", "mutations", "crossovers", "generations"):
            value = getattr(self, argument)
            if type(value) is not int or value < 1:
                raise PosSwapError(f"{argument}={value!r} is not a positive integer")
        if self.population < len(STARTS):
            raise PosSwapError(f"population={self.population} does not hold the {len(STARTS)} starts")
        if not 0 < self.mutation_rate <= 1:
            raise PosSwapError(f"mutation_rate={self.mutation_rate!r} is not a share between 0 and 1")
        if self.widest < 1:
            raise PosSwapError(f"widest={self.widest!r} is less than 1: the context's own factor must be in reach")


@dataclass
class Found:
    """What a search found. factors: R / 2 numbers, for `long_factor`. loss: nats per token with them; `starts`: with
    the factors of the other schemes (and LongRoPE's temperature). history: the best loss after every generation."""

    factors: list[float]
    loss: float
    factor: float
    starts: dict[str, float]
    history: list[float] = field(default_factory=list)


def search_factors(
    model: nn.Module,
    tokens: Tensor,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    settings: Evolution | None = None,
    state_file: Path | None = None,
    progress: Callable[[Any], Any] = iter,
) -> Found:
    """The factors of every pair of dimensions with which `model` reads `tokens` best; the model is left as it was.

    Args:
        model: a causal rotary model that is not patched.
        tokens: ids (samples, length) of text as long as the target.
        factor, target_length: how far to extend, as for any scaling scheme; give one.
        settings: of the evolution, the paper's where None.
        state_file: written after every generation; a search that finds it goes on from there.
        progress: wraps the iterable of generations, tqdm for one.

    Raises:
        PosSwapError: a model that is patched or takes no longrope, tokens that are shorter than the target, a state
            file of another search.
    """
    settings = settings or Evolution()
    if patch_of(model) is not None:
        raise PosSwapError("model is patched; unpatch_model(model) first: factors are searched from the un-scaled rope")
    factor = _resolve(model, tokens, factor, target_length)
    rng, measured = random.Random(settings.seed), {}

    def loss_of(candidate: tuple[float, ...]) -> float:
        if candidate not in measured:
            measured[candidate] = _loss(model, tokens, factor, candidate)
        return measured[candidate]

    identity = _identity(model, tokens, factor, settings)
    state = _read_state(state_file, identity)
    if state is None:
        starts = {name: _factors_of(model, name, factor) for name in STARTS}
        start_losses = {name: loss_of(candidate) for name, candidate in starts.items()}
        population = list(starts.values())
        while len(population) < settings.population:
            population.append(_mutated(rng.choice(list(starts.values())), settings, factor, rng))
        history: list[float] = []
    else:
        start_losses, history = state["starts"], state["history"]
        population = [tuple(candidate) for candidate, _ in state["population"]]
        measured.update({tuple(candidate): loss for candidate, loss in state["population"]})
        version, numbers, rest = state["random"]
        rng.setstate((version, tuple(numbers), rest))

    for _ in progress(range(len(history), settings.generations)):
        parents = sorted(set(population), key=lambda c: (loss_of(c), c))[: settings.parents]
        children = [_mutated(rng.choice(parents), settings, factor, rng) for _ in range(settings.mutations)]
        children += [_crossed(rng.choice(parents), rng.choice(parents), rng) for _ in range(settings.crossovers)]
        population = parents + children
        history.append(min(loss_of(c) for c in population))
        survivors = [[list(c), loss_of(c)] for c in population]
        _write_state(
            state_file,
            {"identity": identity, "starts": start_losses, "history": history}
            | {"population": survivors, "random": rng.getstate()},
        )
    best = min(set(population), key=lambda c: (loss_of(c), c))
    return Found(list(best), loss_of(best), factor, start_losses, history)


# --- candidates: tuples of R / 2 factors that do not fall, from 1 to widest * factor


def _mutated(parent: tuple[float, ...], settings: Evolution, factor: float, rng: random.Random) -> tuple[float, ...]:
    """Some factors drawn anew between their neighbours' bounds: the constraint holds without rejecting anything."""
    child = list(parent)
    for i in range(len(child)):
        if rng.random() < settings.mutation_rate:
            above = child[i + 1] if i + 1 < len(child) else settings.widest * factor
            below = child[i - 1] if i else 1.0
            child[i] = round(rng.uniform(below, max(above, below)), 4)
    return _ordered(child)


def _crossed(mother: tuple[float, ...], father: tuple[float, ...], rng: random.Random) -> tuple[float, ...]:
    """Each factor from one parent or the other."""
    return _ordered([rng.choice(pair) for pair in zip(mother, father, strict=True)])


def _ordered(factors: list[float]) -> tuple[float, ...]:
    return tuple(accumulate(factors, max))


def _factors_of(model: nn.Module, name: str, factor: float) -> tuple[float, ...]:
    """The factors that make longrope's frequencies those of another scheme."""
    patch_model(model, "longrope", factor=factor, long_factor=[1.0] * _pairs(model))
    plain = _frequencies(model)
    patch_model(model, name, factor=factor)
    scaled = _frequencies(model)
    unpatch_model(model)
    return _ordered([round(max(1.0, f), 4) for f in (plain / scaled).tolist()])


def _frequencies(model: nn.Module) -> Tensor:
    site = examine(model).rotary
    layer_type = scaled_layer_types(site, make_scheme("linear", {"factor": 2}))[0]
    name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
    return next(iter(site.modules.values())).get_buffer(name).double().clone()


def _pairs(model: nn.Module) -> int:
    return len(_frequencies(model))


def _loss(model: nn.Module, tokens: Tensor, factor: float, candidate: tuple[float, ...]) -> float:
    """Nats per token, the mean over samples."""
    patch_model(model, "longrope", factor=factor, long_factor=candidate)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            losses = [model(input_ids=t[None], labels=t[None], use_cache=False).loss.item() for t in tokens]
    finally:
        model.train(training)
        unpatch_model(model)
    return sum(losses) / len(losses)


# --- what is asked, and where a search stands


def _resolve(model: nn.Module, tokens: Tensor, factor: float | None, target_length: int | None) -> float:
    anatomy = examine(model)
    if anatomy.rotary is None:
        raise PosSwapError(f"model={type(model).__name__} has no rotary site; longrope needs one")
    scheme = make_scheme("linear", {"factor": factor, "target_length": target_length})
    trained = rotary_geometry(anatomy, scaled_layer_types(anatomy.rotary, scheme)[0]).length
    factor = float(factor) if factor is not None else target_length / trained
    if factor <= 1:
        raise PosSwapError(f"factor={factor:g} extends nothing; the model was trained at {trained} tokens")
    length = target_length or int(trained * factor)
    if tokens.dim() != 2 or tokens.shape[1] < length:
        raise PosSwapError(
            f"tokens={tuple(tokens.shape)}: a search for {length} tokens needs text of (samples, {length}); "
            "give longer text or a smaller target_length"
        )
    return factor


def _identity(model: nn.Module, tokens: Tensor, factor: float, settings: Evolution) -> str:
    """What a search depends on: model, text, factor and settings, but for the number of generations."""
    digest = hashlib.sha256(tokens.cpu().numpy().tobytes())
    digest.update(model.get_input_embeddings().weight.detach().float().cpu().numpy().tobytes())
    digest.update(json.dumps([factor, asdict(settings) | {"generations": None}], sort_keys=True).encode())
    return digest.hexdigest()


def _read_state(path: Path | None, identity: str) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    try:
        state = json.loads(path.read_text())
        found = state["identity"]
    except (ValueError, TypeError, KeyError) as error:
        raise PosSwapError(f"state_file={str(path)!r} is not the state of a search: {error}") from error
    if found != identity:
        raise PosSwapError(
            f"state_file={str(path)!r} is of a search with another model, text, factor or setting; name another file"
        )
    return state


def _write_state(path: Path | None, state: dict[str, Any]) -> None:
    if path is None:
        return
    from .runs import replacing

    with replacing(path) as temporary:
        temporary.write_text(json.dumps(state))
