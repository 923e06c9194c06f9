"""FNet, YOSO, MRA, and Nyströmformer with landmarks: no query and key have a logit."""

from ..anatomy import MixingDeclaration


def _by_landmarks(module) -> bool:
    return module.num_landmarks != module.seq_len


MIXING = (
    MixingDeclaration(frozenset({"fourier_transform"}), "are mixed by a Fourier transform, without queries and keys"),
    MixingDeclaration(frozenset({"query", "use_expectation", "lsh_config"}), "are compared by hashes of them"),
    MixingDeclaration(frozenset({"query", "approx_mode", "num_block"}), "are compared by averages of blocks of them"),
    MixingDeclaration(frozenset({"query", "num_landmarks"}), "are compared with averages of them", _by_landmarks),
)
