"""Push a patched checkpoint to the hub as it lies in its folder, private unless told otherwise.

    python scripts/card.py --folder OUT --base_model NAME/BASE --license apache-2.0
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
PUSHED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "README.md", "evaluation*")


@dataclass
class PushArguments:
    """What to push and where to."""

    folder: str = field(metadata={"help": "Folder of the checkpoint, as patch.py or finetune.py wrote it."})
    repo_id: str = field(metadata={"help": "NAME/MODEL on the hub; made if it does not exist."})
    public: bool = field(default=False, metadata={"help": "Make a new repository public."})
    commit_message: str = field(default="Upload with hf_posswap", metadata={"help": "Message of the commit."})
    dry_run: bool = field(default=False, metadata={"help": "Print exactly what would be pushed, and stop."})


def main() -> None:
    (arguments,) = parse(PushArguments, description=__doc__.splitlines()[0])
    files = files_of(Path(arguments.folder))
    if arguments.dry_run:
        visibility = "public" if arguments.public else "private"
        print(f"would push to {arguments.repo_id} ({visibility} if it is new), message {arguments.commit_message!r}:")
        for path in files:
            print(f"  {path.stat().st_size:>14,}  {path.name}")
        print(f"\nREADME.md:\n\n{(Path(arguments.folder) / 'README.md').read_text(encoding='utf-8')}")
        return
    print(f"pushed   {push(arguments, files)}")


def files_of(folder: Path) -> list[Path]:
    """What would be pushed, by name. Raises PosSwapError for a folder that is no patched checkpoint with a card."""
    from hf_posswap.card import record_in

    record_in(folder)
    files = sorted({path for pattern in PUSHED for path in folder.glob(pattern)})
    if not any(path.suffix == ".safetensors" for path in files):
        raise PosSwapError(f"--folder={str(folder)!r} holds no .safetensors weights; save the model there first")
    if not (folder / "README.md").is_file():
        raise PosSwapError(f"--folder={str(folder)!r} has no card; write it: scripts/card.py --folder {folder}")
    return files


def push(arguments: PushArguments, files: list[Path]) -> str:
    """Upload in one commit and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    try:
        api.create_repo(arguments.repo_id, private=not arguments.public, exist_ok=True)
        commit = api.create_commit(
            arguments.repo_id,
            [CommitOperationAdd(path.name, path) for path in files],
            commit_message=arguments.commit_message,
        )
    except Exception as error:  # of the client, of its HTTP library (which one changes), or of the system
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise PosSwapError(f"--repo_id={arguments.repo_id!r}: the push failed, repeat it: {reason[0]}") from error
    return commit.commit_url


if __name__ == "__main__":
    run(main)
