"""Which arithmetic a run is computed in: by the device, unless asked for by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

log = logging.getLogger(__name__)


def device_of(accelerator: str) -> str:
    """ "cuda", "mps" or "cpu": what Lightning's ``accelerator`` will come to on this machine."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "cuda"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def choose_precision(asked: str | int, device: str) -> str | int:
    """Lightning's name of the precision for ``asked``, where "auto" leaves it to the device.

    "auto" is bf16-mixed on a GPU with bfloat16 units, 16-mixed (with a loss scaler) on an older one, and float32
    elsewhere: on a processor without bfloat16 units autocast makes a step ten times slower.

    Raises:
        ValueError: for float16 on a CPU.
    """
    if asked == "auto":
        if device != "cuda":
            return "32-true"
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    if device == "cpu" and str(asked).startswith("16"):
        raise ValueError(f"precision={asked} needs a GPU; on a CPU take auto, 32-true or bf16-mixed")
    if device == "cpu" and str(asked).startswith("bf16") and not cpu_has_bfloat16():
        log.warning(
            "precision=%s: this processor has no bfloat16 units, and a step takes about ten times as long as with auto",
            asked,
        )
    return asked


def cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself (AVX512-BF16, AMX, or ARM's bf16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(name in flags for name in ("avx512_bf16", "amx_bf16", " bf16"))


def allow_tf32(device: str) -> None:
    """float32 products in TF32 on a GPU: as accurate as bfloat16's and better, several times as fast as float32's."""
    if device == "cuda":
        torch.set_float32_matmul_precision("high")


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """float32 products that neither autocast nor TF32 shortens, for similarities and losses: in bfloat16 scores tie."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if device.type == "cuda":
            torch.set_float32_matmul_precision(before)
