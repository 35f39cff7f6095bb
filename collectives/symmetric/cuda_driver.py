"""The few calls of the CUDA driver that copy engines and flags need, which torch does not offer.

Each goes to the current stream. They take no multiprocessor: copies run on copy engines, flags are
written and waited for by the stream's own command processor.
"""

import ctypes
from functools import cache
from typing import Any

import torch

GREATER_OR_EQUAL, FLUSH_REMOTE_WRITES = 0, 1 << 30
CAN_FLUSH_REMOTE_WRITES = 98
"""CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES."""
DEVICE_MEMORY = 2
"""CU_MEMORYTYPE_DEVICE."""


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("MemoryType", ctypes.c_uint),
            ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )
    ] + [("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t)]  # fmt: skip


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    u64, size, uint, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p
    driver.cuMemcpyAsync.argtypes = [u64, u64, size, pointer]
    driver.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(Copy2D), pointer]
    driver.cuStreamWriteValue64_v2.argtypes = [pointer, u64, u64, uint]
    driver.cuStreamWaitValue64_v2.argtypes = [pointer, u64, u64, uint]
    return driver


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'?').decode()} ({code})")


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses, of this device or of a peer that is mapped."""
    _check(_driver().cuMemcpyAsync(target, source, nbytes, _stream()), "a copy")


def copy_rows(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
) -> None:
    """Copy `rows` of `width` bytes that lie a pitch, in bytes, apart."""
    order = Copy2D(
        srcMemoryType=DEVICE_MEMORY, srcDevice=source, srcPitch=source_pitch,
        dstMemoryType=DEVICE_MEMORY, dstDevice=target, dstPitch=target_pitch,
        WidthInBytes=width, Height=rows,
    )  # fmt: skip
    _check(_driver().cuMemcpy2DAsync_v2(ctypes.byref(order), _stream()), "a copy of rows")


def write_flag(address: int, value: int) -> None:
    """Write a 64-bit value, after everything that the stream did before is visible."""
    _check(_driver().cuStreamWriteValue64_v2(_stream(), address, value, 0), "writing a flag")


def wait_flag(address: int, value: int, flush: bool) -> None:
    """Hold the stream until the 64-bit value is at least `value`; `flush`: and writes of peers seen."""
    flags = GREATER_OR_EQUAL | (FLUSH_REMOTE_WRITES if flush else 0)
    _check(_driver().cuStreamWaitValue64_v2(_stream(), address, value, flags), "waiting for a flag")


def can_flush(device: int) -> bool:
    """Whether waits can flush peers' writes; where they cannot, they need not."""
    value = ctypes.c_int()
    code = _driver().cuDeviceGetAttribute(ctypes.byref(value), CAN_FLUSH_REMOTE_WRITES, device)
    _check(code, "asking for a device's attribute")
    return bool(value.value)
