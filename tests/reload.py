"""Run in a fresh process: load every checkpoint under a folder, one way, and keep the logits.

python reload.py stock|forced|travel|package|together FOLDER - the first three make hf_posswap impossible to import.
stock: the class that the config names. forced: the same, with every argument that could get past a guard. travel: an
Auto class and the code in the checkpoint; the model is also saved again. together: by `travel` and by the package in
one process, every model loaded before the first is run. `how.json` in a checkpoint holds arguments for its loader.
"""

import sys
from pathlib import Path

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])


class _NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_posswap":
            raise ModuleNotFoundError(name)


INSTALLED = MODE in ("package", "together")
if not INSTALLED:
    sys.meta_path.insert(0, _NotInstalled())

# below the import hook, which has to be there first
import json  # noqa: E402
import runpy  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from answers import first  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

if (FOLDER / "before.py").exists():  # what the process needs that saved them, and no checkpoint holds
    runpy.run_path(str(FOLDER / "before.py"))["stand_in"]()

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


def load(folder: Path, mode: str = MODE):
    how = json.loads((folder / "how.json").read_text()) if (folder / "how.json").exists() else {}
    if mode == "package":
        import hf_posswap

        return hf_posswap.from_pretrained(folder, **how)
    config = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    if mode == "forced":
        return cls.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32, device_map="cpu")
    if mode == "travel":
        auto = next(auto for auto, where in config["auto_map"].items() if where.endswith(f".{cls.__name__}"))
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **how)
        model.save_pretrained(folder / "again")
        return model
    return cls.from_pretrained(folder, **how)


def aligned(model):
    """Weights mapped from a file start at any address, and some kernels then add in another order."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def kept(model, folder: Path, name: str) -> None:
    with torch.no_grad():
        found = first(aligned(model).eval()(**load_file(folder / "inputs.st")))
    save_file({"logits": found.contiguous()}, folder / f"{name}.st")


loaded = []
for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir()):
    if MODE in ("forced", "travel", "together") and "auto_map" not in json.loads((folder / "config.json").read_text()):
        continue
    try:
        if MODE == "together":
            loaded += [(load(folder, mode), folder, f"together-{mode}") for mode in ("travel", "package")]
        else:
            kept(load(folder), folder, MODE)
    except Exception as error:
        (folder / f"{MODE}.error").write_text(f"{type(error).__name__}: {error}")
for model, folder, name in loaded:
    kept(model, folder, name)
assert INSTALLED or "hf_posswap" not in sys.modules
