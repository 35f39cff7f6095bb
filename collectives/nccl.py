"""Which NCCL this process runs on, asked of the library itself: torch knows what it was built with."""

import ctypes

NEEDED = (2, 31, 0)
"""What the `nccl` transport needs: signals with indices, windows between nodes."""


def running_version() -> tuple[int, int, int] | None:
    """Of the NCCL that is loaded, or would be; None if there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")  # the loader returns the one that is already here
    except OSError:
        return None
    packed = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(packed)):
        return None
    number = packed.value
    return number // 10000, number // 100 % 100, number % 100


def version_text(version: tuple[int, int, int] | None) -> str:
    """For people."""
    return "no NCCL" if version is None else "NCCL " + ".".join(map(str, version))


def unusable() -> str | None:
    """Why the `nccl` transport cannot be used in this process, with the remedy; or None."""
    try:
        import nccl.core  # noqa: F401
    except ImportError as error:
        return f"nccl4py does not load ({error}): pip install 'springtide[nccl]'"
    version = running_version()
    if version is None or version < NEEDED:
        needed = ".".join(map(str, NEEDED[:2]))
        return (
            f"{version_text(version)} runs, {needed} is needed: python -m trainer.nccl install puts one "
            "beside torch's"
        )
    return None
