"""What devices can do, by the vendors' datasheets: for plans, and as the denominator of MFU."""

import re
from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.watch.peak import peak_flops_by_name


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    flops: float
    """Floating-point operations a second, dense bf16."""
    memory: float
    """Bytes."""
    memory_rate: float
    """Bytes a second, to and from its own memory."""
    link_rate: float
    """Bytes a second, to the others of its node together, one way."""
    network_rate: float = 50e9
    """Bytes a second, its share of the node's network: one 400 Gb/s port for each device."""


_FIGURES = {
    # GiB that the driver reports, TB/s of memory, GB/s to the others of the node in one direction
    "B200": (179.0, 8.0, 900),
    "GH200": (95.0, 4.0, 450),
    "H200": (139.8, 4.8, 450),
    "H100": (79.6, 3.35, 450),
    "H100 PCIe": (79.6, 2.0, 64),
    "H100 NVL": (93.6, 3.9, 300),
    "H20": (95.6, 4.0, 450),
    "H800": (79.6, 3.35, 200),
    "A100": (79.3, 2.0, 300),
    "A800": (79.3, 2.0, 200),
    "A10G": (22.5, 0.6, 32),
    "A10": (22.5, 0.6, 32),
    "L40S": (45.0, 0.864, 32),
    "L40": (45.0, 0.864, 32),
    "L4": (22.5, 0.3, 32),
    "RTX 4090": (23.6, 1.0, 32),
    "MI300X": (191.5, 5.3, 448),
    "MI250X": (64.0, 1.6, 200),
}


def device_by_name(name: str) -> Device | None:
    """The device whose name is in `name`, in any spelling: `h200`, `NVIDIA H100 80GB HBM3`."""
    fits = [key for key in _FIGURES if re.search(rf"\b{key}\b", name, re.IGNORECASE)]
    if not fits:
        return None
    key = max(fits, key=len)
    memory, memory_rate, link_rate = _FIGURES[key]
    flops = peak_flops_by_name(key)
    assert flops is not None, key
    return Device(key, flops, memory * 2**30, memory_rate * 1e12, link_rate * 1e9)


def chosen_device(name: str) -> Device:
    """The device that `launch.device` names. Raises `ConfigError` for one that is not known."""
    device = device_by_name(name)
    if device is None:
        known = ", ".join(sorted(key.lower() for key in _FIGURES))
        raise ConfigError(f"launch.device={name} is not known: set launch.device to one of {known}")
    return device
