"""Perplexity by length under two named protocols; what `scripts/evaluate.py` is made of."""

from .data import read_texts, tokenize, window_bos
from .perplexity import accepted_length, evaluate, measure, trained_length
from .plots import plot_lengths
from .protocols import PROTOCOLS, Protocol, Strict, Window, Yarn, make_protocol
from .report import table, write_report

__all__ = [
    "PROTOCOLS",
    "Protocol",
    "Strict",
    "Window",
    "Yarn",
    "accepted_length",
    "evaluate",
    "make_protocol",
    "measure",
    "plot_lengths",
    "read_texts",
    "table",
    "tokenize",
    "trained_length",
    "window_bos",
    "write_report",
]
