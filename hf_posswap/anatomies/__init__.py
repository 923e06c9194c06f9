"""A small file per family whose table of positions or attention structure alone cannot tell: see `anatomy.declared`."""
