"""One small file per family whose table of positions structure alone cannot tell; `anatomy.declarations` finds them."""
