"""Patch a checkpoint's positions and save it, with its tokenizer and a card, ready to train or to push.

python scripts/patch.py --model MODEL --scheme yarn --factor 4 --output_dir OUT
python scripts/patch.py --model MODEL --scheme yarn --factor 4 --dry_run
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hf_posswap.arguments import PictureArguments, parse, run, scheme_arguments, scheme_from
from hf_posswap.errors import PosSwapError


@dataclass
class PatchArguments:
    """What to patch and where to put it."""

    model: str = field(metadata={"help": "Folder, or name on the hub, of the model to patch."})
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the patched model; new, or empty."})
    transformers_4: bool = field(default=False, metadata={"help": "Write the config keys of transformers 4 too."})
    layers: list[int] | None = field(
        default=None, metadata={"help": "Indices of the layers that take the scheme; the others keep their positions."}
    )
    fit: list[str] | None = field(
        default=None,
        metadata={
            "help": "Text files, or pictures for an image model: the scheme's parameters are chosen so that the model "
            "changes least on them."
        },
    )
    dry_run: bool = field(default=False, metadata={"help": "Print what would be changed, and stop."})


def main() -> None:
    arguments, picture, scheme = parse(
        PatchArguments, PictureArguments, scheme_arguments(), description=__doc__.splitlines()[0]
    )
    scheme = scheme_from(scheme)
    if scheme is None:
        raise PosSwapError("--scheme is missing: say what the positions are swapped for")
    if arguments.output_dir is None and not arguments.dry_run:
        raise PosSwapError("--output_dir is missing: say where the patched model goes, or give --dry_run")
    if (
        arguments.output_dir is not None
        and Path(arguments.output_dir).exists()
        and any(Path(arguments.output_dir).iterdir())
    ):
        raise PosSwapError(f"--output_dir={arguments.output_dir!r} is not empty; give a new folder")

    import transformers

    from hf_posswap import describe, from_pretrained, patch_model, probe
    from hf_posswap.card import write_card
    from hf_posswap.older import for_transformers_4, twins_of

    transformers.utils.logging.set_verbosity_error()
    try:
        model = from_pretrained(arguments.model, dtype="auto")
    except OSError as error:
        raise PosSwapError(f"--model={arguments.model!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    reader = {"processor" if model.main_input_name == "pixel_values" else "tokenizer": load_reader(model)}
    given = reader | {"layers": arguments.layers, "fit": read(arguments.fit, **reader), **picture.given()}
    if arguments.dry_run:
        print(patch_model(model, scheme, **given, dry_run=True))
        return
    patch_model(model, scheme, **given)
    print(describe(model))
    found = probe(model)
    print(found)
    if not found.ok:
        raise PosSwapError(f"the patched model is not what its config says: {found.faults[0]}; nothing was saved")
    if arguments.transformers_4:
        twins_of(model.config.to_dict())  # refused, where it is, before anything is written
    model.save_pretrained(arguments.output_dir)
    for saved in filter(None, reader.values()):
        saved.save_pretrained(arguments.output_dir)
    if arguments.transformers_4:
        for_transformers_4(arguments.output_dir)
    write_card(arguments.output_dir)
    print(f"written  {arguments.output_dir}")


def read(files: list[str] | None, tokenizer=None, **images) -> list | None:
    """The texts of files, or with a `processor` of images the pixels of each; None where none is given."""
    if files is None:
        return None
    try:
        if images:
            return [pixels(file, **images) for file in files]
        return [Path(file).read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise PosSwapError(f"--fit={files} cannot be read: {error}") from error


def pixels(file: str, processor):
    """(1, C, height, width), as the model's own processor makes them."""
    from PIL import Image

    if processor is None:
        raise PosSwapError("--fit needs the model's image processor, and there is none beside it")
    return processor(images=Image.open(file).convert("RGB"), return_tensors="pt")["pixel_values"]


def load_reader(model):
    """The tokenizer, or the image processor, beside a model; None where there is none, which is said."""
    from transformers import AutoImageProcessor, AutoTokenizer

    folder, images = model.config.name_or_path, model.main_input_name == "pixel_values"
    try:
        return (AutoImageProcessor if images else AutoTokenizer).from_pretrained(folder)
    except (OSError, ValueError):
        what = "image processor; its size" if images else "tokenizer; its length limit"
        print(f"note: {folder} has no {what} is left to you")
        return None


if __name__ == "__main__":
    run(main)
