"""Write the card of a patched checkpoint, README.md, from its record and from what runs wrote beside it.

    python scripts/card.py --folder OUT --base_model NAME/BASE --license apache-2.0

No number is typed: `train_log.json` (finetune.py) and `evaluation.json` (evaluate.py), where they lie in the folder,
back every one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_posswap.arguments import parse, run


@dataclass
class CardArguments:
    """Whose card."""

    folder: str = field(metadata={"help": "Folder of the checkpoint, as patch.py or finetune.py wrote it."})
    base_model: str | None = field(default=None, metadata={"help": "Hub name of the base, where it was local."})
    license: str | None = field(default=None, metadata={"help": "License of the base."})
    repo_id: str | None = field(
        default=None, metadata={"help": "NAME/MODEL it will have on the hub, for its examples."}
    )


def main() -> None:
    (arguments,) = parse(CardArguments, description=__doc__.splitlines()[0])
    from hf_posswap.card import write_card

    path = write_card(
        arguments.folder, base_model=arguments.base_model, license=arguments.license, repo_id=arguments.repo_id
    )
    print(f"written  {path}")


if __name__ == "__main__":
    run(main)
