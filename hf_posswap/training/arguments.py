"""The flags of a fine-tuning run, under the names of transformers' `run_clm.py` and `TrainingArguments`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Literal

from ..errors import PosSwapError

SHORTEST_BLOCK = 8  # room for a first and a last special token and for words to predict between them


def _help(*sentences: str) -> dict[str, str]:
    return {"help": " ".join(sentences)}


@dataclass(kw_only=True)
class FinetuneArguments:
    """Every flag of a run. Raises PosSwapError for a number out of range, and unless it has one source of text."""

    output_dir: str = field(metadata=_help("Folder for the trained model, its checkpoints and train_log.json."))
    max_steps: int = field(metadata=_help("Optimizer steps, those before a resume included."))
    block_size: int | None = field(
        default=None, metadata=_help("Tokens in a training row; a picture has as many as it has patches.")
    )
    model: str | None = field(
        default=None, metadata=_help("Folder, or name on the hub, of the model to train. Not needed to resume.")
    )
    layers: list[int] | None = field(
        default=None, metadata=_help("Indices of the layers that take --scheme; the others keep their positions.")
    )
    fit_tokens: int = field(
        default=0,
        metadata=_help(
            "Choose the parameters of --scheme from so many tokens of the training text (patches of the pictures),",
            "before it is installed, so that the model changes least; 0: the scheme's own.",
        ),
    )
    dtype: Literal["float32", "bfloat16", "auto"] = field(
        default="float32",
        metadata=_help(
            "Of the weights while training; auto: as they are stored.",
            "float32 keeps updates that bfloat16 rounds away, also under --mixed_precision.",
        ),
    )

    train_file: list[str] | None = field(
        default=None,
        metadata=_help(
            "Text files, one document each; or .json, .jsonl, .csv or .parquet files, one document per row."
        ),
    )
    train_dir: str | None = field(
        default=None, metadata=_help("Folder of text files, read with its subfolders, one document each.")
    )
    file_pattern: str = field(default="*.txt", metadata=_help("Which files of --train_dir are read: *.py, say."))
    dataset_name: str | None = field(
        default=None, metadata=_help("Name, or folder, for datasets.load_dataset; one document per row.")
    )
    dataset_config_name: str | None = field(default=None, metadata=_help("Configuration of --dataset_name."))
    dataset_split: str = field(
        default="train", metadata=_help("Split of --dataset_name, in datasets' notation: train[:1000], say.")
    )
    text_column: str = field(default="text", metadata=_help("Column that holds the text."))
    image_dir: str | None = field(
        default=None, metadata=_help("Folder of pictures with a subfolder for each class, for an image model.")
    )
    image_column: str = field(default="image", metadata=_help("Column of --dataset_name that holds the pictures."))
    label_column: str = field(default="label", metadata=_help("Column of --dataset_name that holds their classes."))

    objective: Literal["causal", "masked", "images", "sentences"] | None = field(
        default=None,
        metadata=_help(
            "Predict the next token, masked ones, or the class of a picture: read from the model's class where not",
            "given. sentences: the vectors of whole texts, of an encoder without a head (AutoModel).",
        ),
    )
    pooling: Literal["mean", "cls"] = field(
        default="mean", metadata=_help("The vector of a text: the mean of its tokens' last states, or the first one.")
    )
    contrast_rows: int = field(
        default=0,
        metadata=_help(
            "Texts that sentences are told apart in: of each two crops are taken, and one is to be nearer to the other",
            "than to those of so many texts. A divisor of --per_device_train_batch_size; 0 with --distil 1.",
        ),
    )
    contrast_temperature: float = field(
        default=0.05, metadata=_help("Temperature of their cosines; that of SimCSE and Contriever.")
    )
    packing: Literal["concat", "documents", "whole"] = field(
        default="concat",
        metadata=_help(
            "concat: the documents of a row follow, and see, each other.",
            "documents (causal models): positions begin anew at each, and attention stays inside it.",
            "whole: the same, and no document that fits a row is cut; rows are filled up with padding.",
        ),
    )
    curriculum: list[int] | None = field(
        default=None,
        metadata=_help(
            "Lengths of the rows in the stages before --block_size, rising, each a divisor of it.",
            "A row is cut into shorter ones, so that every step takes the same tokens.",
        ),
    )
    curriculum_steps: int = field(default=0, metadata=_help("Optimizer steps of each stage of --curriculum."))
    pose_length: int | None = field(
        default=None,
        metadata=_help(
            "Spread the positions of each row at random below this length (PoSE): rows of --block_size tokens, and",
            "distances up to this one. For models that take their distances from position_ids.",
        ),
    )
    pose_chunks: int = field(default=2, metadata=_help("Runs without a gap in the spread positions of a row."))
    mlm_probability: float = field(
        default=0.15, metadata=_help("Share of the tokens that the masked objective predicts.")
    )

    train: Literal["all", "positions", "lora"] = field(
        default="all",
        metadata=_help(
            "all: every weight that is not frozen.",
            "positions: only what a scheme learns (a bias, a table of positions).",
            "lora: PEFT's adapters, and with them the parameters of positions; the model is saved merged.",
        ),
    )
    positions_learning_rate: float | None = field(
        default=None,
        metadata=_help("Peak learning rate of the parameters of positions; --learning_rate where not given."),
    )
    lora_rank: int = field(default=8, metadata=_help("Rank of the adapters."))
    lora_alpha: int = field(default=16, metadata=_help("Their scale: alpha / rank."))
    lora_targets: list[str] | None = field(
        default=None,
        metadata=_help("Names of the modules that get one: q_proj v_proj, say. All linear ones but the head, else."),
    )
    lora_norms: bool = field(
        default=True, metadata=_help("Train the norms too: longer contexts need it (LongLoRA, section 3.3).")
    )
    lora_embeddings: bool = field(default=True, metadata=_help("Train the token embedding too, for the same reason."))

    distil: float = field(
        default=0.0,
        metadata=_help(
            "Share of the loss that asks for the teacher's distribution instead of the text's next (or masked) token,",
            "0 to 1. A causal teacher teaches the beginning of each row, as many tokens as it was trained on; the rest",
            "has the task's loss alone. A masked one refuses longer rows. With sentences: the share that asks for the",
            "teacher's vectors, of a longer text the mean over windows of as many tokens as it knows.",
        ),
    )
    teacher: str | None = field(
        default=None,
        metadata=_help("Folder of the model that teaches; where not given, --model as it is before --scheme."),
    )
    teacher_device: Literal["same", "cpu"] = field(
        default="same", metadata=_help("Where the teacher computes; its head is beside the model in any case.")
    )
    teacher_cache: str | None = field(
        default=None,
        metadata=_help(
            "Folder that keeps what the teacher makes of every row, read once before training; training then holds",
            "none but its head, and later runs on the same rows load none. Anything else of text, teacher, lengths or",
            "precision is kept under a name of its own. On disk a token that the teacher reads takes as many bytes as",
            "one state of it: its width times 2 in bfloat16, times 4 in float32 (8 KiB a token, 8 TB for 10**9, at a",
            "width of 4096); with sentences a text takes one float32 vector. For rows that are the same in every",
            "epoch: not for masked ones, nor for crops, nor with --distil_hidden.",
        ),
    )
    distil_temperature: float = field(
        default=1.0, metadata=_help("Temperature of both distributions; above 1 the unlikely tokens count more.")
    )
    distil_hidden: float = field(
        default=0.0,
        metadata=_help("Weight of the distance between both models' layers, beside the distributions' of 1."),
    )

    per_device_train_batch_size: int = field(default=1, metadata=_help("Rows in one forward of one process."))
    gradient_accumulation_steps: int = field(default=1, metadata=_help("Forwards of each process per optimizer step."))
    gradient_checkpointing: bool = field(
        default=False, metadata=_help("Recompute activations in the backward: less memory, more time.")
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = field(
        default=None, metadata=_help("Autocast. As `accelerate launch` says where not given, else no.")
    )

    learning_rate: float = field(default=2e-5, metadata=_help("Peak learning rate of AdamW."))
    lr_scheduler_type: str = field(
        default="linear", metadata=_help("Name of a transformers scheduler: linear, cosine, constant, ...")
    )
    lr_scheduler_kwargs: str | None = field(
        default=None,
        metadata=_help('What that scheduler takes besides steps, as JSON: {"num_decay_steps": 100}, say.'),
    )
    warmup_steps: int = field(default=20, metadata=_help("Optimizer steps over which the learning rate rises from 0."))
    weight_decay: float = field(default=0.0, metadata=_help("Of every weight of two or more dimensions."))
    adam_beta1: float = field(default=0.9, metadata=_help("Decay of AdamW's mean of the gradient."))
    adam_beta2: float = field(default=0.999, metadata=_help("Decay of AdamW's mean of its square."))
    max_grad_norm: float = field(default=1.0, metadata=_help("Clip the norm of the gradient to this; 0 leaves it."))
    max_start_loss: float | None = field(
        default=None,
        metadata=_help(
            "Stop before the first update where the first loss, in nats per token, is above this.",
            "In any case a new run compares it with that of the model before its swap, and stops where a trained",
            "model is left no better than guessing.",
        ),
    )
    seed: int = field(default=42, metadata=_help("Of the order of the rows, the masking and dropout."))

    logging_steps: int = field(default=1, metadata=_help("Optimizer steps from one line of the log to the next."))
    save_steps: int = field(default=500, metadata=_help("Optimizer steps from one checkpoint to the next; 0: none."))
    resume_from_checkpoint: str = field(
        default="latest",
        metadata=_help(
            "Folder of a checkpoint; or `latest`, the newest in --output_dir, and a new run where there is none yet:",
            "the same command, given again after an interruption, goes on.",
        ),
    )
    peak_tflops: float | None = field(
        default=None,
        metadata=_help(
            "10**12 operations a second that the device could do, for `mfu` in the log. Not needed of the GPUs that",
            "hf_posswap.training.flops knows, computing in 16 bits; of another, no mfu is logged without it.",
        ),
    )
    report_to: str | None = field(
        default=None, metadata=_help("A tracker that accelerate knows: tensorboard, wandb, ...")
    )

    def __post_init__(self) -> None:
        for name in (
            "max_steps",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
            "lora_rank",
            "lora_alpha",
        ):
            self._check(name, at_least=1)
        for name in (
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "seed",
            "save_steps",
            "fit_tokens",
            "contrast_rows",
        ):
            self._check(name, at_least=0)
        for name in ("adam_beta1", "adam_beta2"):
            self._check(name, at_least=0, below=1)
        self._check("block_size", at_least=SHORTEST_BLOCK)
        self._check("mlm_probability", above=0, below=1)
        self._check("learning_rate", above=0)
        self._check("positions_learning_rate", above=0)
        self._check("max_start_loss", above=0)
        self._check("peak_tflops", above=0)
        self._check("distil", at_least=0, at_most=1)
        self._check("distil_temperature", above=0)
        self._check("contrast_temperature", above=0)
        self._check("distil_hidden", at_least=0)
        for name in ("teacher", "teacher_cache", "distil_hidden"):
            if getattr(self, name) and not self.distil:
                raise PosSwapError(f"{name}={getattr(self, name)!r} was given with distil=0, which asks no teacher")
        if self.teacher_cache is not None and self.distil_hidden:
            raise PosSwapError(
                f"teacher_cache={self.teacher_cache!r} keeps one state of a token, and distil_hidden="
                f"{self.distil_hidden:g} asks for those of every layer; use distil_hidden=0, or leave it out"
            )
        if self.block_size is None and (self.train_file or self.train_dir or self.pose_length or self.curriculum):
            raise PosSwapError("block_size is missing: say how many tokens a training row has")
        self._check("pose_length", above=self.block_size or 0)
        self._check("pose_chunks", at_least=2, below=SHORTEST_BLOCK)
        if self.pose_length is not None:
            self._refuse_with("pose_length", packing="concat", distil=0)
        self._check_curriculum()
        sources = ("train_file", "train_dir", "dataset_name", "image_dir")
        given = {name: getattr(self, name) for name in sources if getattr(self, name) is not None}
        if len(given) != 1:
            raise PosSwapError(f"give exactly one of {', '.join(sources)}; got {given or 'none'}")

    def _refuse_with(self, name: str, **needed: object) -> None:
        """Raise where an argument was given that goes with certain values of others only."""
        for other, value in needed.items():
            if getattr(self, other) != value:
                raise PosSwapError(
                    f"{name}={getattr(self, name)!r} does not go with {other}={getattr(self, other)!r}; use {value!r}"
                )

    def _check_curriculum(self) -> None:
        stages = self.curriculum or []
        self._check("curriculum_steps", at_least=1 if stages else 0, below=math.inf if stages else 1)
        for stage, after in pairwise([*stages, self.block_size]):
            if stage < SHORTEST_BLOCK or stage >= after or self.block_size % stage:
                raise PosSwapError(
                    f"curriculum={self.curriculum}: {stage} is not a divisor of block_size={self.block_size} from "
                    f"{SHORTEST_BLOCK} to below {after}"
                )

    def _check(
        self,
        name: str,
        *,
        at_least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
        at_most: float = math.inf,
    ) -> None:
        """Raise unless the field is None or a number of its type within the bounds."""
        value = getattr(self, name)
        if value is None:
            return
        whole = "int" in str(next(f.type for f in fields(self) if f.name == name))  # a parser puts types for names
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise PosSwapError(f"{name}={value!r} is not a {'whole ' if whole else ''}number")
        if not math.isfinite(value) or value < at_least:
            raise PosSwapError(f"{name}={value!r} is too small; the least value is {max(at_least, above):g}")
        if value <= above:
            raise PosSwapError(f"{name}={value!r} is too small; it must be greater than {above:g}")
        if value > at_most:
            raise PosSwapError(f"{name}={value!r} is too great; the greatest value is {at_most:g}")
        if value >= below:
            raise PosSwapError(f"{name}={value!r} is too great; it must be less than {below:g}")
