"""How much of a device's arithmetic a run uses (MFU): its own operations, against what the device could do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from .arguments import FinetuneArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

# NVIDIA's data sheets: 10**12 operations a second of dense products in bfloat16 or float16. The longest name first.
PEAK_TFLOPS = {
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA A100": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
}


def peak_tflops(accelerator: Accelerator, model: PreTrainedModel, arguments: FinetuneArguments) -> float | None:
    """Of one process' device: as given, or of a known device that computes in 16 bits; None where nothing is known."""
    if arguments.peak_tflops is not None or accelerator.device.type != "cuda":
        return arguments.peak_tflops
    if accelerator.mixed_precision not in ("bf16", "fp16") and model.dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(accelerator.device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if f"{name} ".startswith(f"{known} ")), None)


@dataclass
class Meter:
    """Operations for a token, counted by torch while a step computes: products of matrices and attention, the teacher's
    and what is computed a second time (gradient checkpointing) among them. Once for each length of rows.

    peak: operations a second that the devices of all processes could do; None where that is not known, and nothing is
    counted.
    """

    peak: float | None
    length: int = 0
    per_token: float = 0.0

    @contextmanager
    def counting(self, length: int, tokens: int) -> Iterator[None]:
        """Around the work of a step; tokens: of this process."""
        if self.peak is None or length == self.length:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self.length, self.per_token = length, counter.get_total_flops() / tokens

    def share(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu`, 0 to 1, where the peak is known. tokens_per_second: of all processes."""
        return {} if self.peak is None else {"mfu": round(self.per_token * tokens_per_second / self.peak, 6)}
