"""Pages of more than 512 words: a LayoutLM trained here on shorter ones is extended, and labels them to their end.

python scripts/document_study.py --output_dir docs/documents

Two tasks on generated pages. Labels: a table whose columns are told apart by nothing but the word above them. Answers:
a question names such a word, and asks for the total at the foot of its column. Writes results.json,
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
VOCABULARY = ["<pad>", "<ask>", "total", *KINDS, *WORDS]
SLOTS = 8  # places across the page that a column can have
QUESTION = 2  # words of a question, before the page
IGNORED = -100
LONG = {"max_positions": EXTENDED}
ROUTES = {
    "learned, tile": ("learned", LONG | {"init": "tile"}),
    "sinusoidal, fit": ("sinusoidal", LONG | {"init": "fit"}),
    "rope": ("rope", {}),
    "alibi": ("alibi", {}),
}


@dataclass
class Arguments:
    output_dir: str = field(metadata={"help": "Folder for results.json, table.md and page.png."})
    work_dir: str = field(default="runs/documents", metadata={"help": "Folder of the models that are trained."})
    steps: int = field(default=600, metadata={"help": "Steps of training on pages of up to 512 words."})
    more_steps: int = field(default=16, metadata={"help": "Steps of fine-tuning on longer pages, after a swap."})
    pages: int = field(default=8, metadata={"help": "Long pages that are measured."})
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


def question_page(seed: int, rows: int) -> Page:
    """The same with a line of totals at its end; a question before it names a column, whose total is asked for."""
    page, draw = table_page(seed, rows), random.Random(-seed)
    heads = [place for place, label in enumerate(page.labels) if label == IGNORED]
    asked = draw.choice(heads)
    ids = [VOCABULARY.index("<ask>"), page.ids[asked], *page.ids]
    boxes = [(0, 0, 0, 0)] * QUESTION + page.boxes
    for place in heads:
        x0, _, x1, _ = page.boxes[place]
        ids.append(VOCABULARY.index("total"))
        boxes.append((x0, 990, x1, 1000))
    answer = len(ids) - len(heads) + heads.index(asked)
    return Page(ids, boxes, [], answer, answer)


def short_page(task: str, seed: int) -> Page:
    """Of up to 512 words."""
    return MAKE[task](seed, random.Random(seed).randint(5, 40 if seed % 4 else 170))


def long_page(task: str, seed: int) -> Page:
    """Of more than 512 words, and up to 1024."""
    return MAKE[task](seed, random.Random(seed).randint(260, 340))


MAKE = {"labels": table_page, "answers": question_page}
PAGES = {"short": short_page, "long": long_page}
RATES = {"labels": 5e-3, "answers": 2e-3}
FAMILIES = {"labels": "LayoutLMForTokenClassification", "answers": "LayoutLMForQuestionAnswering"}


def inputs_of(pages: list[Page]) -> dict[str, Any]:
    """Ids (B, S), boxes (B, S, 4) and a mask of pages, the shorter ones padded."""
    import torch

    length = max(len(page.ids) for page in pages)

    def padded(rows: list[list], value: Any) -> Any:
        return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])

    return {
        "input_ids": padded([page.ids for page in pages], 0),
        "bbox": padded([page.boxes for page in pages], (0, 0, 0, 0)),
        "attention_mask": padded([[1] * len(page.ids) for page in pages], 0),
    }


def targets_of(pages: list[Page], length: int) -> dict[str, Any]:
    """What a model of transformers is given beside them to learn."""
    import torch

    if pages[0].labels:
        return {"labels": torch.tensor([[*page.labels, *[IGNORED] * (length - len(page.ids))] for page in pages])}
    return {
        "start_positions": torch.tensor([page.start for page in pages]),
        "end_positions": torch.tensor([page.end for page in pages]),
    }


@dataclass(frozen=True)
class Batches:
    """Batches of generated pages for transformers' Trainer, which takes each of these items as it is."""

    task: str
    kind: str
    steps: int
    seed: int
    size: int = 8

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Pages of one batch are of one size, three batches in four of small ones; most come again in the next batch,
        which steadies the steps.
        """
        small = int(self.kind == "short" and index % 4 > 0)
        first = self.seed + index * self.size // 4
        pages = [PAGES[self.kind](self.task, 4 * (first + i) + small) for i in range(self.size)]
        inputs = inputs_of(pages)
        return inputs | targets_of(pages, inputs["input_ids"].shape[1])


def as_it_is(items: list[dict]) -> dict:
    """A collator for items that are batches already."""
    return items[0]


# --- one model


def build(task: str, seed: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LayoutLMConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=TRAINED,
        num_labels=len(KINDS) if task == "labels" else 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    return getattr(transformers, FAMILIES[task])(config)


def train(model: Any, batches: Batches, learning_rate: float) -> Any:
    """By transformers' Trainer: hf_posswap.training has no objective that reads boxes."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "unused",
        max_steps=len(batches),
        per_device_train_batch_size=1,
        learning_rate=learning_rate,
        warmup_steps=len(batches) // 12,
        weight_decay=0.01,
        train_sampling_strategy="sequential",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=batches.seed,
    )
    Trainer(model, arguments, train_dataset=batches, data_collator=as_it_is).train()
    return model.eval()


def windows(page: Page, size: int, prefix: int) -> list[list[int]]:
    """Places of a page's words, cut into windows that begin with its first `prefix` words."""
    head, rest = list(range(prefix)), list(range(prefix, len(page.ids)))
    return [head + rest[i : i + size - prefix] for i in range(0, len(rest), size - prefix)]


def part(page: Page, places: list[int]) -> Page:
    return Page([page.ids[i] for i in places], [page.boxes[i] for i in places], [])


def label(model: Any, page: Page, size: int, first_only: bool) -> list[int | None]:
    """The kind that the model gives every word, None to those that it does not read."""
    import torch

    found: list[int | None] = [None] * len(page.ids)
    for places in windows(page, size, 0)[: 1 if first_only else None]:
        with torch.no_grad():
            kinds = model(**inputs_of([part(page, places)])).logits[0].argmax(-1).tolist()
        for place, kind in zip(places, kinds, strict=True):
            found[place] = kind
    return found


def answer(model: Any, page: Page, size: int, first_only: bool) -> tuple[int, int]:
    """The places of the first and last word of the best answer among all windows."""
    import torch

    best, span = -torch.inf, (0, 0)
    for places in windows(page, size, QUESTION)[: 1 if first_only else None]:
        with torch.no_grad():
            found = model(**inputs_of([part(page, places)]))
        score = (found.start_logits.max() + found.end_logits.max()).item()
        if score > best:
            best, span = score, (places[found.start_logits.argmax()], places[found.end_logits.argmax()])
    return span


def measure(task: str, model: Any, pages: list[Page], size: int, first_only: bool = False) -> dict[str, float]:
    """Share of words with the right label, up to word 512 and behind; share of right answers, all of them behind."""
    right: dict[str, list[bool]] = {"to 512": [], "beyond": []}
    for page in pages:
        if task == "answers":
            right["beyond"].append(answer(model, page, size, first_only) == (page.start, page.end))
            continue
        for place, (kind, true) in enumerate(zip(label(model, page, size, first_only), page.labels, strict=True)):
            if true != IGNORED:
                right["to 512" if place < TRAINED else "beyond"].append(kind == true)
    return {where: sum(values) / len(values) for where, values in right.items() if values}


# --- the study


@dataclass
class Study:
    given: Arguments

    def trained(self, task: str) -> Any:
        """The model trained on pages of up to 512 words; from the work folder where an earlier run left it there."""
        import transformers

        folder = Path(self.given.work_dir) / f"{task}-{self.given.steps}-{self.given.seed}"
        if (folder / "config.json").exists():
            return getattr(transformers, FAMILIES[task]).from_pretrained(folder).eval()
        batches = Batches(task, "short", self.given.steps, self.given.seed)
        model = build(task, self.given.seed)
        if task == "answers":  # who knows the columns has less to learn
            model.layoutlm.load_state_dict(self.trained("labels").layoutlm.state_dict())
        train(model, batches, learning_rate=RATES[task])
        model.save_pretrained(folder)
        return model

    def pages(self, task: str) -> list[Page]:
        return [long_page(task, 10**6 + i) for i in range(self.given.pages)]

    def run(self, task: str, results: dict[str, Any], keep: Any) -> None:
        """Fill the results of a task; `keep` is called after each, and what is there is not measured again."""
        found, pages = results.setdefault(task, {}), self.pages(task)
        for name, first_only in (("cut at 512", True), ("windows of 512", False)):
            if name not in found:
                found[name] = {"untuned": measure(task, self.trained(task), pages, TRAINED, first_only)}
                keep()
        for name, (scheme, params) in ROUTES.items():
            if name not in found:
                found[name] = self.route(task, scheme, params, pages, results)
                keep()

    def route(self, task: str, scheme: str, params: dict, pages: list[Page], results: dict[str, Any]) -> dict:
        import warnings

        from hf_posswap import RecalibrationWarning, patch_model

        model = self.trained(task)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)
            patch_model(model, scheme, **params)
        untuned = measure(task, model, pages, EXTENDED)
        train(model, Batches(task, "long", self.given.more_steps, self.given.seed, size=4), learning_rate=1e-3)
        if scheme == "learned":
            results.setdefault("picture", {})[task] = self.picture(task, model, pages[0])
        return {"untuned": untuned, "tuned": measure(task, model, pages, EXTENDED)}

    def picture(self, task: str, model: Any, page: Page) -> dict[str, Any]:
        """What is drawn of a page: the words, and what the two models make of them."""
        drawn = {"words": [VOCABULARY[i] for i in page.ids], "boxes": page.boxes}
        if task == "answers":
            return drawn | {"extended": answer(model, page, EXTENDED, True), "true": [page.start, page.end]}
        cut = label(self.trained(task), page, TRAINED, True)
        return drawn | {"cut": cut, "extended": label(model, page, EXTENDED, True), "true": page.labels}


def table(results: dict[str, Any]) -> str:
    lines = ["| | labels, words to 512 | words beyond | answers, all beyond |", "|---|---:|---:|---:|"]
    for name in results["labels"]:
        for when in results["labels"][name]:
            words, spans = results["labels"][name][when], results["answers"][name][when]
            cells = (words["to 512"], words["beyond"], spans["beyond"])
            how = "" if "tuned" not in results["labels"][name] else f", {WHEN[when]}"
            lines.append(f"| {name}{how} | {' | '.join(f'{100 * cell:.1f} %' for cell in cells)} |")
    return "\n".join(lines) + "\n" + NOTE.format(**results["settings"])


WHEN = {"untuned": "as swapped", "tuned": "tuned"}
NOTE = """
A LayoutLM of two layers, trained here for {steps} steps on pages of up to 512 words, on {pages} pages of 700 to 930.
labels: each word's column, told by the word at its top alone; chance is 25 %. answers: the total of the column that the
question names, of four behind word 512; the model for them starts as the one for labels. cut at 512: the model as it
was, which reads no further. windows of 512: the model as it was, one window after the other, each answer the best of
all (every window begins with the question). tuned: {more_steps} steps on other long pages.
"""


def draw(picture: dict[str, Any], path: Path) -> None:
    """The page of a table before and after, and a page with a question and its answer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(KINDS, ("tab:blue", "tab:orange", "tab:green", "tab:purple"), strict=True))
    figure, axes = pyplot.subplots(1, 3, figsize=(16, 16), layout="constrained")
    words, boxes = picture["labels"]["words"], picture["labels"]["boxes"]
    for axis, which, title in (
        (axes[0], "cut", "as it was: labels end at word 512"),
        (axes[1], "extended", "extended: every word has a label"),
    ):
        for place, (word, (x0, y0, _, y1)) in enumerate(zip(words, boxes, strict=True)):
            true, kind = picture["labels"]["true"][place], picture["labels"][which][place]
            header = true == IGNORED
            name = word if header else None if kind is None else KINDS[kind]
            style = {"weight": "bold", "size": 9} if header else {"size": 3.5}
            axis.text(x0, (y0 + y1) / 2, word, color=colours.get(name, "0.75"), va="center", **style)
            if not header and kind is not None and kind != true:
                axis.plot([x0 - 8], [(y0 + y1) / 2], marker="x", color="red", markersize=3)
        axis.set_title(title)
    words, boxes = picture["answers"]["words"], picture["answers"]["boxes"]
    for place, (word, (x0, y0, _, y1)) in enumerate(zip(words, boxes, strict=True)):
        if place >= QUESTION:
            bold = {"weight": "bold", "size": 8} if word in KINDS or word == "total" else {"size": 3.5}
            axes[2].text(x0, (y0 + y1) / 2, word, color=colours.get(word, "0.3"), va="center", **bold)
    place, _ = picture["answers"]["extended"]
    x0, y0, x1, y1 = boxes[place]
    axes[2].add_patch(pyplot.Rectangle((x0 - 6, y0), x1 - x0 + 12, y1 - y0, fill=False, color="red"))
    axes[2].set_title(f"extended: asked for the total of {words[1]}, answers with word {place + 1}")
    for axis in axes:
        axis.set(xlim=(-20, 1000), ylim=(1000, -15), xticks=[], yticks=[])
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    (given,) = parse(Arguments, description=__doc__.split("\n")[0])
    output = Path(given.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    settings = {"steps": given.steps, "more_steps": given.more_steps, "pages": given.pages, "seed": given.seed}
    results = json.loads(path.read_text()) if path.exists() else {"settings": settings}
    if results["settings"] != settings:
        raise PosSwapError(f"output_dir={given.output_dir!r} holds a study with {results['settings']}; choose another")

    def keep() -> None:
        path.write_text(json.dumps(results) + "\n")

    for task in FAMILIES:
        Study(given).run(task, results, keep)
    (output / "table.md").write_text(table(results))
    draw(results["picture"], output / "page.png")
    print(table(results), end="")


if __name__ == "__main__":
    run(main)
