"""Pages of more than 512 words: a LayoutLM trained here on shorter ones is extended, and reads them to their end.

python scripts/document_study.py --output_dir docs/documents

Two tasks on generated pages, each a table whose columns stand in another order on every page. Labels: the kind of each
word, told by nothing but the header of its column. Answers: a question names a kind, and asks for the sum at the foot
of its column. Writes results.json, table.md and page.png; a study that was stopped goes on.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run

TRAINED, EXTENDED = 512, 1024
KINDS = ("item", "code", "count", "price", "date", "place", "buyer", "state")
CELLS = [f"{n}" for n in range(10, 50)]  # they tell nothing
SUMS = [f"{n}" for n in range(100, 150)]
VOCABULARY = ["<pad>", "<ask>", *KINDS, *CELLS, *SUMS]
COLUMN, LINE = 1000 // len(KINDS), 7  # thousandths of the page: the width of a column, the height of a line
BLANK = 0.2  # of the cells have no word
SHORT, LONG = (2, 70), (100, 138)  # lines of cells on a page: of up to 512 words, of more
QUESTION = 2  # words of a question, before the page
IGNORED = -100
LAYERS, WIDTH, RATE = 2, 64, 2e-3
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "learned, tile": ("learned", {"max_positions": EXTENDED, "init": "tile"}),
    "sinusoidal, fit": ("sinusoidal", {"max_positions": EXTENDED, "init": "fit"}),
    "rope": ("rope", {}),
    "alibi": ("alibi", {}),
    "t5": ("t5", {}),
}
DRAWN = "learned, tile"


@dataclass
class StudyArguments:
    """Sizes of the study."""

    output_dir: str = field(metadata={"help": "Folder for results.json, table.md and page.png."})
    work_dir: str = field(default="runs/documents", metadata={"help": "Folder for models and finished cells."})
    steps: int = field(default=400, metadata={"help": "Steps of each task on pages of up to 512 words."})
    tune_steps: int = field(
        default=160, metadata={"help": "Steps of a fine-tune on pages of up to 1024, after a swap."}
    )
    pages: int = field(default=32, metadata={"help": "Long pages that are measured."})
    seed: int = field(default=0, metadata={"help": "Of the models and the pages."})


def main() -> None:
    (given,) = parse(StudyArguments, description=__doc__.splitlines()[0])
    import transformers
    from tqdm import tqdm

    from hf_posswap import runs

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    study, output = Study(given), Path(given.output_dir)
    cells = [(task, name) for task in TASKS for name in (*UNSWAPPED, *ROUTES)]
    found = [study.cell(task, name) for task, name in tqdm(cells, unit="cell")]
    results = {
        "arguments": {name: value for name, value in asdict(given).items() if not name.endswith("_dir")},
        "unit": "share of right words, and of right answers",
        "trained": {task: study.short(task) for task in TASKS},
        "words": [len(page.ids) for page in study.pages("labels")],
        "cells": found,
        "command": runs.command(),
        "hardware": runs.hardware("cpu"),
        "versions": runs.versions(),
    }
    runs.write_json(output / "results.json", results)
    (output / "table.md").write_text(table(results), encoding="utf-8")
    draw(study.picture(), output / "page.png")
    print(table(results), end="")


# --- pages


@dataclass(frozen=True)
class Page:
    """Words in reading order: ids, boxes (x0, y0, x1, y1) in thousandths, and the number of each one's kind.

    asked: the kind that a question names. answer: the place of the sum that it asks for.
    """

    ids: list[int]
    boxes: list[tuple[int, int, int, int]]
    kinds: list[int]
    asked: int
    answer: int

    def with_question(self) -> Page:
        """The same behind the words of its question, which have no place on the page."""
        return replace(
            self,
            ids=[VOCABULARY.index("<ask>"), VOCABULARY.index(KINDS[self.asked]), *self.ids],
            boxes=[(0, 0, 0, 0)] * QUESTION + self.boxes,
            kinds=[IGNORED] * QUESTION + self.kinds,
            answer=self.answer + QUESTION,
        )

    def part(self, places: list[int]) -> Page:
        """Some of its words."""
        return replace(self, **{name: [getattr(self, name)[i] for i in places] for name in ("ids", "boxes", "kinds")})


def make_page(seed: int, lines: int) -> Page:
    """Headers, `lines` lines of cells, sums: a table somewhere on the page, read line by line."""
    draw = random.Random(seed)
    order = draw.sample(range(len(KINDS)), len(KINDS))
    top, asked = draw.randint(0, 1000 // LINE - lines - 2), draw.randrange(len(KINDS))
    page = Page([], [], [], asked, 0)
    for line in range(lines + 2):
        for column, kind in enumerate(order):
            if 0 < line <= lines and draw.random() < BLANK:
                continue
            word = KINDS[kind] if line == 0 else draw.choice(CELLS if line <= lines else SUMS)
            left, upper = column * COLUMN, (top + line) * LINE
            page.ids.append(VOCABULARY.index(word))
            page.boxes.append((left, upper, left + 3 * COLUMN // 4, upper + LINE - 1))
            page.kinds.append(kind)
    return replace(page, answer=len(page.ids) - len(KINDS) + order.index(asked))


def inputs_of(pages: list[Page]) -> dict[str, Any]:
    """Ids (B, S), boxes (B, S, 4) and a mask of pages, the shorter ones padded."""
    return {
        "input_ids": padded([page.ids for page in pages], 0),
        "bbox": padded([page.boxes for page in pages], (0, 0, 0, 0)),
        "attention_mask": padded([[1] * len(page.ids) for page in pages], 0),
    }


def padded(rows: list[list], value: Any) -> Any:
    import torch

    length = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def windows(page: Page, size: int, prefix: int) -> list[list[int]]:
    """Places of a page's words, cut into windows that begin with its first `prefix` words."""
    head, rest = list(range(prefix)), list(range(prefix, len(page.ids)))
    return [head + rest[i : i + size - prefix] for i in range(0, len(rest), size - prefix)]


# --- tasks: what a page asks, and how a model that reads `size` words at a time does


class Labels:
    """The kind of every word."""

    family = "LayoutLMForTokenClassification"
    classes = len(KINDS)

    def ask(self, page: Page) -> Page:
        return page

    def targets(self, pages: list[Page]) -> dict[str, Any]:
        return {"labels": padded([page.kinds for page in pages], IGNORED)}

    def read(self, model: Any, page: Page, size: int, first_only: bool) -> list[int | None]:
        """The number of the kind that the model gives each word; None to those that it does not read."""
        import torch

        found: list[int | None] = [None] * len(page.ids)
        for places in windows(page, size, 0)[: 1 if first_only else None]:
            with torch.no_grad():
                kinds = model(**inputs_of([page.part(places)])).logits[0].argmax(-1).tolist()
            for place, kind in zip(places, kinds, strict=True):
                found[place] = kind
        return found

    def measure(self, model: Any, pages: list[Page], size: int, first_only: bool) -> dict[str, float]:
        """The share of words below the headers with the right label, of the first 512 of a page and of the others."""
        right: dict[str, list[bool]] = {"to 512": [], "beyond": []}
        for page in pages:
            for place, kind in enumerate(self.read(model, page, size, first_only)):
                if place >= len(KINDS):
                    right["to 512" if place < TRAINED else "beyond"].append(kind == page.kinds[place])
        return {where: sum(values) / len(values) for where, values in right.items() if values}


class Answers:
    """The sum that a question asks for."""

    family = "LayoutLMForQuestionAnswering"
    classes = 2  # begins here, ends here

    def ask(self, page: Page) -> Page:
        return page.with_question()

    def targets(self, pages: list[Page]) -> dict[str, Any]:
        import torch

        places = torch.tensor([page.answer for page in pages])
        return {"start_positions": places, "end_positions": places}

    def read(self, model: Any, page: Page, size: int, first_only: bool) -> tuple[int, int]:
        """The places of the first and last word of the best answer among all windows."""
        import torch

        best, span = -torch.inf, (0, 0)
        for places in windows(page, size, QUESTION)[: 1 if first_only else None]:
            with torch.no_grad():
                found = model(**inputs_of([page.part(places)]))
            score = (found.start_logits.max() + found.end_logits.max()).item()
            if score > best:
                best, span = score, (places[found.start_logits.argmax()], places[found.end_logits.argmax()])
        return span

    def measure(self, model: Any, pages: list[Page], size: int, first_only: bool) -> dict[str, float]:
        """The share of right answers."""
        right = [self.read(model, page, size, first_only) == (page.answer, page.answer) for page in pages]
        return {"answers": sum(right) / len(right)}


TASKS = {"labels": Labels(), "answers": Answers()}
UNSWAPPED = {"cut at 512": True, "windows of 512": False}  # whether the first window is all that is read


@dataclass(frozen=True)
class Batches:
    """Batches of generated pages for transformers' Trainer, which takes each of these items as it is.

    The pages of one batch have as many lines, from `lines[0]` to `lines[1]`; the fewer, the more batches: where there
    are few words it is soon learned which of them matter.
    """

    task: str
    lines: tuple[int, int]
    steps: int
    seed: int
    size: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        (least, most), draw = self.lines, random.Random(f"{self.seed} {index}")
        lines = round(least * (most / least) ** draw.random())
        pages = [TASKS[self.task].ask(make_page(draw.getrandbits(32), lines)) for _ in range(self.size)]
        return inputs_of(pages) | TASKS[self.task].targets(pages)


def only(items: list[dict]) -> dict:
    """A collator for items that are batches already."""
    (batch,) = items
    return batch


# --- the study


class Study:
    """The two models, and one cell at a time; everything that is done lies in the work folder."""

    def __init__(self, given: StudyArguments) -> None:
        self.given = given
        sizes = (given.steps, given.tune_steps, given.pages, given.seed)
        self.folder = Path(given.work_dir) / "-".join(map(str, sizes))  # other sizes, another study

    def trained(self, task: str) -> Any:
        """The model trained on pages of up to 512 words."""
        import torch
        import transformers

        folder, family = self.folder / task, getattr(transformers, TASKS[task].family)
        if not folder.exists():
            torch.manual_seed(self.given.seed)
            config = transformers.LayoutLMConfig(
                vocab_size=len(VOCABULARY),
                hidden_size=WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                intermediate_size=2 * WIDTH,
                max_position_embeddings=TRAINED,
                num_labels=TASKS[task].classes,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=WIDTH**-0.5,  # LayoutLM's 0.02 is for widths of 768 and more
            )
            model = family(config)
            if task == "answers":  # who knows the columns has less to learn
                model.layoutlm.load_state_dict(self.trained("labels").layoutlm.state_dict())
            self.train(model, Batches(task, SHORT, self.given.steps, self.given.seed, size=16))
            partial = folder.with_name(f".{task}")
            model.save_pretrained(partial)
            partial.rename(folder)
        return family.from_pretrained(folder).eval()

    def train(self, model: Any, batches: Batches) -> None:
        """By transformers' Trainer: hf_posswap.training has no objective that reads boxes."""
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            "unused",
            max_steps=len(batches),
            per_device_train_batch_size=1,
            learning_rate=RATE,
            lr_scheduler_type="cosine",
            warmup_steps=len(batches) // 10,
            weight_decay=0.01,
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=self.given.seed,
        )
        Trainer(model, arguments, train_dataset=batches, data_collator=only).train()
        model.eval()

    def pages(self, task: str, lines: tuple[int, int] = LONG) -> list[Page]:
        """Those that are measured: the same for every cell."""
        draw = random.Random(f"measured {self.given.seed}")
        return [TASKS[task].ask(make_page(draw.getrandbits(32), draw.randint(*lines))) for _ in range(self.given.pages)]

    def short(self, task: str) -> dict[str, float]:
        """How the model does on pages of the length it was trained on."""
        return self.kept(
            f"{task}-short", lambda: TASKS[task].measure(self.trained(task), self.pages(task, SHORT), TRAINED, False)
        )

    def cell(self, task: str, name: str) -> dict[str, Any]:
        """How the model, or the model after a route, does on long pages."""

        def found() -> dict[str, Any]:
            cell = {"task": task, "route": name}
            if name in UNSWAPPED:
                measured = TASKS[task].measure(self.trained(task), self.pages(task), TRAINED, UNSWAPPED[name])
                return cell | {"untuned": measured}
            model = self.swapped(task, name)
            cell["untuned"] = TASKS[task].measure(model, self.pages(task), EXTENDED, True)
            self.tune(task, model)
            return cell | {"tuned": TASKS[task].measure(model, self.pages(task), EXTENDED, True)}

        return self.kept(f"{task}-{name.replace(', ', '-').replace(' ', '-')}", found)

    def swapped(self, task: str, name: str) -> Any:
        from hf_posswap import RecalibrationWarning, patch_model

        (scheme, params), model = ROUTES[name], self.trained(task)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)  # that is what is measured here
            return patch_model(model, scheme, **params)

    def tune(self, task: str, model: Any) -> None:
        self.train(model, Batches(task, (SHORT[0], LONG[1]), self.given.tune_steps, self.given.seed + 1, size=8))

    def kept(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `compute` gives, now or in an earlier run."""
        from hf_posswap.runs import kept

        return kept(self.folder / f"{name}.json", compute)

    def picture(self) -> dict[str, Any]:
        """What is drawn: the words of a page, and what the models make of them before and after one of the routes."""

        def found() -> dict[str, Any]:
            page, asking = (self.pages(task)[0] for task in TASKS)
            drawn = asdict(page) | {"words": [VOCABULARY[i] for i in page.ids]}
            for when, size, models in (
                ("before", TRAINED, {task: self.trained(task) for task in TASKS}),
                ("after", EXTENDED, {task: self.swapped(task, DRAWN) for task in TASKS}),
            ):
                first, last = TASKS["answers"].read(models["answers"], asking, size, True)
                drawn[when] = {
                    "labels": TASKS["labels"].read(models["labels"], page, size, True),
                    "answer": [first - QUESTION, last - QUESTION],
                }
            return drawn

        return self.kept("picture", found)


# --- what is written


def table(results: dict[str, Any]) -> str:
    """A row per route; untuned and tuned."""
    by_cell = {(cell["task"], cell["route"]): cell for cell in results["cells"]}
    columns = {"words to 512": ("labels", "to 512"), "words beyond": ("labels", "beyond"), "answers": ("answers",) * 2}
    times = {"untuned": "as swapped", "tuned": "tuned"}
    lines = [
        f"| | {' | '.join(f'{title}, {when}' for title in columns for when in times.values())} |",
        f"|---|{'---:|' * len(times) * len(columns)}",
    ]
    for route in (*UNSWAPPED, *ROUTES):
        cells = [(by_cell[task, route].get(when), key) for task, key in columns.values() for when in times]
        shown = [f"{100 * measured[key]:.1f} %" if measured else "" for measured, key in cells]
        lines.append(f"| {route} | {' | '.join(shown)} |")
    words, answers = results["trained"]["labels"]["to 512"], results["trained"]["answers"]["answers"]
    given, read = results["arguments"], results["words"]
    facts = [
        f"A LayoutLM of {LAYERS} layers and width {WIDTH}, trained here for {given['steps']} steps a task on pages of",
        f"up to {TRAINED} words, where it finds {100 * words:.1f} % of the labels and {100 * answers:.1f} % of the",
        f"answers. Measured on {given['pages']} pages of {min(read)} to {max(read)} words.",
        "",
        f"- Labels: which of {len(KINDS)} kinds a word is of, told by the header of its column alone; guessing finds",
        f"  {100 / len(KINDS):.1f} %.",
        f"- Answers: the sum at the foot of the column that a question names, on every page behind word {TRAINED}.",
        f"- Cut at {TRAINED}: the model as it was, which reads no further. Windows of {TRAINED}: one after the other,",
        "  each with the question, and the best answer of all; those behind the first do not have the headers.",
        f"- A route reads {EXTENDED} words at once: as swapped, without any training, and after {given['tune_steps']}",
        f"  steps on other pages of up to {EXTENDED} words.",
        "",
        "![One page, before and after](page.png)",
    ]
    return "\n".join([*lines, "", *facts]) + "\n"


def draw(picture: dict[str, Any], path: Path) -> None:
    """One page twice: what the model labels and answers, before and after."""
    from matplotlib.figure import Figure

    from hf_posswap import runs

    figure = Figure(figsize=(12, 14.5), layout="constrained", dpi=110)
    before, after = figure.subplots(1, 2)
    draw_page(before, picture, "before", f"Before: {TRAINED} positions")
    draw_page(after, picture, "after", f"After: {EXTENDED} positions ({DRAWN}), without training")
    with runs.replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def draw_page(axis: Any, picture: dict[str, Any], when: str, title: str) -> None:
    """A colour for each kind of label, a red edge where it is the wrong one, and a frame around the sum asked for."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    words, boxes, labels = picture["words"], picture["boxes"], picture[when]["labels"]
    colours = [colormaps["tab10"](i)[:3] for i in (0, 1, 2, 4, 5, 6, 8, 9)]  # not its red and its grey
    for word, (x0, y0, x1, y1), kind, label in zip(words, boxes, picture["kinds"], labels, strict=True):
        style = {"weight": "bold", "fontsize": 8} if word in KINDS else {"fontsize": 5}
        style["color"] = "0.6" if label is None else "black"
        axis.text((x0 + x1) / 2, (y0 + y1) / 2, word, ha="center", va="center_baseline", **style)
        if label is not None:
            edge = "none" if label == kind else "red"
            axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor=(*colours[label], 0.45), edgecolor=edge))
    read = sum(label is not None for label in labels)
    if read < len(words):
        end = boxes[read - 1][3] + 1
        axis.axhline(end, color="red", linestyle="--")
        style = {"backgroundcolor": "white", "ha": "center", "va": "top", "color": "red", "fontsize": 11}
        axis.text(500, end + 8, f"word {read}: nothing below has a label", **style)
    (x0, y0, x1, y1), (first, last) = boxes[picture["answer"]], picture[when]["answer"]
    right = first == last == picture["answer"]
    span = words[max(first, 0) : last + 1]
    said = f'"{" ".join(span[:3])}{" ..." * (len(span) > 3)}"' if span else "no word of the page"
    style = {"fill": False, "linewidth": 1.5, "linestyle": "-" if right else ":"}
    axis.add_patch(Rectangle((x0 - 4, y0 - 3), x1 - x0 + 8, y1 - y0 + 6, **style))
    axis.set_title(f"{title}\n{read} of {len(words)} words have a label", fontsize=12)
    axis.set_xlabel(
        f'Question: the sum of "{KINDS[picture["asked"]]}"? (framed)\nAnswer: {said}, {"right" if right else "wrong"}',
        fontsize=11,
    )
    axis.set(xlim=(-10, 985), ylim=(max(box[3] for box in boxes) + 8, boxes[0][1] - 8), xticks=[], yticks=[])


if __name__ == "__main__":
    run(main)
