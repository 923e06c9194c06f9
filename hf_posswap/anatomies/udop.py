"""UDOP: T5 with boxes in parts of the page; beside its bias per distance in tokens, one across the page, one down."""

from ..anatomy import PageDeclaration


def _whole_page(module) -> float:
    return 1.0


def _scaled(module):
    """A bias of tokens counts them as they are; one on the page scales parts of it up to buckets."""
    return ("relative_attention_bias",) if module.scaling_factor != 1 else ()


PAGE = PageDeclaration(frozenset({"x_position_embeddings", "max_2d_position_embeddings"}), largest=_whole_page)
SPATIAL_PAGE = PageDeclaration(frozenset({"relative_attention_bias", "scaling_factor"}), spatial=_scaled)
