"""The few calls of the CUDA driver that copy engines and flags need, which torch does not offer.

Each goes to the current stream. They take no multiprocessor: copies run on copy engines, flags are
written and waited for by the stream's own command processor.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from collectives.torch_private import current_raw_stream

GREATER_OR_EQUAL, FLUSH_REMOTE_WRITES = 0, 1 << 30
CAN_FLUSH_REMOTE_WRITES = 98
"""CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES."""
MULTICAST_SUPPORTED = 132
"""CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED."""
DEVICE_MEMORY = 2
"""CU_MEMORYTYPE_DEVICE."""
NO_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""
NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
IN_STREAM_ORDER, ON_DEVICE = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEM_LOCATION_TYPE_DEVICE."""


BATCH = "cuMemcpyBatchAsync_v2"
"""Since CUDA 13: many copies in one call, which also lets engines begin the next one early."""


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


class Place(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int), ("source", Place), ("target", Place), ("flags", ctypes.c_uint)
    ]  # fmt: skip


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    u64, size, uint, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p
    driver.cuMemcpyAsync.argtypes = [u64, u64, size, pointer]
    driver.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(Copy2D), pointer]
    driver.cuStreamWriteValue64_v2.argtypes = [pointer, u64, u64, uint]
    driver.cuStreamWaitValue64_v2.argtypes = [pointer, u64, u64, uint]
    driver.cuEventCreate.argtypes = [ctypes.POINTER(pointer), uint]
    driver.cuEventRecord.argtypes = [pointer, pointer]
    driver.cuEventDestroy_v2.argtypes = [pointer]
    driver.cuStreamWaitEvent.argtypes = [pointer, pointer, uint]
    if hasattr(driver, BATCH):
        getattr(driver, BATCH).argtypes = [
            pointer, pointer, pointer, size, ctypes.POINTER(Attributes), ctypes.POINTER(size),
            size, pointer,
        ]  # fmt: skip
    return driver


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {(text.value or b'?').decode()} ({code})")


def _relax_capture() -> None:
    """Let this thread ask things while another one captures a graph."""
    mode = ctypes.c_int(RELAXED)
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "relaxing")


def _stream() -> int:
    return current_raw_stream(torch.cuda.current_device())


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses, of this device or of a peer that is mapped."""
    _check(_driver().cuMemcpyAsync(target, source, nbytes, _stream()), "a copy")


def copy_all(targets: Any, sources: Any, sizes: Any, device: int) -> None:
    """Copies out of `device`, given as three NumPy arrays of 64-bit numbers; in order, if in turn."""
    batch = getattr(_driver(), BATCH, None)
    stream = _stream()
    # A batch is not for the default stream, nor for a graph.
    single = len(sizes) == 1 or stream == 0
    if batch is None or single or torch.cuda.is_current_stream_capturing():
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            copy(target, source, size)
        return
    here = Place(ON_DEVICE, device)
    attributes, first = Attributes(IN_STREAM_ORDER, here, here, 0), ctypes.c_size_t(0)
    arrays = (targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data)
    code = batch(*arrays, len(sizes), attributes, first, 1, stream)
    _check(code, "a batch of copies")


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


class Mark:
    """A moment of the current stream. Torch's events cost ten times as much of the host's time."""

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        _check(_driver().cuEventCreate(ctypes.byref(self._event), NO_TIMING), "making an event")
        _check(_driver().cuEventRecord(self._event, _stream()), "recording an event")

    def hold(self, stream: int) -> None:
        """Hold a stream, given by its handle, until that moment."""
        _check(_driver().cuStreamWaitEvent(stream, self._event, 0), "waiting for an event")

    def hold_current(self) -> None:
        """Hold the current stream."""
        self.hold(_stream())

    def has_passed(self) -> bool:
        """Whether the stream has come to that moment; asked from another thread."""
        _relax_capture()
        code = _driver().cuEventQuery(self._event)
        if code != NOT_READY:
            _check(code, "asking for an event")
        return code != NOT_READY

    def __del__(self) -> None:
        _driver().cuEventDestroy_v2(self._event)  # the driver keeps it while somebody waits for it


def write_flag(address: int, value: int) -> None:
    """Write a 64-bit value, after everything that the stream did before is visible."""
    _check(_driver().cuStreamWriteValue64_v2(_stream(), address, value, 0), "writing a flag")


def wait_flag(address: int, value: int, flush: bool) -> None:
    """Hold the stream until the 64-bit value is at least `value`; `flush`: and writes of peers seen."""
    flags = GREATER_OR_EQUAL | (FLUSH_REMOTE_WRITES if flush else 0)
    _check(_driver().cuStreamWaitValue64_v2(_stream(), address, value, flags), "waiting for a flag")


def can_flush(device: int) -> bool:
    """Whether waits can flush peers' writes; where they cannot, they need not."""
    return _has(CAN_FLUSH_REMOTE_WRITES, device)


def has_multicast(device: int) -> bool:
    """Whether one write of a device can reach all others: it has NVSwitches that multiply writes."""
    return _has(MULTICAST_SUPPORTED, device)


def _has(attribute: int, device: int) -> bool:
    value = ctypes.c_int()
    code = _driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    _check(code, "asking for a device's attribute")
    return bool(value.value)


def newest_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver runs; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    packed = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(packed)):
        return None
    return packed.value // 1000, packed.value // 10 % 100


class Reader:
    """Reads `flags` (64 bits each, on a device) from a thread, whatever the other streams wait for."""

    def __init__(self, flags: Tensor) -> None:
        self._flags, self._stream = flags, torch.cuda.Stream(flags.device)
        self._host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)

    def read(self) -> list[int]:
        """Their present values."""
        _relax_capture()
        with torch.cuda.device(self._flags.device), torch.cuda.stream(self._stream):
            self._host.copy_(self._flags, non_blocking=True)
            self._stream.synchronize()
        found: list[int] = self._host.tolist()
        return found
