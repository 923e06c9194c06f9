"""Fine-tune a language model or a classifier of pictures, with its positions swapped first where a scheme is given.

    python scripts/finetune.py --model MODEL --scheme yarn --factor 4 --output_dir OUT \
        --train_dir TEXTS --block_size 8192 --max_steps 400 --gradient_checkpointing --mixed_precision bf16

    python scripts/finetune.py --model VIT --scheme learned2d --image_size 384 --output_dir OUT \
        --image_dir PICTURES --max_steps 1000 --per_device_train_batch_size 64

On several GPUs put `accelerate launch --config_file scripts/configs/ddp.yaml` (or fsdp2, zero3) in the place of
`python`. To go on after an interruption, give the same command again.
"""

from __future__ import annotations

from hf_posswap.arguments import PictureArguments, parse, run, scheme_arguments, scheme_from
from hf_posswap.training.arguments import FinetuneArguments


def main() -> None:
    arguments, picture, scheme = parse(
        FinetuneArguments, PictureArguments, scheme_arguments(), description=__doc__.splitlines()[0]
    )
    from accelerate import PartialState

    from hf_posswap.training.distil import load_teacher
    from hf_posswap.training.loop import finetune, load

    finetune(*load(arguments, scheme_from(scheme), picture.given()), arguments, load_teacher(arguments))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    run(main)
