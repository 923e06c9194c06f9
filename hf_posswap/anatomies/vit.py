"""ViT, DeiT, DINOv2, BEiT, MAE, I-JEPA, YOLOS: a Parameter (1, prefix + patches + detection tokens, E) beside the patch
embedding, in row-major order of the grid.
"""

from torch import nn

from ..anatomy import TableDeclaration


def pair(size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _grid(owner) -> tuple[int, int]:
    height, width = pair(owner.patch_embeddings.image_size)
    patch_height, patch_width = _patch(owner)
    return height // patch_height, width // patch_width


def _patch(owner) -> tuple[int, int]:
    return pair(owner.patch_embeddings.patch_size)


def _fits(owner, config) -> bool:
    """Not of video, whose table has a third axis."""
    patches = getattr(owner, "patch_embeddings", None)
    return (
        isinstance(owner.position_embeddings, nn.Parameter)
        and hasattr(patches, "image_size")
        and hasattr(patches, "patch_size")
        and getattr(patches, "num_patches", None) == _grid(owner)[0] * _grid(owner)[1]
        and owner.position_embeddings.shape[1] >= patches.num_patches + _detection(owner)
    )


def _detection(owner) -> int:
    """YOLOS's tokens behind the patches; the other families have none."""
    tokens = owner._parameters.get("detection_tokens")
    return 0 if tokens is None else tokens.shape[1]


def _prefix(owner) -> int:
    return owner.position_embeddings.shape[1] - owner.patch_embeddings.num_patches - _detection(owner)


TABLE = TableDeclaration(
    family="vit",
    attribute="position_embeddings",
    fits=_fits,
    reserved=_prefix,
    trailing=_detection,
    grid=_grid,
    patch=_patch,
)
