"""ViT: a Parameter (1, prefix + patches, E) beside the patch embedding, in row-major order of the grid."""

from torch import nn

from ..anatomy import TableDeclaration


def _pair(size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _grid(owner) -> tuple[int, int]:
    height, width = _pair(owner.patch_embeddings.image_size)
    patch_height, patch_width = _pair(owner.patch_embeddings.patch_size)
    return height // patch_height, width // patch_width


def _fits(owner, config) -> bool:
    patches = getattr(owner, "patch_embeddings", None)
    return (
        isinstance(owner.position_embeddings, nn.Parameter)
        and hasattr(patches, "image_size")
        and hasattr(patches, "num_patches")
        and owner.position_embeddings.shape[1] >= patches.num_patches
    )


TABLE = TableDeclaration(
    family="vit",
    attribute="position_embeddings",
    fits=_fits,
    reserved=lambda owner: owner.position_embeddings.shape[1] - owner.patch_embeddings.num_patches,
    grid=_grid,
    patch=lambda owner: _pair(owner.patch_embeddings.patch_size)[0],
)
