"""Every scheme of the attention site on every family that it was promised for: a row that the laws check, or a refusal
that says why. No cell is missing."""

from __future__ import annotations

import pytest

from hf_posswap import PosSwapError, patch_model

from .families import FAMILIES
from .rows import EVERY_ROTATION, IN_ATTENTION, ONE_AXIS, ROWS
from .test_refusals import state, unchanged

BIASES = ("alibi", "t5", "kerple", "fire", "sandwich", "xpos", "logn")
ROTATIONS = (*EVERY_ROTATION.split(", "), "dynamic", "longrope")
TURNED = ("llama", "gemma3", "gpt_neox", "modernbert")  # by a rotation of their own: its kin are the rotary site's rows
UNTURNED = ("gpt2", "opt", "bert", "roberta", "mpnet", "t5_encoder", "bloom", "mpt", "vit")
CELLS = {
    *((scheme, family) for family in TURNED for scheme in (*BIASES, "rope")),
    *((scheme, family) for family in UNTURNED for scheme in (*BIASES, *ROTATIONS)),
}
PARAMS = IN_ATTENTION | {"dynamic": {"factor": 4}, "longrope": {"factor": 4, "long_factor": (2.0,) * 8}}

IMAGES = ("vit",)
ENCODERS = ("bert", "roberta", "modernbert", "mpnet", "t5_encoder")
REFUSED = {
    **{("fire", family): r"fire: it divides by how far a causal query can look" for family in ENCODERS + IMAGES},
    **{("xpos", family): r"xpos: keys that follow would grow with distance" for family in ENCODERS + IMAGES},
    **{("logn", family): r"logn: the tokens that a query sees are counted" for family in ENCODERS},
    **{("logn", family): r"adds its own bias out of reach" for family in ("bloom", "mpt", "mpnet")},
    ("rope", "modernbert"): r"rope\(\) would change nothing on this ModernBertForMaskedLM",
    **{
        (scheme, family): rf"{scheme}: its frequencies follow the longest position of a call"
        for scheme in ("dynamic", "longrope")
        for family in UNTURNED
    },
}


def test_every_cell_is_a_row_or_a_refusal():
    rows = {(row.scheme, row.family) for row in ROWS if row.layers is None}
    assert not CELLS - rows - REFUSED.keys()
    assert not rows & REFUSED.keys()


@pytest.mark.parametrize(("scheme", "family"), sorted(REFUSED))
def test_a_refused_cell_says_why(scheme: str, family: str):
    model = FAMILIES[family].build()
    before = state(model)
    with pytest.raises(PosSwapError, match=REFUSED[scheme, family]):
        patch_model(model, scheme, **PARAMS[scheme] | (ONE_AXIS if family in IMAGES else {}))
    unchanged(model, before)
