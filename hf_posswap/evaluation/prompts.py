"""Prompts whose answer lies somewhere in a long text: what is hidden, what is asked, and of how many tokens.

Every prompt ends with the beginning of its answer, which a base model goes on with; with a chat template it ends with
the question instead. A prompt is as long as fits: its tokens, and those of the answer, fill the length that was asked
for but for less than one sentence of filler. Nothing is cut. The sentences are this package's own, but for the
passkey's, which everybody uses (https://arxiv.org/abs/2305.16300).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import PosSwapError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
# (what is said of somebody, how he is asked for): a question shares no word of meaning with its needle
ASSOCIATIONS = (
    ("{} lives next door to the Eiffel Tower.", "Which person could easily visit Paris?"),
    ("{} has not eaten meat for ten years.", "Which person is a vegetarian?"),
    ("{} was born without hearing.", "Which person is deaf?"),
    ("{} teaches algebra to children.", "Which person knows mathematics?"),
    ("{} walks along the beach of Bondi every morning.", "Which person is in Australia?"),
    ("{} sings soprano at La Scala.", "Which person works in an opera house?"),
    ("{} repairs teeth for a living.", "Which person is a dentist?"),
    ("{} keeps bees behind the barn.", "Which person could give us honey?"),
)
NAMES = ("Alma", "Boris", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Irina", "Jonas", "Kenji", "Lucia")
WORDS = (
    *("anchor", "basket", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "magnet", "needle", "orange", "pencil", "quarry", "ribbon", "saddle", "tunnel", "umbrella", "violin"),
    *("window", "yellow", "zipper", "button", "copper", "dragon", "feather", "glacier", "harbour", "lantern"),
)


@dataclass(frozen=True)
class Prompt:
    """Token ids, the answers that are right (all of them are asked for), and what the answer begins with."""

    ids: list[int]
    answers: tuple[str, ...]
    new_tokens: int


@dataclass(frozen=True)
class Parts:
    """A prompt before it has its length: what comes first, what is hidden and in what, the question.

    filler(i): the i-th sentence of an endless text. hidden: sentences, in the order in which they stand.
    """

    head: str
    hidden: tuple[str, ...]
    filler: Callable[[int], str]
    question: str
    answer: str
    answers: tuple[str, ...]

    def text(self, sentences: int, depth: float) -> str:
        """The text with so many sentences of filler: what is hidden is spread around `depth` of them, 0 to 1."""
        text = [self.filler(i) for i in range(sentences)]
        # one needle stands at its depth; several at as many depths, evenly apart, turned by it
        places = sorted(
            round(sentences * ((depth + k / len(self.hidden)) % (1 + 1e-9))) for k in range(len(self.hidden))
        )
        for place, sentence in reversed([*zip(places, self.hidden, strict=True)]):
            text.insert(place, sentence)
        return " ".join(text)


def _sentence(i: int) -> str:
    return FILLER[i % len(FILLER)]


def passkey(draw: random.Random) -> Parts:
    """One number in a text of five sentences that repeat."""
    key = str(draw.randint(10000, 99999))
    return Parts(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information there.",
        (f"The pass key is {key}. Remember it. {key} is the pass key.",),
        _sentence,
        "What is the pass key?",
        "The pass key is",
        (key,),
    )


def multikey(draw: random.Random) -> Parts:
    """Four numbers under four names; one is asked for."""
    words = draw.sample(WORDS, 4)
    numbers = [str(draw.randint(10000, 99999)) for _ in words]
    return Parts(
        "Some numbers are hidden in the text below, each under a name. Memorize them.",
        tuple(f"The number of {word} is {number}." for word, number in zip(words, numbers, strict=True)),
        _sentence,
        f"What is the number of {words[0]}?",
        f"The number of {words[0]} is",
        (numbers[0],),
    )


def multivalue(draw: random.Random) -> Parts:
    """Four numbers under one name; all are asked for."""
    word, numbers = draw.choice(WORDS), tuple(str(draw.randint(10000, 99999)) for _ in range(4))
    return Parts(
        "Some numbers are hidden in the text below, all under one name. Memorize them.",
        tuple(f"One of the numbers of {word} is {number}." for number in numbers),
        _sentence,
        f"What are all the numbers of {word}?",
        f"The numbers of {word} are",
        numbers,
    )


def variables(draw: random.Random) -> Parts:
    """A chain of assignments through the text; every name that holds the value is asked for."""
    names = tuple("".join(draw.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 5)) for _ in range(4))
    value = str(draw.randint(10000, 99999))
    given = (value, *(f"VAR {name}" for name in names))
    return Parts(
        "Variables are assigned in the text below. Follow their values.",
        tuple(f"VAR {name} = {what}." for name, what in zip(names, given, strict=False)),
        _sentence,
        f"Which variables hold the value {value}?",
        f"The variables that hold the value {value} are",
        names,
    )


def common_words(draw: random.Random) -> Parts:
    """A list of words of which three come four times as often as each other; they are asked for."""
    words = draw.sample(WORDS, len(WORDS))
    common, others = words[:3], words[3:]
    seed = draw.random()

    def filler(i: int) -> str:
        turn = [*common * 4, *others]
        random.Random(f"{seed} {i // len(turn)}").shuffle(turn)
        return f"{i + 1}. {turn[i % len(turn)]}"

    return Parts(
        "Below is a numbered list of words. Some of them come more often than all others. Memorize these.",
        (),
        filler,
        "Which three words come most often in the list?",
        "The three words that come most often are",
        tuple(common),
    )


def association(draw: random.Random) -> Parts:
    """A fact whose question shares no word with it (after NoLiMa, https://arxiv.org/abs/2502.05167)."""
    needle, question = draw.choice(ASSOCIATIONS)
    name = draw.choice(NAMES)
    return Parts(
        "Read the text below; there will be a question about a person in it.",
        (needle.format(name),),
        _sentence,
        question,
        "The name of that person is",
        (name,),
    )


TASKS: dict[str, Callable[[random.Random], Parts]] = {
    "passkey": passkey,
    "multikey": multikey,
    "multivalue": multivalue,
    "variables": variables,
    "common_words": common_words,
    "association": association,
}


@dataclass(frozen=True)
class Strict:
    """Seeded prompts over a grid of depths; what is hidden stands between sentences."""

    name: ClassVar[str] = "strict"
    tokenizer: PreTrainedTokenizerBase
    task: str
    samples: int = 4
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    seed: int = 0
    chat: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise PosSwapError(f"task={self.task!r} is unknown; {nearest(self.task, TASKS)}")
        _check_count("samples", self.samples)
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise PosSwapError(f"depths={list(self.depths)} are not numbers from 0 to 1")
        if self.chat and not self.tokenizer.chat_template:
            raise PosSwapError("chat=True: this tokenizer has no chat template; a base model is asked without it")

    def prompts(self, length: int) -> list[tuple[float | None, Prompt]]:
        """(depth, prompt) for every depth and sample; the same answers at every length and depth."""
        # nothing is hidden at one place where the whole list counts
        depths = self.depths if TASKS[self.task](random.Random(0)).hidden else [None]
        return [(depth, self.prompt(length, depth, k)) for depth in depths for k in range(self.samples)]

    def prompt(self, length: int, depth: float | None, sample: int) -> Prompt:
        parts = TASKS[self.task](random.Random(f"{self.task} {self.seed} {sample}"))
        spoken = self._tokens(" " + " and ".join(parts.answers))
        new_tokens = len(spoken) + 4  # some words that a model may say first

        def ids(sentences: int) -> list[int]:
            text = parts.text(sentences, depth or 0.0)
            if self.chat:
                asked = [{"role": "user", "content": f"{parts.head}\n{text}\n{parts.question}"}]
                whole = self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
                return self._tokens(whole)
            return self._start() + self._tokens(f"{parts.head}\n{text}\n{parts.question} {parts.answer}")

        return Prompt(_longest(ids, length - new_tokens, length, self.task), parts.answers, new_tokens)

    @staticmethod
    def room(length: int, prompt: Prompt) -> int:
        """The most tokens that a prompt may have."""
        return length - prompt.new_tokens

    def slack(self) -> int:
        """Tokens by which it may have less: one sentence of filler, and what a tokenizer makes of its ends."""
        return max(len(self._tokens(f" {text}")) for text in (*FILLER, "1000. umbrella")) + 4

    def right(self, prompt: Prompt, said: str) -> float:
        """The share of the answers that the new text holds, each as a word of its own."""
        found = [re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", said, re.IGNORECASE) for answer in prompt.answers]
        return sum(map(bool, found)) / len(found)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]

    def _start(self) -> list[int]:
        from .data import window_bos

        bos = window_bos(self.tokenizer, "strict")
        return [] if bos is None else [bos]


@dataclass(frozen=True)
class Yarn:
    """The passkey of jquesnelle/yarn's `eval/passkey.py`: the needle at any character of the filler, the key of one to
    five digits, the filler grown by 128 characters. Seeded and greedy here; theirs is neither.
    """

    name: ClassVar[str] = "yarn"
    tokenizer: PreTrainedTokenizerBase
    task: str = "passkey"
    samples: int = 20
    seed: int = 0

    STEP: ClassVar[int] = 128
    NEW_TOKENS: ClassVar[int] = 10

    def __post_init__(self) -> None:
        if self.task != "passkey":
            raise PosSwapError(f"task={self.task!r}: protocol 'yarn' has the passkey only; choose protocol 'strict'")
        _check_count("samples", self.samples)

    def prompts(self, length: int) -> list[tuple[None, Prompt]]:
        return [(None, self.prompt(length, k)) for k in range(self.samples)]

    def prompt(self, length: int, sample: int) -> Prompt:
        draw = random.Random(f"yarn {self.seed} {sample}")
        share, key = draw.random(), str(draw.randint(1, 50000))

        def ids(steps: int) -> list[int]:
            return self.tokenizer(self.text(steps * self.STEP, share, key), truncation=False, verbose=False)[
                "input_ids"
            ]

        return Prompt(_longest(ids, length - 1, length, self.task), (key,), self.NEW_TOKENS)

    @staticmethod
    def room(length: int, prompt: Prompt) -> int:
        """The most tokens that a prompt may have: theirs does not count the answer."""
        return length - 1

    def slack(self) -> int:
        step = " ".join(FILLER * 2)[: self.STEP]
        return len(self.tokenizer(step, add_special_tokens=False)["input_ids"]) + 4

    @staticmethod
    def text(characters: int, share: float, key: str) -> str:
        """The five lines, with so many characters of filler, the key after `share` of them."""
        filler, place = " ".join([" ".join(FILLER)] * (characters // 80 + 1)), int(share * characters)
        lines = [
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz "
            "you about the important information there.",
            filler[:place],
            f"The pass key is {key}. Remember it. {key} is the pass key.",
            filler[place:characters],
            "What is the pass key? The pass key is",
        ]
        return "\n".join(lines)

    def right(self, prompt: Prompt, said: str) -> float:
        digits = re.search(r"\d+", said)
        return float(digits is not None and int(digits[0]) == int(prompt.answers[0]))


def _longest(ids: Callable[[int], list[int]], room: int, length: int, task: str) -> list[int]:
    """`ids(n)` for the greatest n that fits into `room` tokens. Raises PosSwapError where not even ids(0) does."""
    if len(ids(0)) > room:
        least = len(ids(0)) + length - room
        raise PosSwapError(f"length={length} is too short for {task}; without any filler it takes {least} tokens")
    low, high = 0, 1
    while len(ids(high)) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(ids(middle)) <= room else (low, middle)
    return ids(low)


def _check_count(argument: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise PosSwapError(f"{argument}={value!r} is not a positive integer")
