"""Evaluation by length, always beside the unpatched model; what `scripts/evaluate.py` is made of."""

from .compare import compare_causal, evaluate
from .data import read_texts, tokenize, window_bos
from .perplexity import curve, key_tokens, measure
from .plots import plot_lengths
from .protocols import PROTOCOLS, Protocol, Strict, Window, Yarn, make_protocol
from .report import table, write_report
from .retrieval import retrieve
from .subjects import accepted_length, trained_length
from .work import Work

__all__ = [
    "PROTOCOLS",
    "Protocol",
    "Strict",
    "Window",
    "Work",
    "Yarn",
    "accepted_length",
    "compare_causal",
    "curve",
    "evaluate",
    "key_tokens",
    "make_protocol",
    "measure",
    "plot_lengths",
    "read_texts",
    "retrieve",
    "table",
    "tokenize",
    "trained_length",
    "window_bos",
    "write_report",
]
