"""The table: every (scheme, anatomy, parameters) that the laws are checked on. Capabilities are flags on the row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from packaging.version import Version

from hf_posswap import RecalibrationWarning, patch_model

from .families import FAMILIES, LENGTH, Family, pixels, tokens, with_page


@dataclass(frozen=True)
class Row:
    """One pair that must work.

    native: stock transformers reloads it. undoable: an undo survives a reload. length: tokens at which the effect
    is looked for. exact_cache: decode equals a full forward. static: no frequency depends on the length. compiles:
    to one graph, where it is static. static_cache: the model decodes with one. recalibrate: warns. keeps_table: a
    learned table stays as it was. starts_as: the (scheme, params) whose function it begins with, UNPATCHED the model's
    own. flex: checked on FlexAttention too (seconds to compile). layers: those that take it.
    """

    scheme: str
    family: str
    params: dict[str, Any] = field(default_factory=dict)
    native: bool = True
    undoable: bool = True
    length: int = 24
    exact_cache: bool = True
    static: bool = True
    compiles: bool = True
    static_cache: bool = True
    recalibrate: bool = False
    keeps_table: bool = False
    starts_as: tuple[str, dict[str, Any]] | None = None
    flex: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def anatomy(self) -> Family:
        return FAMILIES[self.family]

    @property
    def id(self) -> str:
        given = ",".join(f"{k}={v}" for k, v in self.params.items())
        layers = "" if self.layers is None else f"-layers{','.join(map(str, self.layers))}"
        return f"{self.scheme}({given})-{self.family}{layers}"

    def source(self, **overrides: Any) -> torch.nn.Module:
        """The un-patched model."""
        return self.anatomy.build(**overrides)

    def patch(self, model: torch.nn.Module) -> torch.nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)
            return patch_model(model, self.scheme, **self.params, layers=self.layers)

    def patched(self, **overrides: Any) -> torch.nn.Module:
        return self.patch(self.source(**overrides))

    def inputs(self, batch: int = 2) -> dict[str, torch.Tensor]:
        """Inputs on which the effect shows; of the new size, on image models."""
        if self.anatomy.vision:
            size, channels = self.params.get("image_size", 32), self.params.get("num_channels", 3)
            return {"pixel_values": pixels(size, channels)[:batch]}
        return with_page(getattr(transformers, self.anatomy.model), {"input_ids": tokens(batch, self.length)})

    def plain_inputs(self) -> dict[str, torch.Tensor]:
        """Inputs that the un-patched model takes."""
        return {"pixel_values": pixels(32)} if self.anatomy.vision else {"input_ids": tokens(2, 20)}


def logits(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    inside = getattr(model, "_orig_mod", model)  # of a compiled one
    with torch.no_grad():
        return model(**with_page(inside, inputs)).logits


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model with what a patch added to it a little away from where it starts."""
    for name, parameter in model.named_parameters():
        if ".posswap." in name:
            parameter.data += 0.05 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(2))
    return model


SCALED = [
    ("linear", {"factor": 4}, {}),
    ("ntk", {"factor": 4}, {}),
    ("yarn", {"factor": 4}, {}),
    ("llama3", {"factor": 4}, {}),
    ("dynamic", {"factor": 4}, {"exact_cache": False, "static": False, "length": LENGTH + 16}),
]
STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)  # factors of 8 pairs of dimensions
LONGROPE = {"factor": 4, "long_factor": STEPS}
# transformers computes the long frequencies at the first call, checking the config where no graph can be traced
LAZY = {"compiles": False}
LONGROPE_PER_TYPE = Version(transformers.__version__) >= Version("5.23")  # 5.17 fails at the second long input
# short and long factors that differ: the length decides, so neither a cache nor one graph is exact
SWITCHING = (
    {"factor": 4, "long_factor": STEPS, "short_factor": (1.0,) * 8},
    {"exact_cache": False, "static": False, "length": LENGTH + 16},
)
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
CATALOGUE_ROWS = [
    Row("longrope", "llama", LONGROPE, **LAZY),
    *[Row("longrope", "gemma3", LONGROPE, **LAZY) for _ in range(LONGROPE_PER_TYPE)],
    Row("longrope", "gpt_neox", {"factor": 4, "long_factor": (1.5, 4.0), "attention_factor": 1.3}, **LAZY),
    Row("longrope", "llama", SWITCHING[0], **SWITCHING[1]),
    *[Row("longrope", "olmo3", SWITCHING[0], **SWITCHING[1]) for _ in range(LONGROPE_PER_TYPE)],
    Row("longrope", "phi3", SWITCHING[0] | {"long_factor": STEPS[::2] + (4.0,) * 4}, **SWITCHING[1]),
    Row("ntk-by-parts", "llama", {"factor": 4}),
    Row("ntk-by-parts", "gemma3", {"target_length": 96}),
    Row("ntk-by-parts", "deepseek_v2", {"factor": 4}),
    Row("proportional", "llama", {"partial_rotary_factor": 0.5, "factor": 4}, recalibrate=True),
    Row("proportional", "qwen3", {"partial_rotary_factor": 0.25}, recalibrate=True),
    Row("proportional", "gemma3", {"partial_rotary_factor": 0.5, "rope_theta": 1e3}, recalibrate=True),
    Row("dynamic", "llama", {"factor": 4, "freeze_at": 100}),
    Row("dynamic", "olmo3", {"factor": 2, "freeze_at": 64}),
    *[
        Row(name, family, params, **flags)
        for family in ("deepseek_v2", "deepseek_v3", "llama4", "qwen2_vl", "olmo3", "modernbert")
        for name, params, flags in SCALED
        if name in ("yarn", "dynamic", "ntk") and (name == "yarn" or family in ("deepseek_v2", "qwen2_vl", "olmo3"))
    ],
    Row("yarn", "deepseek_v3", {"factor": 8, "mscale": 0.7, "mscale_all_dim": 1.0}),
    Row("linear", "deepseek_v3", {"factor": 4}),
    Row("rope", "llama4", {"pairing": "halves"}, recalibrate=True),
    Row("rope", "qwen2_vl", {"rope_theta": 5e5, "pairing": "interleaved"}, recalibrate=True),
    # the factor is on top of the un-scaled original, never on what the model's makers scaled
    Row("yarn", "llama31", {"factor": 8}),
    Row("linear", "llama_yarn", {"factor": 2}),
    Row("llama3", "llama_linear", {"factor": 4}),
    Row("yarn", "llama_dynamic", {"factor": 4}),
    Row("ntk", "phi3", {"factor": 4}),
    Row("rope", "phi3", {"rope_theta": 1e4}),
    Row("yarn", "deepseek_v3_yarn", {"factor": 8}),
    Row("rope", "deepseek_v3_yarn", {"rope_theta": 1e5}),
    Row("yarn", "llama_longrope", {"factor": 8}),
    Row("yarn", "phi", {"factor": 4}),
    Row("ntk", "phi", {"factor": 4}),
    Row("longrope", "phi", {"factor": 4, "long_factor": (1.0, 1.5, 2.0, 4.0)}, **LAZY),
    Row("rope", "phi", {"pairing": "interleaved"}, recalibrate=True),
    Row("yarn", "olmo3", {"factor": 4, "layer_types": ("full_attention", "sliding_attention")}),
    Row("linear", "modernbert", {"factor": 4, "layer_types": ("sliding_attention",)}),
]
ROTARY_ROWS += CATALOGUE_ROWS
DOCUMENTS = ("layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "bros")
KEPT_ROWS = ("layoutlmv2",)  # its image tokens read the silenced table, and are given a copy
TABLES = ("bert", "electra", "distilbert", "roberta", "xlm_roberta", "camembert", "mpnet", "gpt2", "opt")
SILENT_ROWS = [
    Row("nope", "llama", recalibrate=True),
    Row("nope", "qwen3", recalibrate=True),
    Row("nope", "cohere", recalibrate=True),
    Row("nope", "gemma3", recalibrate=True),
    Row("nope", "gpt_neox", native=False, recalibrate=True),
    *[
        Row("nope", family, undoable=False, recalibrate=True)
        for family in (
            *(*TABLES, "vit", "t5_encoder", "beit_bias", "beit_shared"),
            *("deberta", "deberta_v2", "squeezebert", "xlm"),
        )
    ],
    *[
        Row("nope", family, native=False, recalibrate=True)
        for family in ("bloom", "mpt", "falcon_alibi", "roformer", "gptj")
    ],
    Row("nope", "falcon", recalibrate=True),
    *[Row("nope", name, native=name not in KEPT_ROWS, undoable=False, recalibrate=True) for name in DOCUMENTS],
    Row("nope", "layoutlmv3", {"spatial_bias": "silence"}, undoable=False, recalibrate=True),
    Row("nope", "phi3", native=False, recalibrate=True),  # its config holds no silence
]
ADDED_ROWS = [
    Row("sinusoidal", family, {"layout": layout}, native=False, recalibrate=True)
    for family, layout in (
        ("llama", "interleaved"),
        ("qwen3", "halves"),
        ("gpt_neox", "interleaved"),
        ("gemma3", "halves"),
        ("bloom", "interleaved"),
        ("roformer", "interleaved"),
        ("gptj", "halves"),
    )
] + [
    Row("sinusoidal", family, native=False, undoable=False, recalibrate=True) for family in ("t5_encoder", "deberta_v2")
]
TABLE_ROWS = [
    row
    for family in TABLES
    for row in (
        Row("sinusoidal", family, {"max_positions": 80}, undoable=False, recalibrate=True, length=72),
        Row("learned", family, {"max_positions": 80, "init": "interpolate"}, undoable=False, length=72),
        Row("learned", family, {"factor": 3, "init": "tile"}, undoable=False, length=72),
        Row("learned", family, {"target_length": 80, "init": "hierarchical"}, undoable=False, length=72),
    )
]
RESIZED = {"undoable": False, "length": 72}
MORE_TABLE_ROWS = [
    Row("sinusoidal", "bert", {"layout": "halves", "scale": "none"}, undoable=False, recalibrate=True),
    Row("sinusoidal", "roberta", {"layout": "halves"}, undoable=False, recalibrate=True),
    *[
        row
        for family in ("bert", "roberta", "gpt2", "opt")
        for row in (
            Row("sinusoidal", family, {"max_positions": 80, "init": "fit"}, recalibrate=True, **RESIZED),
            Row("learned", family, {"max_positions": 80, "init": "fit"}, **RESIZED),
            Row("learned", family, {"max_positions": 80, "init": "random", "init_seed": 3}, **RESIZED),
        )
    ],
    Row("learned", "vit", {"image_size": 48}, undoable=False),
    *[Row("learned", family, {"factor": 3, "init": "tile"}, **RESIZED) for family in ("deberta", "xlm")],
    Row("learned", "vit", {"image_size": (48, 64), "init": "tile"}, undoable=False),
    Row("nope", "vit", {"image_size": 48, "num_channels": 1}, undoable=False, recalibrate=True),
    *[
        row
        for family in ("vit", "deit", "dinov2", "dinov2_registers", "clip", "siglip", "beit", "ijepa")
        for row in (
            Row("learned2d", family, {"image_size": 48, "resize": "bilinear", "antialias": True}, undoable=False),
            Row("sincos2d", family, {"image_size": 48, "patch_size": 16}, undoable=False, recalibrate=True),
        )
    ],
    Row("learned2d", "vit", {"image_size": (48, 64), "patch_size": (16, 8), "num_channels": 4}, undoable=False),
    Row("learned2d", "deit", {"image_size": 64, "resize": "tile"}, undoable=False),
    Row("learned2d", "clip", {"image_size": 16}, undoable=False),
    Row("sincos2d", "metaclip_2", {"image_size": 48}, undoable=False, recalibrate=True),
    Row("learned2d", "vit_msn", {"image_size": (48, 64)}, undoable=False),
    Row("sincos2d", "vit", {"convention": "big_vision", "scale": "none"}, undoable=False, recalibrate=True),
    Row("sincos2d", "vit", {"convention": "moco", "image_size": (48, 64)}, undoable=False, recalibrate=True),
    Row("sincos2d", "vit", {"init": "fit", "image_size": 48}, undoable=False, recalibrate=True),
    *[
        Row(scheme, "vit", params | {"image_size": 48, "patch_size": 4}, native=False, undoable=False, recalibrate=True)
        for scheme, params in (("rope", {"ndim": 1}), ("bias2d", {}), ("rope2d", {"kind": "mixed"}))
    ],
]
DOCUMENT_ROWS = [
    *[
        row
        for family in DOCUMENTS
        for row in (
            Row("learned", family, {"max_positions": 80, "init": "tile"}, **RESIZED),
            Row("sinusoidal", family, {"max_positions": 80}, recalibrate=True, **RESIZED),
        )
    ],
    Row("learned", "lilt", {"factor": 3}, **RESIZED),
    Row("learned", "layoutlmv3", {"target_length": 80, "relative_bias": "silence"}, recalibrate=True, **RESIZED),
    Row("sinusoidal", "bros", {"spatial_bias": "silence", "max_positions": 80}, recalibrate=True, **RESIZED),
]
UNPATCHED = ("", {})
CONCAT = {"combine": "concat"}
CONCAT_ROWS = [
    *[
        Row("sinusoidal", family, CONCAT, native=False, recalibrate=True, starts_as=("nope", {}), undoable=not table)
        for family, table in (("llama", False), ("gemma3", False), ("gpt_neox", False), ("bert", True), ("opt", True))
    ],
    *[
        Row(
            "sinusoidal",
            family,
            CONCAT | {"init": "fit", "layout": "halves"},
            native=False,
            recalibrate=True,
            undoable=False,
            starts_as=("sinusoidal", {"init": "fit", "layout": "halves"}),
        )
        for family in ("roberta", "gpt2")
    ],
    *[
        Row("learned", family, CONCAT, native=False, undoable=False, starts_as=UNPATCHED)
        for family in ("bert", "roberta", "gpt2", "opt", "electra")
    ],
    *[
        Row("learned", family, CONCAT | {"max_positions": 40}, native=False, recalibrate=True, starts_as=("nope", {}))
        for family in ("llama", "qwen3")
    ],
]
IN_ATTENTION = {
    "alibi": {},
    "alibi learnable": {"learnable": True},
    "alibi per layer": {"learnable": True, "per_layer": True},
    "alibi steep": {"slopes": (2.0, 1.0, 0.5, 0.25)},
    "t5": {},
    "t5 per layer": {"num_buckets": 16, "max_distance": 20, "per_layer": True},
    "kerple": {},
    "kerple power": {"kernel": "power", "per_layer": False},
    "fire": {"init_L": 8},
    "sandwich": {"dim": 32},
    "xpos": {"scale_base": 16},
    "rope": {},
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "ntk-by-parts": {"factor": 4},
    "yarn": {"factor": 4},
    "llama3": {"factor": 4},
    "proportional": {"partial_rotary_factor": 0.5},
    "logn": {"clip": False},
}
KEPT = (
    "llama",
    "gemma3",
    "gpt_neox",
    "modernbert",
    "bloom",
    "mpt",
    "falcon",
    "falcon_alibi",
    "roformer",
    "gptj",
)  # no numbers


def in_attention(names: str, family: str, **flags: Any) -> list[Row]:
    """Rows of `IN_ATTENTION` on one family; a learned table or bias that was silenced is gone from a checkpoint."""
    rows = []
    for name in names.split(", "):
        stacks = name == "logn"
        undoable = stacks or family in KEPT
        more = {"native": False, "undoable": undoable, "recalibrate": not stacks, "keeps_table": stacks}
        rows.append(Row(name.split()[0], family, IN_ATTENTION[name], **more | flags))
    return rows


EVERY_ROTATION = "rope, linear, ntk, ntk-by-parts, yarn, llama3, proportional"
EVERY_BIAS = "alibi, alibi learnable, t5, t5 per layer, kerple, kerple power, sandwich"
ATTENTION_ROWS = [
    *in_attention("alibi, t5, kerple, kerple power, fire, sandwich, xpos, logn", "llama", flex=True),
    *in_attention("alibi learnable, alibi per layer, t5 per layer", "llama"),
    *in_attention("alibi, t5, kerple, fire, sandwich, xpos, logn", "gemma3"),
    *in_attention("alibi, t5, kerple, fire, sandwich, xpos, logn", "gpt_neox"),
    *in_attention(f"{EVERY_BIAS}, fire, xpos, {EVERY_ROTATION}, logn", "gpt2"),
    *in_attention(f"alibi, t5, kerple, fire, sandwich, xpos, {EVERY_ROTATION}, logn", "opt"),
    *in_attention("alibi, t5, kerple, kerple power, sandwich, rope", "bert", flex=True),
    *in_attention("alibi learnable, alibi per layer, t5 per layer", "bert"),
    *in_attention("linear, ntk, ntk-by-parts, yarn, llama3, proportional", "bert"),
    *in_attention(f"alibi, t5, kerple, sandwich, {EVERY_ROTATION}", "roberta"),
    *in_attention("alibi, t5, kerple, sandwich", "modernbert"),
    *in_attention(f"alibi, t5, t5 per layer, kerple, sandwich, {EVERY_ROTATION}", "mpnet"),
    *in_attention("alibi, rope", "electra"),
    *in_attention("alibi, rope", "distilbert"),
    *in_attention("alibi steep, t5, t5 per layer, kerple, kerple power, fire, sandwich, xpos", "bloom"),
    *in_attention(EVERY_ROTATION, "bloom"),
    *in_attention(f"alibi steep, t5, kerple, fire, sandwich, xpos, {EVERY_ROTATION}", "mpt"),
    *in_attention("alibi, t5, kerple, fire, sandwich, xpos, rope", "falcon_alibi"),
    *in_attention("alibi, t5, kerple, fire, sandwich, xpos, logn", "falcon"),
    *in_attention(f"alibi, t5, t5 per layer, kerple, sandwich, {EVERY_ROTATION}", "t5_encoder"),
    *[row for family in DOCUMENTS for row in in_attention("alibi learnable, t5 per layer, rope, yarn", family)],
    *[
        Row(name, family, IN_ATTENTION[name] | keep, native=False, undoable=family == "t5_encoder", recalibrate=True)
        for name, family, keep in (
            ("rope", "layoutlmv2", {"relative_bias": "keep"}),
            ("alibi", "layoutlmv3", {"relative_bias": "keep", "spatial_bias": "silence"}),
            ("t5", "mpnet", {"relative_bias": "keep"}),
            ("rope", "t5_encoder", {"relative_bias": "keep"}),
        )
    ],
    *[row for family in ("deberta", "deberta_v2", "squeezebert", "xlm") for row in in_attention("alibi, rope", family)],
    *in_attention("alibi, kerple", "roformer"),
    *in_attention("yarn, linear", "roformer", recalibrate=False),
    *in_attention("alibi, fire, xpos", "gptj"),
    *in_attention("yarn, linear", "gptj", recalibrate=False),
]
ONE_AXIS = {"ndim": 1}  # patches numbered row by row
IMAGE_ROWS = [
    *[
        replace(row, params=row.params | ONE_AXIS)
        for names, family in (
            (f"{EVERY_BIAS}, {EVERY_ROTATION}", "vit"),
            ("alibi, yarn", "deit"),
            ("alibi, rope", "dinov2"),
            ("t5, rope", "dinov2_registers"),
            ("kerple, rope", "beit"),
            ("alibi, rope", "beit_bias"),
        )
        for row in in_attention(names, family)
    ],
    *[
        Row(name, family, params, **{"native": False, "undoable": False, "recalibrate": True} | flags)
        for name, family, params, flags in (
            ("rope2d", "vit", {}, {}),
            ("rope2d", "vit", {"kind": "mixed", "pairing": "interleaved"}, {}),
            ("rope2d", "deit", {"convention": "xy", "rope_theta": 10000.0}, {}),
            ("rope2d", "dinov2_registers", {"coordinates": "image"}, {}),
            ("rope2d", "dinov2", {"kind": "mixed"}, {}),
            ("bias2d", "vit", {}, {}),
            ("bias2d", "deit", {"per_layer": False, "init": "zeros"}, {}),
            ("bias2d", "dinov2_registers", {}, {}),
            ("bias2d", "beit", {}, {}),
            ("bias2d", "beit_bias", {}, {}),
            ("bias2d", "beit_shared", {"per_layer": False}, {}),
            ("rope2d", "beit_bias", {}, {}),
            ("rope2d", "metaclip_2", {}, {}),
            ("bias2d", "vit_msn", {}, {}),
            ("rope2d", "beit_bias", {"relative_bias": "keep"}, {"undoable": True}),
        )
    ],
    Row("logn", "vit", {"original_max_position_embeddings": 4}, native=False, keeps_table=True),
]
SOME = {"native": False, "recalibrate": True}
LAYER_ROWS = [
    *[Row("nope", family, layers=(1,), **SOME) for family in ("llama", "gemma3", "gpt_neox", "qwen2_vl", "llama4")],
    Row("nope", "deepseek_v2", layers=(0,), **SOME),
    Row("alibi", "modernbert", layers=(0,), **SOME),
    Row("nope", "bloom", layers=(0,), static_cache=Version(transformers.__version__) >= Version("5.23"), **SOME),
    Row("alibi", "llama", layers=(1,), **SOME),
    Row("t5", "gemma3", {"per_layer": True}, layers=(0,), **SOME),
    Row("xpos", "gpt_neox", {"scale_base": 16}, layers=(0,), **SOME),
    Row("rope", "mpt", layers=(0,), **SOME),
    Row("kerple", "falcon", layers=(1,), **SOME),
    Row("logn", "gpt2", {"clip": False}, layers=(1,), native=False, keeps_table=True),
    Row("nope", "beit_bias", layers=(1,), undoable=False, recalibrate=True),
    Row("bias2d", "beit_bias", layers=(1,), undoable=False, **SOME),
    Row("yarn", "llama", {"factor": 4}, layers=(0,), native=False),
    Row("linear", "gpt_neox", {"factor": 4}, layers=(1,), native=False),
    Row("yarn", "gemma3", {"factor": 4}, layers=(1,), native=False),
    Row("dynamic", "llama", {"factor": 4}, layers=(1,), native=False, **SWITCHING[1]),
]
ROWS = ROTARY_ROWS + SILENT_ROWS + ADDED_ROWS + TABLE_ROWS + MORE_TABLE_ROWS + CONCAT_ROWS + ATTENTION_ROWS
ROWS += LAYER_ROWS + DOCUMENT_ROWS + IMAGE_ROWS
CAUSAL_ROWS = [row for row in ROWS if row.anatomy.causal]
TEXT_ROWS = [row for row in ROWS if not row.anatomy.vision]
