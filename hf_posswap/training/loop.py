"""The training loop.

Letters: G rows in a global batch, B rows in one forward of one process, W processes, A forwards of each per step:
G = B * W * A. S tokens in a row.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin, LoggerType, set_seed
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import SchedulerType, get_scheduler

from ..anatomy import kind
from ..attention import ATTRIBUTE
from ..checkpoint import from_pretrained
from ..errors import PosSwapError, nearest
from ..patching import carries, patch_model, record_of
from ..pictures import Picture
from ..record import FIT, KEY
from ..runs import check_processes, peak_memory
from ..scheme import Scheme, name_of, named
from .arguments import FinetuneArguments
from .checkpoints import (
    STATE,
    find_checkpoint,
    leave_model_to_transformers,
    model_folder,
    save_base,
    save_checkpoint,
    save_model,
)
from .checks import check_documents_apart, check_parallelism, check_positions_spread, find_objective
from .data import Batches
from .distil import Taught, Teacher
from .flops import Meter, peak_tflops
from .log import FILE as LOG
from .log import TrainingLog, without_paths
from .pictures import PictureBatches
from .precomputed import Precomputed, precompute
from .sentences import SentenceBatches
from .trained import Trained, trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .vectors import SentenceTeacher

BATCHES: dict[str, type[Batches]] = {
    "causal": Batches,
    "masked": Batches,
    "images": PictureBatches,
    "sentences": SentenceBatches,
}


def load(
    arguments: FinetuneArguments, scheme: Scheme | None = None, picture: Mapping[str, Any] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train and its tokenizer (image processor): of `arguments.model`, patched; or of the checkpoint to
    resume from.

    picture: what an image model is to read, as `patch_model` takes it. A checkpoint is rebuilt from its own patched
    config and never patched again. Raises PosSwapError where there is nothing to load, or where a resumed checkpoint
    carries another scheme than the one given.
    """
    checkpoint = find_checkpoint(arguments)
    folder = arguments.model if checkpoint is None else model_folder(checkpoint, arguments)
    if folder is None:
        raise PosSwapError("model=None: give the folder of the model to train")
    try:
        model = from_pretrained(folder, dtype=arguments.dtype)
        batches = BATCHES[find_objective(model, arguments.objective)]
        tokenizer = batches.reader.from_pretrained(folder)
    except (OSError, ImportError) as error:  # older transformers make every image processor by torchvision
        raise PosSwapError(f"model={str(folder)!r} cannot be loaded: {str(error).strip()}") from error
    batches.check_flags(model, arguments)
    if scheme is None:
        for name in ("layers", "fit_tokens"):
            if getattr(arguments, name):
                raise PosSwapError(f"{name}={getattr(arguments, name)} was given without --scheme")
        for name, value in (picture or {}).items():
            raise PosSwapError(f"{name}={value} was given without --scheme; learned2d keeps what there is")
        return model, tokenizer
    if checkpoint is None:
        fit = batches.calibration(model, tokenizer, arguments) if arguments.fit_tokens else None
        reader = {batches.reader_name: tokenizer}
        return patch_model(model, scheme, **reader, layers=arguments.layers, fit=fit, **(picture or {})), tokenizer
    read = dict(picture or {})
    ndim, read = read.pop("ndim", None), Picture.asked(**read)
    if not carries(model, scheme, arguments.layers, ndim=ndim, picture=read):
        record = record_of(model)
        carried, asked = None if record is None else name_of(record), named(scheme, arguments.layers, ndim, read)
        raise PosSwapError(f"scheme={asked} was given, and {checkpoint} carries {carried}; leave --scheme out")
    return model, tokenizer


def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: FinetuneArguments,
    teacher: PreTrainedModel | None = None,
) -> TrainingLog:
    """Train a model in place, save it to `arguments.output_dir`, and return the log that is written beside it.

    teacher: for `arguments.distil`, the model as it was before the swap; it is read, in eval mode, and not changed.

    The model is taken as it is: patch it first. It ends on the device it was trained on. To resume, the model must
    be the checkpoint's own (`load` sees to it).

    Every loss is the mean over all targets of a step's global batch, in the log's `unit`: not a mean of the means of
    processes or forwards. The rows of a global batch are the same for any B, W and A with the same G.

    Raises PosSwapError for everything in the arguments, the text, the tokenizer or the model that does not fit,
    before anything is trained; and where a loss is not a finite number, naming the step.
    """
    started = time.perf_counter()
    checkpoint = find_checkpoint(arguments)
    if checkpoint is not None:
        folder = model_folder(checkpoint, arguments)
        if Path(model.config.name_or_path).resolve() != folder.resolve():
            raise PosSwapError(
                f"model: it was loaded from {model.config.name_or_path!r}, and the run resumes from {str(folder)!r}; "
                "load the checkpoint's own model, or give another output_dir"
            )
    objective = find_objective(model, arguments.objective)
    arguments = BATCHES[objective].check(model, tokenizer, arguments, objective)
    record = record_of(model)
    if arguments.fit_tokens and (record is None or FIT not in record.measured):
        raise PosSwapError(
            f"fit_tokens={arguments.fit_tokens}: {kind(model)} comes without a fitted swap; give `load` a scheme, or "
            "patch_model fit="
        )
    if arguments.teacher_cache is not None and teacher is not None:
        raise PosSwapError(
            f"teacher_cache={arguments.teacher_cache!r}: the teacher is loaded from its folder, where that is needed; "
            "give finetune none"
        )
    if bool(arguments.distil) != (teacher is not None or arguments.teacher_cache is not None):
        raise PosSwapError(f"distil={arguments.distil:g} and a teacher go together; one of them was given")
    if arguments.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise PosSwapError(f"gradient_checkpointing=True: {kind(model)} does not support it")

    with _accelerator(arguments) as accelerator, _in_training(model, arguments):
        check_parallelism(accelerator, model, objective, arguments)
        batches = _batches(accelerator, model, tokenizer, arguments, objective)
        model.to(accelerator.device)
        if arguments.pose_length is not None:
            check_positions_spread(model, arguments.pose_length)
        if arguments.packing != "concat":
            for one in filter(None, (model, teacher)):
                check_documents_apart(one)
        start = batches.check_start(model) if checkpoint is None else None
        with trained(model, arguments) as chosen:
            run = _prepare(accelerator, chosen, tokenizer, batches, arguments, teacher, started)
            run.log.start = start
            if checkpoint is not None:
                run.resume(checkpoint)
            run.announce()
            run.train()
            run.finish()
        return run.log


def _batches(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: FinetuneArguments,
    objective: str,
) -> Batches:
    """What is trained on, in global batches."""
    forwards = accelerator.num_processes * arguments.gradient_accumulation_steps
    global_batch_size = arguments.per_device_train_batch_size * forwards
    with accelerator.local_main_process_first():  # the others find the tokens in datasets' cache
        rows = BATCHES[objective].read(model, tokenizer, arguments)
    batches = BATCHES[objective](rows, tokenizer, arguments, objective, global_batch_size)
    batches.check_count()
    return batches


def _prepare(
    accelerator: Accelerator,
    chosen: Trained,
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches,
    arguments: FinetuneArguments,
    teacher: PreTrainedModel | None,
    started: float,
) -> _Run:
    """Losses, optimizer and schedule of a run, spread over its processes."""
    model, blocks = chosen.model, batches.blocks
    guide, chunked, precomputed = _lay_loss(accelerator, model, batches, arguments, teacher)
    log = TrainingLog(
        arguments=without_paths(asdict(arguments)),
        scheme=getattr(model.config, KEY, None),
        model_class=kind(model),
        parameters=model.num_parameters(),
        trained_parameters=model.num_parameters(only_trainable=True),
        objective=batches.objective,
        unit=batches.unit,
        peak_tflops=peak_tflops(accelerator, model, arguments),
        chunked_loss=chunked,
        corpus_tokens=blocks.tokens,
        rows=len(blocks),
        block_size=arguments.block_size,
        longest_document=blocks.longest_document(),
        global_batch_size=batches.global_batch_size,
        precomputed=precomputed,
    )
    log.describe_machine(accelerator)
    optimizer = _optimizer(chosen, arguments)
    scheduler = _scheduler(optimizer, arguments)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # which steps by itself, within `backward`
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": arguments.per_device_train_batch_size,
            "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
            "gradient_clipping": float(arguments.max_grad_norm),
        }
        if accelerator.state.deepspeed_plugin.zero_stage == 3:
            _gather_with_attention(model)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    # not prepared: accelerate would step it once per process
    accelerator.register_for_checkpointing(scheduler)
    leave_model_to_transformers(accelerator)
    return _Run(
        accelerator=accelerator,
        model=prepared,
        chosen=chosen,
        tokenizer=tokenizer,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        arguments=arguments,
        log=log,
        meter=Meter(log.peak_tflops and log.peak_tflops * 1e12 * accelerator.num_processes),
        teacher=guide,
        started=started,
    )


def _gather_with_attention(model: PreTrainedModel) -> None:
    """Have ZeRO-3 gather what a scheme learns inside attention when the attention does its work: no module is called
    that holds it."""
    from deepspeed import zero

    for module in model.modules():
        for attached in vars(module).get(ATTRIBUTE, ()):
            for parameter in attached.parameters():
                zero.register_external_parameter(module, parameter)


def _lay_loss(
    accelerator: Accelerator,
    model: PreTrainedModel,
    batches: Batches,
    arguments: FinetuneArguments,
    teacher: PreTrainedModel | None,
) -> tuple[Teacher | SentenceTeacher | Precomputed | None, bool, dict[str, Any] | None]:
    """Have the model return its loss as it is trained: who teaches it, whether that is done without all logits at once,
    and what the log says of a teacher that has read the rows before.
    """
    if arguments.teacher_cache is not None:
        return precompute(accelerator, model, batches, arguments)
    guide = None if teacher is None else batches.make_teacher(teacher, model, accelerator.device)
    return guide, batches.lay_loss(model, None if guide is None else guide.head_on(accelerator.device)), None


@dataclass(kw_only=True)
class _Run:
    accelerator: Accelerator
    model: nn.Module
    chosen: Trained
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    batches: Batches
    arguments: FinetuneArguments
    log: TrainingLog
    meter: Meter
    teacher: Teacher | SentenceTeacher | Precomputed | None
    started: float

    @property
    def output_dir(self) -> Path:
        return Path(self.arguments.output_dir)

    def resume(self, checkpoint: Path) -> None:
        """Take up the run where a checkpoint of it ended."""
        log, arguments = self.log, self.arguments
        log.continue_from(TrainingLog.read(checkpoint))
        done = TrainingLog.read(self.output_dir).steps if (self.output_dir / LOG).exists() else 0
        # a run that was ended in its last save is at max_steps, and not done
        if log.steps > arguments.max_steps or log.steps == arguments.max_steps == done:
            raise PosSwapError(f"max_steps={arguments.max_steps}: {checkpoint} has done {log.steps} already")
        self.started -= log.wall_seconds
        self.accelerator.load_state(str(checkpoint / STATE))
        if self.chosen.lora is not None:
            self.chosen.read(checkpoint / STATE)

    def announce(self) -> None:
        """Say what is about to be trained, on the main process."""
        log, arguments, accelerator = self.log, self.arguments, self.accelerator
        processes = accelerator.num_processes
        lines = [
            f"{log.objective} training of {log.model_class}, {log.trained_parameters:,} of {log.parameters:,} "
            f"parameters, on {processes} process(es) ({accelerator.device.type}), mixed precision: "
            f"{accelerator.mixed_precision}",
            self.batches.summary(log.scheme),
            f"global batch: {log.global_batch_size} rows = {arguments.per_device_train_batch_size} per forward x "
            f"{processes} process(es) x {arguments.gradient_accumulation_steps} accumulation step(s)",
        ]
        if log.precomputed is not None:
            lines.append(
                "teacher: what it makes of the rows is in {key}, {gib:.3g} GiB; {files_written} files of it were "
                "written now, in {seconds:.0f} s".format(**log.precomputed)
            )
        if log.start is not None:
            lines.append(
                "first rows at {tokens} tokens, in {unit}: {unpatched:.4f} before the swap, {swapped:.4f} with "
                "it".format(**log.start, unit=log.unit)
            )
        if log.steps:
            lines.append(f"resumed after step {log.steps}; the model is the checkpoint's")
        accelerator.print("\n".join(lines))

    def train(self) -> None:
        """The steps that are left."""
        accelerator, arguments, log = self.accelerator, self.arguments, self.log
        if self.chosen.lora is not None and not log.steps and arguments.save_steps:
            save_base(accelerator, self.model, self.tokenizer, self.chosen, self.output_dir)
        seconds = tokens = 0
        with tqdm(
            total=arguments.max_steps, initial=log.steps, unit="step", disable=not accelerator.is_main_process
        ) as bar:
            while log.steps < arguments.max_steps:
                tick = time.perf_counter()
                read, entry = self.step()
                seconds, tokens = seconds + time.perf_counter() - tick, tokens + read
                log.steps, log.tokens = log.steps + 1, log.tokens + read
                bar.set_postfix(loss=f"{entry['loss']:.4f}", tokens_per_second=f"{tokens / seconds:.0f}", refresh=False)
                bar.update()
                if log.steps % arguments.logging_steps == 0 or log.steps == arguments.max_steps:
                    entry["tokens_per_second"] = round(tokens / seconds, 1)
                    entry |= self.meter.share(tokens / seconds)
                    log.entries.append(entry)
                    accelerator.log({name: value for name, value in entry.items() if name != "step"}, step=log.steps)
                    seconds = tokens = 0
                if arguments.save_steps and log.steps % arguments.save_steps == 0:
                    log.wall_seconds = time.perf_counter() - self.started
                    save_checkpoint(accelerator, self.model, self.tokenizer, self.chosen, log, self.output_dir)

    def step(self) -> tuple[int, dict[str, float]]:
        """One optimizer step: the tokens that it read, and its number, loss, learning rate and norm of the gradient."""
        accelerator, arguments = self.accelerator, self.arguments
        place = (self.log.steps, accelerator.process_index, accelerator.num_processes)
        batches, numbers = self.batches.of_process(*place), self.batches.rows_of_process(*place)
        counts = [self.batches.targets(batch) for batch in batches]
        read = sum(map(self.batches.tokens, batches))
        targets, tokens = accelerator.reduce(torch.tensor([sum(counts), read], device=accelerator.device)).tolist()
        # accelerate divides by A in `backward`, and the gradients of W processes are averaged
        undo_means = accelerator.num_processes * arguments.gradient_accumulation_steps
        options = {"use_cache": False} if self.log.objective == "causal" else {}
        totals = torch.zeros(2, device=accelerator.device)  # what is minimised, and the task's cross-entropy
        with self.meter.counting(self.batches.length(self.log.steps), read):
            for batch, rows, count in zip(batches, numbers, counts, strict=True):
                batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
                with accelerator.accumulate(self.model):
                    if self.teacher is not None:
                        options["taught"] = self._taught(batch, rows)
                    output = self.model(**batch, **options)
                    share = output.loss * (count / targets)
                    accelerator.backward(share * undo_means)
                    totals += torch.stack(
                        [share.detach(), output.get("task", output.loss).detach() * (count / targets)]
                    )
        loss, task = accelerator.reduce(totals).tolist()
        self._check_loss(loss, task, batches)
        # without a limit the norm is still wanted for the log
        norm = accelerator.clip_grad_norm_(self.model.parameters(), arguments.max_grad_norm or math.inf)
        if accelerator.scaler is None:  # which looks at the gradients itself
            self._check_finite("norm of the gradient", float(norm), batches)
        learning_rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        tasks = {"task_loss": task} if self.teacher is not None and "task" in output else {}
        rest = {"learning_rate": learning_rate, "grad_norm": float(norm)}
        return tokens, {"step": self.log.steps + 1, "loss": loss, **tasks, **rest}

    def _taught(self, batch: dict[str, Tensor], rows: np.ndarray) -> Taught:
        """What the teacher makes of a batch, or made of those rows."""
        if isinstance(self.teacher, Precomputed):
            return self.teacher.read(rows, self.batches.length(self.log.steps), self.accelerator.device)
        with self.accelerator.autocast():
            return self.teacher.read(batch)

    def finish(self) -> None:
        """Write model, adapters merged into it, tokenizer and log."""
        self.chosen.merge()
        save_model(self.accelerator, self.model, self.tokenizer, self.output_dir)
        self.log.wall_seconds = time.perf_counter() - self.started
        self.log.peak_memory_gib = round(peak_memory(self.accelerator.device), 3)
        self.accelerator.print(f"peak memory of a process: {self.log.peak_memory_gib:.2f} GiB")
        if self.accelerator.is_main_process:
            self.log.write(self.output_dir)
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _check_loss(self, loss: float, task: float, batches: list[dict[str, Tensor]]) -> None:
        self._check_finite("loss", loss, batches)
        step, limit = self.log.steps + 1, self.arguments.max_start_loss
        if step == 1 and limit is not None and task > limit:
            raise PosSwapError(
                f"max_start_loss={limit:g}: the first loss is {task:.4f} {self.log.unit}, before any update; the swap "
                "or the text is not what that limit was measured with"
            )

    def _check_finite(self, what: str, value: float, batches: list[dict[str, Tensor]]) -> None:
        """Raise, with the step's batches saved, before a number that is none reaches the weights."""
        if math.isfinite(value):
            return
        step, process = self.log.steps + 1, self.accelerator.process_index
        path = self.output_dir / f"failed-step-{step}-process-{process}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({f"{i}.{name}": t for i, batch in enumerate(batches) for name, t in batch.items()}, path)
        raise PosSwapError(
            f"the {what} of step {step} is {value}, and nothing is saved with it; try a lower learning_rate "
            f"than {self.arguments.learning_rate:g}, more warmup_steps than {self.arguments.warmup_steps}, or another "
            f"mixed_precision than {self.accelerator.mixed_precision!r}; the batches of the step are in {path.name}"
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
    except ImportError as error:  # a launch config that asks for DeepSpeed
        raise PosSwapError(f"distributed_type: {error}") from error
    try:
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            raise PosSwapError("mixed_precision='fp16' is ignored by accelerate on a CPU; choose 'bf16' or 'no'")
        check_processes(accelerator.num_processes)
        set_seed(arguments.seed, device_specific=True)
        if tracker is not None:
            values = {n: v if isinstance(v, (int, float, str)) else str(v) for n, v in asdict(arguments).items()}
            accelerator.init_trackers("hf_posswap", config=values)
        yield accelerator
    finally:
        accelerator.free_memory()
        if first:  # a later run in this process may ask for another precision
            AcceleratorState._reset_state()


@contextmanager
def _in_training(model: PreTrainedModel, arguments: FinetuneArguments) -> Iterator[None]:
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


def _optimizer(chosen: Trained, arguments: FinetuneArguments) -> torch.optim.Optimizer:
    """AdamW over what is trained; biases and norms, which have one dimension, do not decay."""
    rates = (arguments.learning_rate, arguments.positions_learning_rate or arguments.learning_rate)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in chosen.parameters().values():
        groups.setdefault((id(parameter) in chosen.positions, parameter.dim() <= 1), []).append(parameter)
    settings = [
        {"params": parameters, "lr": rates[positions], "weight_decay": 0.0 if flat else arguments.weight_decay}
        for (positions, flat), parameters in sorted(groups.items(), key=lambda group: group[0])
    ]
    return torch.optim.AdamW(settings, betas=(arguments.adam_beta1, arguments.adam_beta2))


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
