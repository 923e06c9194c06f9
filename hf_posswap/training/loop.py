"""The training loop.

Letters: G rows in a global batch, B rows in one forward of one process, W processes, A forwards of each per step:
G = B * W * A. S tokens in a row.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, LoggerType, set_seed
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer, SchedulerType, get_scheduler

from ..anatomy import kind
from ..checkpoint import from_pretrained
from ..errors import PosSwapError, nearest
from ..patching import carries, patch_model, record_of
from ..record import KEY
from ..runs import check_processes
from ..scheme import Scheme, name_of, named
from .arguments import FinetuneArguments
from .checkpoints import STATE, find_checkpoint, leave_model_to_transformers, save_checkpoint, save_model
from .checks import check_count, check_documents_apart, check_length, check_tokenizer, find_objective
from .data import Batches, Blocks, read_documents, tokenize
from .log import TrainingLog, without_paths
from .loss import chunk_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(arguments: FinetuneArguments, scheme: Scheme | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train and its tokenizer: of `arguments.model`, patched; or of the checkpoint to resume from.

    A checkpoint is rebuilt from its own patched config and never patched again. Raises PosSwapError where there is
    nothing to load, or where a resumed checkpoint carries another scheme than the one given.
    """
    checkpoint = find_checkpoint(arguments)
    folder = checkpoint or arguments.model
    if folder is None:
        raise PosSwapError("model=None: give the folder of the model to train")
    try:
        model = from_pretrained(folder, dtype=arguments.dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        raise PosSwapError(f"model={str(folder)!r} cannot be loaded: {error}") from error
    if scheme is None:
        if arguments.layers is not None:
            raise PosSwapError(f"layers={arguments.layers} was given without --scheme")
        return model, tokenizer
    if checkpoint is None:
        return patch_model(model, scheme, tokenizer=tokenizer, layers=arguments.layers), tokenizer
    if not carries(model, scheme, arguments.layers):
        record = record_of(model)
        carried, asked = None if record is None else name_of(record), named(scheme, arguments.layers)
        raise PosSwapError(f"scheme={asked} was given, and {checkpoint} carries {carried}; leave --scheme out")
    return model, tokenizer


def finetune(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: FinetuneArguments) -> TrainingLog:
    """Train a model in place, save it to `arguments.output_dir`, and return the log that is written beside it.

    The model is taken as it is: patch it first. It ends on the device it was trained on. To resume, the model must
    be the checkpoint's own (`load` sees to it).

    Every loss is the mean over all target tokens of a step's global batch, in nats: not a mean of the means of
    processes or forwards. The rows of a global batch are the same for any B, W and A with the same G.

    Raises PosSwapError for everything in the arguments, the text, the tokenizer or the model that does not fit,
    before anything is trained; and where a loss is not a finite number, naming the step.
    """
    started = time.perf_counter()
    checkpoint = find_checkpoint(arguments)
    if checkpoint is not None and Path(model.config.name_or_path).resolve() != checkpoint.resolve():
        raise PosSwapError(
            f"model: it was loaded from {model.config.name_or_path!r}, and the run resumes from {str(checkpoint)!r}; "
            "load the checkpoint's own model"
        )
    objective = find_objective(model, arguments.objective)
    if objective == "masked" and arguments.packing == "documents":
        raise PosSwapError("packing='documents' is for causal models; use packing='concat'")
    check_tokenizer(tokenizer, model, objective)
    check_length(model, arguments.block_size)
    if arguments.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise PosSwapError(f"gradient_checkpointing=True: {kind(model)} does not support it")

    with _accelerator(arguments) as accelerator, _trainable(model, arguments):
        set_seed(arguments.seed, device_specific=True)
        with accelerator.local_main_process_first():  # the others find the tokens in datasets' cache
            blocks = Blocks(tokenize(read_documents(arguments), tokenizer), arguments.block_size)
        forwards = accelerator.num_processes * arguments.gradient_accumulation_steps
        global_batch_size = arguments.per_device_train_batch_size * forwards
        check_count(len(blocks), global_batch_size, blocks.tokens, arguments)
        model.to(accelerator.device)
        if arguments.packing == "documents":
            check_documents_apart(model)
        log = TrainingLog(
            arguments=without_paths(asdict(arguments)),
            scheme=getattr(model.config, KEY, None),
            model_class=kind(model),
            parameters=model.num_parameters(),
            objective=objective,
            chunked_loss=objective == "causal" and chunk_loss(model),
            corpus_tokens=blocks.tokens,
            rows=len(blocks),
            block_size=arguments.block_size,
            longest_document=blocks.longest_document(),
            global_batch_size=global_batch_size,
        )
        log.describe_machine(accelerator)
        optimizer = _optimizer(model, arguments)
        scheduler = _scheduler(optimizer, arguments)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        # not prepared: accelerate would step it once per process
        accelerator.register_for_checkpointing(scheduler)
        leave_model_to_transformers(accelerator)
        if checkpoint is not None:
            log.continue_from(TrainingLog.read(checkpoint))
            if log.steps >= arguments.max_steps:
                raise PosSwapError(f"max_steps={arguments.max_steps}: {checkpoint} has done {log.steps} already")
            accelerator.load_state(str(checkpoint / STATE))
        run = _Run(
            accelerator=accelerator,
            model=prepared,
            tokenizer=tokenizer,
            optimizer=optimizer,
            scheduler=scheduler,
            batches=Batches(blocks, tokenizer, arguments, objective, global_batch_size),
            arguments=arguments,
            log=log,
            started=started - log.wall_seconds,
        )
        run.announce()
        run.train()
        run.finish()
        return log


@dataclass(kw_only=True)
class _Run:
    accelerator: Accelerator
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Batches
    arguments: FinetuneArguments
    log: TrainingLog
    started: float

    @property
    def output_dir(self) -> Path:
        return Path(self.arguments.output_dir)

    def announce(self) -> None:
        """Say what is about to be trained, on the main process."""
        log, arguments, processes = self.log, self.arguments, self.accelerator.num_processes
        longest = log.longest_document if arguments.packing == "documents" else log.block_size
        meant = f" of the {log.scheme['length']} that the swap is meant for" if log.scheme else ""
        lines = [
            f"{log.objective} training of {log.model_class}, {log.parameters:,} parameters, on {processes} process(es) "
            f"({self.accelerator.device.type}), mixed precision: {self.accelerator.mixed_precision}",
            f"{log.corpus_tokens:,} tokens of text in {log.rows:,} rows; longest training row: {longest} tokens{meant}",
            f"global batch: {log.global_batch_size} rows = {arguments.per_device_train_batch_size} per forward x "
            f"{processes} process(es) x {arguments.gradient_accumulation_steps} accumulation step(s)",
        ]
        if log.steps:
            lines.append(f"resumed after step {log.steps}; the model is the checkpoint's")
        self.accelerator.print("\n".join(lines))

    def train(self) -> None:
        """The steps that are left."""
        accelerator, arguments, log = self.accelerator, self.arguments, self.log
        tokens_per_step = log.global_batch_size * log.block_size
        seconds = tokens = 0
        with tqdm(
            total=arguments.max_steps, initial=log.steps, unit="step", disable=not accelerator.is_main_process
        ) as bar:
            while log.steps < arguments.max_steps:
                tick = time.perf_counter()
                entry = {"step": log.steps + 1} | self.step()
                seconds, tokens = seconds + time.perf_counter() - tick, tokens + tokens_per_step
                log.steps, log.tokens = log.steps + 1, log.tokens + tokens_per_step
                bar.set_postfix(loss=f"{entry['loss']:.4f}", tokens_per_second=f"{tokens / seconds:.0f}", refresh=False)
                bar.update()
                if log.steps % arguments.logging_steps == 0 or log.steps == arguments.max_steps:
                    entry["tokens_per_second"] = round(tokens / seconds, 1)
                    log.entries.append(entry)
                    accelerator.log({name: value for name, value in entry.items() if name != "step"}, step=log.steps)
                    seconds = tokens = 0
                if arguments.save_steps and log.steps % arguments.save_steps == 0:
                    log.wall_seconds = time.perf_counter() - self.started
                    save_checkpoint(accelerator, self.model, self.tokenizer, log, self.output_dir)

    def step(self) -> dict[str, float]:
        """One optimizer step: its loss, learning rate and norm of the gradient."""
        accelerator, arguments = self.accelerator, self.arguments
        batches = self.batches.of_process(self.log.steps, accelerator.process_index, accelerator.num_processes)
        counts = [self.batches.targets(batch) for batch in batches]
        targets = accelerator.reduce(torch.tensor(sum(counts), device=accelerator.device)).item()
        # accelerate divides by A in `backward`, and the gradients of W processes are averaged
        undo_means = accelerator.num_processes * arguments.gradient_accumulation_steps
        options = {"use_cache": False} if self.log.objective == "causal" else {}
        total = torch.zeros((), device=accelerator.device)
        for batch, count in zip(batches, counts, strict=True):
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            with accelerator.accumulate(self.model):
                share = self.model(**batch, **options).loss * (count / targets)
                accelerator.backward(share * undo_means)
                total += share.detach()
        loss = accelerator.reduce(total).item()
        self._check_loss(loss)
        # without a limit the norm is still wanted for the log
        norm = accelerator.clip_grad_norm_(self.model.parameters(), arguments.max_grad_norm or math.inf)
        learning_rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        return {"loss": loss, "learning_rate": learning_rate, "grad_norm": float(norm)}

    def finish(self) -> None:
        """Write model, tokenizer and log."""
        save_model(self.accelerator, self.model, self.tokenizer, self.output_dir)
        self.log.wall_seconds = time.perf_counter() - self.started
        if self.accelerator.is_main_process:
            self.log.write(self.output_dir)
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _check_loss(self, loss: float) -> None:
        step, limit = self.log.steps + 1, self.arguments.max_start_loss
        if not math.isfinite(loss):
            raise PosSwapError(
                f"the loss of step {step} is {loss}, and the model was not updated with it; try a lower learning_rate "
                f"than {self.arguments.learning_rate:g}, more warmup_steps than {self.arguments.warmup_steps}, or "
                f"another mixed_precision than {self.accelerator.mixed_precision!r}"
            )
        if step == 1 and limit is not None and loss > limit:
            raise PosSwapError(
                f"max_start_loss={limit:g}: the first loss is {loss:.4f} nats per token, before any update; the swap "
                "or the text is not what that limit was measured with"
            )


@contextmanager
def _accelerator(arguments: FinetuneArguments) -> Iterator[Accelerator]:
    """Raises PosSwapError for a precision or a tracker that is not to be had here, or for processes that are apart."""
    tracker = arguments.report_to
    if tracker is not None:
        known = {one.value for one in LoggerType} - {"all"}
        if tracker not in known:
            raise PosSwapError(f"report_to={tracker!r} is unknown; {nearest(tracker, known)}")
        if tracker not in {one.value for one in get_available_trackers()}:
            raise PosSwapError(f"report_to={tracker!r} is not installed")
    first = not AcceleratorState._shared_state
    try:
        accelerator = Accelerator(
            mixed_precision=arguments.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=arguments.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            log_with=tracker,
            project_dir=arguments.output_dir,
        )
    except ValueError as error:
        raise PosSwapError(f"mixed_precision={arguments.mixed_precision!r}: {error}") from error
    try:
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            raise PosSwapError("mixed_precision='fp16' is ignored by accelerate on a CPU; choose 'bf16' or 'no'")
        check_processes(accelerator.num_processes)
        if tracker is not None:
            values = {n: v if isinstance(v, (int, float, str)) else str(v) for n, v in asdict(arguments).items()}
            accelerator.init_trackers("hf_posswap", config=values)
        yield accelerator
    finally:
        accelerator.free_memory()
        if first:  # a later run in this process may ask for another precision
            AcceleratorState._reset_state()


@contextmanager
def _trainable(model: PreTrainedModel, arguments: FinetuneArguments) -> Iterator[None]:
    """Training mode; afterwards the model's own mode and forward again, whatever was laid around it."""
    training, forward = model.training, vars(model).get("forward")
    model.train()
    # transformers 5.23 knows it by another name than 5.17, and warns of the old one
    kinds = ("activation_checkpointing", "gradient_checkpointing")
    checkpointing = next(name for name in kinds if hasattr(model, f"{name}_enable"))
    if arguments.gradient_checkpointing:
        getattr(model, f"{checkpointing}_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        if arguments.gradient_checkpointing:
            getattr(model, f"{checkpointing}_disable")()
            model.disable_input_require_grads()  # a hook on the embedding that transformers leaves behind
        for name in ("forward", "_original_forward"):
            vars(model).pop(name, None)
        if forward is not None:
            model.forward = forward
        model.train(training)


def _optimizer(model: PreTrainedModel, arguments: FinetuneArguments) -> torch.optim.Optimizer:
    """AdamW over what is trainable; biases and norms, which have one dimension, do not decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": arguments.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=arguments.learning_rate, betas=betas)


def _scheduler(optimizer: torch.optim.Optimizer, arguments: FinetuneArguments) -> torch.optim.lr_scheduler.LRScheduler:
    name = arguments.lr_scheduler_type
    wait_for_a_metric = {"reduce_lr_on_plateau", "greedy"}
    names = {one.value for one in SchedulerType} - wait_for_a_metric
    if name not in names:
        raise PosSwapError(f"lr_scheduler_type={name!r} is unknown here; {nearest(name, names)}")
    try:
        options = json.loads(arguments.lr_scheduler_kwargs or "{}")
        return get_scheduler(name, optimizer, arguments.warmup_steps, arguments.max_steps, options)
    except (TypeError, ValueError) as error:
        raise PosSwapError(
            f"lr_scheduler_kwargs={arguments.lr_scheduler_kwargs!r} does not suit lr_scheduler_type={name!r}: {error}"
        ) from None
