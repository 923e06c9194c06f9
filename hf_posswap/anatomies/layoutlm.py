"""LayoutLM, LayoutLMv2, LayoutLMv3, LayoutXLM, LiLT: boxes looked up in tables of coordinates.

v2 and v3 have an image's tokens behind the text, and biases of distances on the page.
"""

from ..anatomy import PageDeclaration

PAGE_SIDE = 1000  # of every family's boxes, in its papers and processors; the tables have 24 rows to spare


def _largest_box(module):
    return min(PAGE_SIDE, module.x_position_embeddings.num_embeddings - 1)


def _page_biases(module):
    return "rel_pos_x_bias", "rel_pos_y_bias"


def _image_tokens(module):
    rows, columns = module.config.image_feature_pool_shape[:2]
    return rows * columns


PAGE = PageDeclaration(frozenset({"x_position_embeddings", "h_position_embeddings"}), largest=_largest_box)
SPATIAL_PAGE = PageDeclaration(frozenset({"rel_pos_x_bias", "rel_pos_y_bias"}), spatial=_page_biases)
V3_PAGE = PageDeclaration(frozenset({"patch_embed", "cls_token", "pos_embed"}), restarts=True)
V2_PAGE = PageDeclaration(
    frozenset({"visual", "visual_proj", "visual_LayerNorm"}),
    restarts=True,
    image="visual_proj",
    patches=_image_tokens,
)
