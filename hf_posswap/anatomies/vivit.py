"""ViViT: a Parameter (1, class + tubelets, E) beside a three-dimensional patch embedding, frames first."""

from torch import nn

from ..anatomy import TableDeclaration


def _patch_of_video(owner) -> tuple[int, int, int]:
    return tuple(owner.patch_embeddings.projection.kernel_size)


def _grid_of_video(owner) -> tuple[int, int, int]:
    height, width = owner.patch_embeddings.image_size
    _, patch_height, patch_width = _patch_of_video(owner)
    rows, columns = height // patch_height, width // patch_width
    return owner.patch_embeddings.num_patches // (rows * columns), rows, columns


def _fits_video(owner, config) -> bool:
    patches = getattr(owner, "patch_embeddings", None)
    return (
        isinstance(owner.position_embeddings, nn.Parameter)
        and isinstance(getattr(patches, "projection", None), nn.Conv3d)
        and hasattr(patches, "image_size")
        and owner.position_embeddings.shape[1] >= patches.num_patches
    )


TABLE = TableDeclaration(
    family="vivit",
    attribute="position_embeddings",
    fits=_fits_video,
    reserved=lambda owner: owner.position_embeddings.shape[1] - owner.patch_embeddings.num_patches,
    grid=_grid_of_video,
    patch=_patch_of_video,
)
