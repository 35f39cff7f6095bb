"""What the device could do: the denominator of MFU, and memory in use."""

import re
import resource
import sys
from dataclasses import dataclass
from math import nan

import torch

PEAK_TFLOPS = {
    # dense bf16, by the vendors' datasheets; the longest name that fits wins
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
    "MI250X": 383.0,
}


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations a second in bf16, or None for a device that is not in the table.

    Runs in fp32 are measured against it, too.
    """
    if device.type != "cuda":
        return None
    return peak_flops_by_name(torch.cuda.get_device_name(device))


def peak_flops_by_name(name: str) -> float | None:
    """The same from a device's name: `NVIDIA H100 80GB HBM3`."""
    fits = [key for key in PEAK_TFLOPS if re.search(rf"\b{key}\b", name)]
    return PEAK_TFLOPS[max(fits, key=len)] * 1e12 if fits else None


def device_name(device: torch.device) -> str:
    """What a reader calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@dataclass(frozen=True)
class Memory:
    """Of one rank, since it started."""

    peak_gib: float
    """Reserved on the GPU, or resident in this process."""
    allocated_gib: float = nan
    """At most this much was in tensors (GPUs only)."""
    symmetric_gib: float = 0
    """Mapped by other ranks; no part of the above on GPUs."""
    retries: float = 0
    """How often the allocator had to give its cache back before it found room."""
    ooms: float = 0
    """How often it found none."""


def memory(device: torch.device, symmetric_nbytes: int = 0) -> Memory:
    """What this rank has used so far; asks nobody to wait."""
    symmetric_gib = symmetric_nbytes / 2**30
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return Memory(
            torch.cuda.max_memory_reserved(device) / 2**30,
            torch.cuda.max_memory_allocated(device) / 2**30,
            symmetric_gib,
            stats.get("num_alloc_retries", 0),
            stats.get("num_ooms", 0),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Memory(peak / (2**30 if sys.platform == "darwin" else 2**20), nan, symmetric_gib)
