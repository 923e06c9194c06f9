"""Write the checkpoints of tests/checkpoints: one tiny model per scheme, with the logits it gave when it was saved.

python -m tests.make_checkpoints [SCHEME ...]

They are made once, for each version of the record, and must load for ever: a scheme that is there already is left
alone. Logits are compared, not bits: another machine or torch rounds otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import transformers
from safetensors.torch import save_file

from hf_posswap import list_schemes

from .rows import ROWS, Row, logits

FOLDER = Path(__file__).with_name("checkpoints")
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
SIZES = {
    "llama": SMALL | {"num_key_value_heads": 1},
    "bert": SMALL,
    "vit": {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")},
}
# where the first row of a scheme is of a model, or of a size, that does not suit
PARAMS = {"longrope": {"factor": 4, "long_factor": (1.0, 1.5, 2.0, 4.0)}}


def row_of(scheme: str) -> Row:
    """The first row of a scheme on a model that is written small here."""
    found = next(row for row in ROWS if row.scheme == scheme and row.family in SIZES)
    return Row(scheme, found.family, PARAMS.get(scheme, found.params), length=found.length)


def write(scheme: str) -> Path:
    row, folder = row_of(scheme), FOLDER / scheme
    model, inputs = row.patched(layers=1, **SIZES[row.family]), row.inputs(batch=1)
    model.half().save_pretrained(folder)  # half the bytes; every number of it is one of float32 too
    for code in folder.glob("*.py"):  # this package runs nothing of a checkpoint, and tests what travels elsewhere
        code.unlink()
    model = model.float()
    save_file(inputs | {"logits": logits(model, **inputs).contiguous()}, folder / "expected.safetensors")
    return folder


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    for scheme in sys.argv[1:] or list_schemes():
        if (FOLDER / scheme).exists():
            print(f"{scheme} is there already")
            continue
        folder = write(scheme)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{size:>8,} bytes  {scheme}")


if __name__ == "__main__":
    main()
