"""The table: every (scheme, anatomy, parameters) that the laws are checked on. Capabilities are flags on the row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_posswap import RecalibrationWarning, patch_model

from .families import FAMILIES, LENGTH, Family, pixels, tokens


@dataclass(frozen=True)
class Row:
    """One pair that must work.

    native: stock transformers reloads it. undoable: an undo survives a reload. length: tokens at which the effect
    is looked for. exact_cache: decode equals a full forward. static: compiles to one graph. recalibrate: warns.
    keeps_table: a learned table stays as it was. flex: checked on FlexAttention too (seconds to compile).
    """

    scheme: str
    family: str
    params: dict[str, Any] = field(default_factory=dict)
    native: bool = True
    undoable: bool = True
    length: int = 24
    exact_cache: bool = True
    static: bool = True
    recalibrate: bool = False
    keeps_table: bool = False
    flex: bool = False

    @property
    def anatomy(self) -> Family:
        return FAMILIES[self.family]

    @property
    def id(self) -> str:
        given = ",".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.scheme}({given})-{self.family}"

    def source(self, **overrides: Any) -> torch.nn.Module:
        """The un-patched model."""
        return self.anatomy.build(**overrides)

    def patch(self, model: torch.nn.Module) -> torch.nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)
            return patch_model(model, self.scheme, **self.params)

    def patched(self, **overrides: Any) -> torch.nn.Module:
        return self.patch(self.source(**overrides))

    def inputs(self, batch: int = 2) -> dict[str, torch.Tensor]:
        """Inputs on which the effect shows; of the new size, on image models."""
        if self.anatomy.vision:
            return {"pixel_values": pixels(self.params.get("image_size", 32))}
        return {"input_ids": tokens(batch, self.length)}


def logits(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


SCALED = [
    ("linear", {"factor": 4}, {}),
    ("ntk", {"factor": 4}, {}),
    ("yarn", {"factor": 4}, {}),
    ("llama3", {"factor": 4}, {}),
    ("dynamic", {"factor": 4}, {"exact_cache": False, "static": False, "length": LENGTH + 16}),
]
ROTARY_ROWS = [
    *[Row(name, "llama", params, **flags) for name, params, flags in SCALED],
    *[Row(name, "gpt_neox", params, **flags) for name, params, flags in SCALED],
    *[Row(name, "gemma3", params, **flags) for name, params, flags in SCALED],
    Row(
        "yarn",
        "llama",
        {"target_length": 96, "attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    ),
    Row("yarn", "qwen3", {"factor": 2.5}),
    Row("yarn", "cohere", {"factor": 8}),
    Row("linear", "qwen3", {"target_length": 64}),
    Row("yarn", "gemma3", {"factor": 4, "layer_types": ("full_attention", "sliding_attention")}),
    Row("rope", "llama", {"rope_theta": 5e5}),
    Row("rope", "gpt_neox", {"rope_theta": 5e5}),
    Row("rope", "gemma3", {"rope_theta": 5e5}),
    Row("rope", "llama", {"partial_rotary_factor": 0.5}),
    Row("rope", "llama", {"pairing": "interleaved"}, recalibrate=True),
    Row("rope", "qwen3", {"pairing": "interleaved", "rope_theta": 1e5}, recalibrate=True),
    Row("rope", "cohere", {"pairing": "halves"}, recalibrate=True),
    Row("rope", "gemma3", {"pairing": "interleaved"}, recalibrate=True),
]
SILENT_ROWS = [
    Row("nope", "llama", recalibrate=True),
    Row("nope", "qwen3", recalibrate=True),
    Row("nope", "cohere", recalibrate=True),
    Row("nope", "gemma3", recalibrate=True),
    Row("nope", "gpt_neox", native=False, recalibrate=True),
    *[
        Row("nope", family, undoable=False, recalibrate=True)
        for family, anatomy in FAMILIES.items()
        if family not in ("llama", "qwen3", "cohere", "gemma3", "gpt_neox", "modernbert")
    ],
]
ADDED_ROWS = [
    Row("sinusoidal", family, {"layout": layout}, native=False, recalibrate=True)
    for family, layout in (
        ("llama", "interleaved"),
        ("qwen3", "halves"),
        ("gpt_neox", "interleaved"),
        ("gemma3", "halves"),
    )
]
TABLE_ROWS = [
    row
    for family in ("bert", "electra", "distilbert", "roberta", "xlm_roberta", "camembert", "mpnet", "gpt2", "opt")
    for row in (
        Row("sinusoidal", family, {"max_positions": 80}, undoable=False, recalibrate=True, length=72),
        Row("learned", family, {"max_positions": 80, "init": "interpolate"}, undoable=False, length=72),
        Row("learned", family, {"factor": 3, "init": "tile"}, undoable=False, length=72),
        Row("learned", family, {"target_length": 80, "init": "hierarchical"}, undoable=False, length=72),
    )
]
MORE_TABLE_ROWS = [
    Row("sinusoidal", "bert", {"layout": "halves", "scale": "none"}, undoable=False, recalibrate=True),
    Row("sinusoidal", "roberta", {"layout": "halves"}, undoable=False, recalibrate=True),
    Row("learned", "vit", {"image_size": 48}, undoable=False),
    Row("learned", "vit", {"image_size": (48, 64), "init": "tile"}, undoable=False),
]
IN_ATTENTION = {
    "alibi": {},
    "alibi learnable": {"learnable": True},
    "t5": {},
    "t5 per layer": {"num_buckets": 16, "max_distance": 20, "per_layer": True},
    "kerple": {},
    "kerple power": {"kernel": "power", "per_layer": False},
    "fire": {"init_L": 8},
    "sandwich": {"dim": 32},
    "xpos": {"scale_base": 16},
    "rope": {},
    "yarn": {"factor": 4},
    "logn": {"clip": False},
}
ROTARY_FAMILIES = ("llama", "gemma3", "gpt_neox", "modernbert")


def in_attention(names: str, family: str, **flags: Any) -> list[Row]:
    """Rows of `IN_ATTENTION` on one family; a learned table or bias that was silenced is gone from a checkpoint."""
    rows = []
    for name in names.split(", "):
        stacks = name == "logn"
        undoable = stacks or family in ROTARY_FAMILIES
        more = {"native": False, "undoable": undoable, "recalibrate": not stacks, "keeps_table": stacks}
        rows.append(Row(name.split()[0], family, IN_ATTENTION[name], **more | flags))
    return rows


EVERY_BIAS = "alibi, alibi learnable, t5, t5 per layer, kerple, kerple power, sandwich"
ATTENTION_ROWS = [
    *in_attention("alibi, t5, fire, xpos", "llama", flex=True),
    *in_attention("alibi learnable, t5 per layer, kerple, kerple power, sandwich, logn", "llama"),
    *in_attention("alibi, t5, kerple, fire, xpos, logn", "gemma3"),
    *in_attention("alibi, t5, kerple, fire, sandwich, xpos, logn", "gpt_neox"),
    *in_attention(f"{EVERY_BIAS}, fire, xpos, rope, yarn, logn", "gpt2"),
    *in_attention("alibi, t5, kerple, fire, sandwich, xpos, rope, yarn, logn", "opt"),
    *in_attention("alibi, rope", "bert", flex=True),
    *in_attention("alibi learnable, t5, t5 per layer, kerple, kerple power, sandwich, yarn", "bert"),
    *in_attention("alibi, t5, kerple, sandwich, rope, yarn", "roberta"),
    *in_attention("alibi, t5, kerple", "modernbert"),
    *in_attention("alibi, rope", "electra"),
    *in_attention("alibi, rope", "distilbert"),
]
ROWS = ROTARY_ROWS + SILENT_ROWS + ADDED_ROWS + TABLE_ROWS + MORE_TABLE_ROWS + ATTENTION_ROWS
CAUSAL_ROWS = [row for row in ROWS if row.anatomy.causal]
TEXT_ROWS = [row for row in ROWS if not row.anatomy.vision]
