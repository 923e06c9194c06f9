"""One file per scheme. A file dropped here is a scheme of the library: `scheme.registry` finds it."""
