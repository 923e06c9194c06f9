"""Fine-tuning, what `scripts/finetune.py` and `scripts/demo.py` are made of.

`arguments.FinetuneArguments` are the flags, `loop.load` reads the model to train, `loop.finetune` trains it.
Nothing is imported here, so that a script's `--help` stays instant.
"""
