"""Tasks of EleutherAI's lm-eval, run on a model in memory; of RULER's, those that need no download.

Offline run niah_single_1, niah_multikey_2, niah_multikey_3 and ruler_fwe; ruler_vt and ruler_cwe too, with a
vocabulary of the usual size (their prompts are sized in tokens and grow in steps). The other ones fetch essays or
questions; `prompts.py` has tasks of our own for what those ask. RULER's sizes are set by `max_seq_lengths`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import PosSwapError, nearest
from ..runs import versions
from .subjects import sample_of
from .work import Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """What is asked of lm-eval.

    names: its tasks. tokenizer, tokenizer_name: the tokenizer, and where RULER finds it again. max_length: tokens that
    a request may have, its answer included; lengths: RULER's sizes. limit: documents of each task.
    """

    names: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    tokenizer_name: str
    max_length: int
    lengths: Sequence[int] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.names:
            raise PosSwapError("tasks=[] asks for nothing; give at least one task of lm-eval")
        try:
            from lm_eval.tasks import TaskManager
        except ImportError:
            raise PosSwapError("tasks need lm-eval; pip install 'lm-eval[ruler]'") from None
        known = TaskManager().all_tasks
        for name in self.names:
            if name not in known:
                raise PosSwapError(f"tasks: lm-eval has no {name!r}; {nearest(name, known)}")

    def measure(self, model: nn.Module, *, name: str, work: Work | None = None) -> dict[str, Any]:
        """`{"name", "stage", "seconds", "points"}`, a point per task and metric: `task`, `metric`, `value`, the number
        of requests, the shortest and longest one's tokens; `length` where the metric is a size of RULER's.

        Raises PosSwapError for a task that needs a download, that has no request, or whose request would be cut.
        """
        started = time.perf_counter()
        key = {"measure": "tasks", "limit": self.limit, "lengths": [*self.lengths], "max_length": self.max_length}
        key |= {"shots": self.num_fewshot, "seed": self.seed, "model": sample_of(model)}
        key |= {"versions": versions("lm_eval"), "names": [*self.names]}
        found = (work or Work()).map(key, self.names, lambda task: self._run(model, task))
        points = [point for by_task in found for point in by_task]
        return {"name": name, "stage": None, "seconds": round(time.perf_counter() - started, 3), "points": points}

    def _run(self, model: nn.Module, task: str) -> list[dict[str, Any]]:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        subject = HFLM(
            pretrained=model,
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            batch_size=self.batch_size,
            device=str(model.device),
        )
        try:
            results = simple_evaluate(
                model=subject,
                tasks=[task],
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=True,
                random_seed=self.seed,
                numpy_random_seed=self.seed,
                torch_random_seed=self.seed,
                fewshot_random_seed=self.seed,
                metadata={"max_seq_lengths": [*self.lengths], "tokenizer": self.tokenizer_name}
                if self.lengths
                else None,
            )
        except (OSError, ConnectionError, ValueError, ImportError) as error:
            reason = str(error).strip().split("\n")[0]
            raise PosSwapError(f"tasks: {task} cannot run here (a download, or a package?): {reason}") from error
        points = []
        for one, samples in results["samples"].items():
            sizes = [self._tokens(request) for sample in samples for request in sample["arguments"]]
            if not sizes:
                raise PosSwapError(f"tasks: {one} is empty; it has no request with limit={self.limit}")
            for metric, value in results["results"][one].items():
                if not isinstance(value, (int, float)) or "_stderr" in metric or metric.startswith("sample"):
                    continue
                metric = metric.removesuffix(",none")
                if metric.isdigit() and int(metric) not in self.lengths:
                    continue  # RULER's form has a column for every size it knows
                size = {"length": int(metric), "metric": "accuracy"} if metric.isdigit() else {"metric": metric}
                point = {"task": one, **size, "value": value, "requests": len(sizes)}
                points.append(point | {"shortest_request": min(sizes), "longest_request": max(sizes)})
        return points

    def _tokens(self, request: Any) -> int:
        """Tokens of a request with what it may answer. Raises PosSwapError where lm-eval would have cut it."""
        given = list(request.values()) if isinstance(request, dict) else list(request)
        context, rest = given[0], given[1] if len(given) > 1 else ""
        answer = rest if isinstance(rest, str) else ""
        count = len(self.tokenizer(context + answer)["input_ids"])
        count += rest.get("max_gen_toks", 256) if isinstance(rest, dict) else 0
        if count > self.max_length:
            raise PosSwapError(
                f"tasks: a request takes {count} tokens with its answer, and max_length={self.max_length} would cut "
                "it; give a greater length, or a model that takes it"
            )
        return count
