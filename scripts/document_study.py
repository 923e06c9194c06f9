"""Pages of more than 512 words: a LayoutLM trained here on shorter ones is extended, and labels them to their end.

python scripts/document_study.py --output_dir docs/documents

Two tasks on generated pages. Labels: a table whose columns are told apart by nothing but the word above them. Answers:
a question names a word on the left of the page, and the answer is on its line, on the right. Writes results.json,
table.md and page.png; what is trained stays under --work_dir, and a second run goes on from there.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError

TRAINED, EXTENDED = 512, 1024
KINDS = ("item", "price", "date", "place")
WORDS = [f"{n}" for n in range(10, 40)]  # of cells and filler; they tell nothing
VOCABULARY = ["<pad>", "<ask>", *KINDS, *WORDS]
SLOTS = 8  # places across the page that a column can have
LINES = 64  # places down the page that a question's line can have
IGNORED = -100
LONG = {"max_positions": EXTENDED}
ROUTES = {
    "learned, tile": ("learned", LONG | {"init": "tile"}),
    "learned, fit": ("learned", LONG | {"init": "fit"}),
    "sinusoidal, fit": ("sinusoidal", LONG | {"init": "fit"}),
    "rope": ("rope", {}),
    "alibi": ("alibi", {}),
    "nope": ("nope", {}),
}


@dataclass
class Arguments:
    output_dir: str = field(metadata={"help": "Folder for results.json, table.md and page.png."})
    work_dir: str = field(default="runs/documents", metadata={"help": "Folder of the models that are trained."})
    steps: int = field(default=600, metadata={"help": "Steps of training on pages of up to 512 words."})
    more_steps: int = field(default=30, metadata={"help": "Steps of fine-tuning on longer pages, after a swap."})
    pages: int = field(default=20, metadata={"help": "Long pages that are measured."})
    seed: int = field(default=0, metadata={"help": "Of the models and the pages."})


# --- pages


@dataclass(frozen=True)
class Page:
    """Words in reading order: ids, boxes (x0, y0, x1, y1) in thousandths, and a task's labels.

    `labels`: a kind's number for each word of a cell, IGNORED elsewhere; empty where a question is asked, whose answer
    is the words from `start` to `end`.
    """

    ids: list[int]
    boxes: list[tuple[int, int, int, int]]
    labels: list[int]
    start: int = 0
    end: int = 0


def table_page(seed: int, rows: int) -> Page:
    """Columns of random kinds at random places, a third of the cells empty; read line by line."""
    draw = random.Random(seed)
    kinds, slots = draw.sample(range(len(KINDS)), len(KINDS)), sorted(draw.sample(range(SLOTS), len(KINDS)))
    height = 1000 // (rows + 1)
    page = Page([], [], [])
    for row in range(rows + 1):
        for kind, slot in zip(kinds, slots, strict=True):
            if row and draw.random() < 1 / 3:
                continue
            word = KINDS[kind] if row == 0 else draw.choice(WORDS)
            page.ids.append(VOCABULARY.index(word))
            page.boxes.append((slot * 120, row * height, slot * 120 + 60, row * height + height - 1))
            page.labels.append(kind if row else IGNORED)
    return page


def question_page(seed: int, lines: int, filler: int) -> Page:
    """A question of one kind; on the left, lines of filler, some with a kind in it; on the right, two words on each
    line. The left is read before the right.
    """
    draw = random.Random(seed)
    at = sorted(draw.sample(range(LINES), lines))
    named = dict(zip(draw.sample(at, len(KINDS)), KINDS, strict=True))
    asked = draw.choice(KINDS)
    page = Page([VOCABULARY.index("<ask>"), VOCABULARY.index(asked)], [(0, 0, 0, 0)] * 2, [])
    for line in at:
        words = [draw.choice(WORDS) for _ in range(filler)]
        if line in named:
            words[0] = named[line]
        for column, word in enumerate(words):
            page.ids.append(VOCABULARY.index(word))
            page.boxes.append(_on_line(line, 20 + 50 * column))
    start = 0
    for line in at:
        if named.get(line) == asked:
            start = len(page.ids)
        for column in range(2):
            page.ids.append(VOCABULARY.index(draw.choice(WORDS)))
            page.boxes.append(_on_line(line, 800 + 60 * column))
    return Page(page.ids, page.boxes, [], start, start + 1)


def _on_line(line: int, x: int) -> tuple[int, int, int, int]:
    return x, line * 15, x + 40, line * 15 + 12


def short_page(task: str, seed: int) -> Page:
    """Of up to 512 words."""
    draw = random.Random(seed)
    if task == "labels":
        return table_page(seed, draw.randint(5, 40 if seed % 4 else 180))
    return question_page(seed, draw.randint(5, 20 if seed % 4 else LINES), draw.randint(1, 2 if seed % 4 else 5))


def long_page(task: str, seed: int) -> Page:
    """Of more than 512 words, and up to 1024."""
    draw = random.Random(seed)
    if task == "labels":
        return table_page(seed, draw.randint(260, 340))
    return question_page(seed, LINES, draw.randint(10, 12))


PAGES = {"short": short_page, "long": long_page}
