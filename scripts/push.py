"""Push a patched checkpoint to the hub, private unless told otherwise, with its card.

    python scripts/push.py --folder OUT --repo_id NAME/MODEL --dry_run
    python scripts/push.py --folder OUT --repo_id NAME/MODEL

The token is the one of `hf auth login`, or in HF_TOKEN; it is never printed. Repeat the command after an interruption:
files that the hub has already are not sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError

# What a checkpoint needs to be loaded, and what backs the card's numbers; training states stay at home.
PUSHED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md", "evaluation.csv", "evaluation.png")


@dataclass
class PushArguments:
    """What to push and where to."""

    folder: str = field(metadata={"help": "Folder of the checkpoint, as patch.py or finetune.py wrote it."})
    repo_id: str = field(metadata={"help": "NAME/MODEL on the hub; made if it does not exist."})
    public: bool = field(default=False, metadata={"help": "Make a new repository public."})
    base_model: str | None = field(default=None, metadata={"help": "Hub name of the base, for the card."})
    license: str | None = field(default=None, metadata={"help": "License of the base, for the card."})
    commit_message: str = field(default="Upload with hf_posswap", metadata={"help": "Message of the commit."})
    dry_run: bool = field(default=False, metadata={"help": "Print exactly what would be pushed, and stop."})


def main() -> None:
    (arguments,) = parse(PushArguments, description=__doc__.splitlines()[0])
    folder = Path(arguments.folder)
    if not (folder / "config.json").is_file():
        raise PosSwapError(f"--folder={arguments.folder!r} holds no config.json; give the folder of a checkpoint")

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from hf_posswap.card import card

    text = card(folder, base_model=arguments.base_model, license=arguments.license)
    files = sorted({path for pattern in PUSHED for path in folder.glob(pattern)} - {folder / "README.md"})
    if not any(path.suffix == ".safetensors" for path in files):
        raise PosSwapError(f"--folder={arguments.folder!r} holds no .safetensors weights; save the model there first")
    if arguments.dry_run:
        visibility = "public" if arguments.public else "private"
        print(f"would push to {arguments.repo_id} ({visibility} if it is new), message {arguments.commit_message!r}:")
        for path in files:
            print(f"  {path.stat().st_size:>14,}  {path.name}")
        print(f"  {len(text.encode()):>14,}  README.md, as follows\n\n{text}")
        return
    (folder / "README.md").write_text(text, encoding="utf-8")
    api = HfApi()
    try:
        api.create_repo(arguments.repo_id, private=not arguments.public, exist_ok=True)
        commit = api.upload_folder(
            repo_id=arguments.repo_id,
            folder_path=folder,
            allow_patterns=list(PUSHED),
            commit_message=arguments.commit_message,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise PosSwapError(f"--repo_id={arguments.repo_id!r}: the hub refused: {str(error).splitlines()[0]}") from error
    print(f"pushed   {commit.commit_url}")


if __name__ == "__main__":
    run(main)
