"""Reads GGUF files, as llama.cpp has them: fields, tensors as they are stored, and what these mean.

V bytes of a block, K blocks

Weights of 4 and 8 bits stay so until `dequantised` gives the fp32 numbers that they stand for.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAGIC = b"GGUF"
SIMPLE = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Types of fields, by `struct`'s letters; 8 is text, 9 a list."""
TEXT, LIST = 8, 9
BLOCK = 32
"""Weights of a block."""
F32, Q4_1, Q8_0 = 0, 3, 8
NBYTES = {F32: 4 * BLOCK, Q4_1: 2 + 2 + BLOCK // 2, Q8_0: 2 + BLOCK}
"""Bytes of a block."""


@dataclass(frozen=True)
class Packed:
    """A tensor as the file has it."""

    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    kind: int
    data: Tensor
    """Bytes."""


class _Reader:
    """Values from one place on."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, len(MAGIC)

    def simple(self, letter: str) -> Any:
        """One number, little-endian."""
        form = f"<{letter}"
        (found,) = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self) -> str:
        """Behind its length."""
        length = self.simple("Q")
        self.at += length
        return self.content[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        """Of a field."""
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            inner, count = self.simple("I"), self.simple("Q")
            return [self.value(inner) for _ in range(count)]
        return self.simple(SIMPLE[kind])


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Packed]]:
    """Fields and tensors by their names.

    Raises `ValueError` for another kind of file, or weights of another kind than fp32, Q4_1 and Q8_0.
    """
    content = file.read_bytes()
    if content[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{file} begins with {content[:4]!r}: a GGUF file begins with {MAGIC!r}")
    reader = _Reader(content)
    reader.simple("I")  # the version
    tensors, fields = reader.simple("Q"), reader.simple("Q")
    found: dict[str, Any] = {}
    for _ in range(fields):
        name = reader.text()
        found[name] = reader.value(reader.simple("I"))
    headers = []
    for _ in range(tensors):
        name = reader.text()
        shape = tuple(reader.simple("Q") for _ in range(reader.simple("I")))[::-1]
        headers.append((name, shape, reader.simple("I"), reader.simple("Q")))
    aligned = int(found.get("general.alignment", 32))
    begin = -(-reader.at // aligned) * aligned
    packed = {}
    for name, shape, kind, offset in headers:
        if kind not in NBYTES:
            raise ValueError(
                f"{file}: {name} is of kind {kind}; kinds that can be read: {list(NBYTES)}"
            )
        length = int(np.prod(shape)) * NBYTES[kind] // BLOCK
        raw = np.frombuffer(content, np.uint8, length, begin + offset)
        packed[name] = Packed(shape, kind, torch.from_numpy(raw.copy()))
    return found, packed


def dequantised(packed: Packed) -> Tensor:
    """In fp32, where its bytes are."""
    return MEANING[packed.kind](packed.data).view(packed.shape)


def _f32(data: Tensor) -> Tensor:
    return data.view(torch.float32)


def _q8_0(data: Tensor) -> Tensor:
    """A scale in fp16, then 32 signed bytes."""
    blocks_KV = data.view(-1, NBYTES[Q8_0])
    scale_K1 = blocks_KV[:, :2].contiguous().view(torch.float16).float()
    return scale_K1 * blocks_KV[:, 2:].contiguous().view(torch.int8).float()


def _q4_1(data: Tensor) -> Tensor:
    """A scale and a smallest value in fp16, then 16 bytes: lower halves first, then the upper ones."""
    blocks_KV = data.view(-1, NBYTES[Q4_1])
    both_K2 = blocks_KV[:, :4].contiguous().view(torch.float16).float()
    halves_KV = torch.cat([blocks_KV[:, 4:] & 15, blocks_KV[:, 4:] >> 4], 1)
    return both_K2[:, :1] * halves_KV.float() + both_K2[:, 1:]


MEANING: dict[int, Callable[[Tensor], Tensor]] = {F32: _f32, Q4_1: _q4_1, Q8_0: _q8_0}
