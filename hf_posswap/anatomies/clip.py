"""Vision towers of CLIP and SigLIP: `position_embedding`, an index buffer beside it, row-major order of the grid."""

from torch import nn

from ..anatomy import TableDeclaration


def _fits(owner, config) -> bool:
    return (
        isinstance(owner.position_embedding, nn.Embedding)
        and isinstance(getattr(owner, "patch_embedding", None), nn.Conv2d)
        and isinstance(getattr(owner, "image_size", None), int)
        and getattr(owner, "num_patches", None) == (owner.image_size // owner.patch_size) ** 2
    )


TABLE = TableDeclaration(
    family="clip",
    attribute="position_embedding",
    fits=_fits,
    reserved=lambda owner: owner.position_embedding.num_embeddings - owner.num_patches,
    buffers=("position_ids",),
    grid=lambda owner: (owner.image_size // owner.patch_size,) * 2,
    patch=lambda owner: (owner.patch_size,) * 2,
)
