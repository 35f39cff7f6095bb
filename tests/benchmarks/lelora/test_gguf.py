"""Files of llama.cpp are read as its own description of them says, number by number."""

import struct

import numpy as np
import pytest
import torch

from benchmarks.lelora.gguf import F32, Q4_1, Q8_0, Packed, dequantised, read_gguf


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write(file, tensors, magic=b"GGUF"):
    """A file with three fields, one of them a list of texts; `tensors` are (name, shape, kind, bytes)."""
    head = magic + struct.pack("<IQQ", 3, len(tensors), 3)
    head += text("a.number") + struct.pack("<If", 6, 0.5)
    head += text("a.name") + struct.pack("<I", 8) + text("käse")
    head += text("a.list") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz")
    offset = 0
    for name, shape, kind, content in tensors:
        head += text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", n) for n in reversed(shape)) + struct.pack(
            "<IQ", kind, offset
        )
        offset += -(-len(content) // 32) * 32
    head += bytes(-len(head) % 32)
    file.write_bytes(head + b"".join(of[3] + bytes(-len(of[3]) % 32) for of in tensors))


def test_fields_and_tensors(tmp_path):
    rng = np.random.default_rng(0)
    vector = rng.standard_normal(32).astype(np.float32)
    quants = rng.integers(0, 256, (4, 20), dtype=np.uint8)
    write(
        tmp_path / "m.gguf",
        [("v", (32,), F32, vector.tobytes()), ("w", (2, 64), Q4_1, quants.tobytes())],
    )
    fields, packed = read_gguf(tmp_path / "m.gguf")
    assert fields == {"a.number": 0.5, "a.name": "käse", "a.list": ["x", "yz"]}
    np.testing.assert_array_equal(dequantised(packed["v"]).numpy(), vector)
    assert packed["w"].shape == (2, 64)
    assert packed["w"].data.numpy().tobytes() == quants.tobytes()


def test_weights_of_four_and_eight_bits():
    rng = np.random.default_rng(1)
    scales, least = rng.standard_normal((2, 3)).astype(np.float16)
    low, high = rng.integers(0, 16, (2, 3, 16))
    content = b"".join(
        scales[n].tobytes()
        + least[n].tobytes()
        + bytes(int(a + 16 * b) for a, b in zip(low[n], high[n], strict=True))
        for n in range(3)
    )
    expected = [
        float(scales[n]) * int(q) + float(least[n]) for n in range(3) for q in (*low[n], *high[n])
    ]
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found = dequantised(Packed((3, 32), Q4_1, data))
    np.testing.assert_allclose(found.flatten().numpy(), expected, rtol=1e-6, atol=1e-6)
    signed = rng.integers(-128, 128, (3, 32))
    content = b"".join(scales[n].tobytes() + signed[n].astype(np.int8).tobytes() for n in range(3))
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found = dequantised(Packed((96,), Q8_0, data))
    np.testing.assert_array_equal(
        found.numpy(), (scales[:, None].astype(np.float32) * signed.astype(np.float32)).flatten()
    )


def test_other_files_and_kinds_are_errors(tmp_path):
    write(tmp_path / "a", [], b"GGML")
    with pytest.raises(ValueError, match="GGUF"):
        read_gguf(tmp_path / "a")
    write(tmp_path / "b", [("w", (1, 256), 12, bytes(144))])
    with pytest.raises(ValueError, match="w is of kind 12"):
        read_gguf(tmp_path / "b")
