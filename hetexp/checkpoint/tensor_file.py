"""Writes tensors as a safetensors file: straight from their memory, hashed at the same time.

The library copies every tensor once more before it writes, and a checksum would then read the file again.
Reading is left to the library. The format: https://huggingface.co/docs/safetensors (8 bytes of length, little
endian; a JSON header; the tensors' bytes without gaps).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetexp.checkpoint.background import beside
from hetexp.core.errors import CheckpointError

PIECE_BYTES = 1 << 22
"""Bytes that are written or hashed at a time, while other threads run."""
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class Written:
    """Size and checksum of a file, as a manifest keeps them."""

    num_bytes: int
    sha256: str


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Check that all tensors can be written.

    Raises:
        CheckpointError: a tensor is not dense, has no data, or is of a type that safetensors lacks.
    """
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout is not torch.strided:
            kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            raise CheckpointError(f"'{name}' must be a dense tensor to be saved, but is a {kind} one.")
        if tensor.dtype not in _TYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"'{name}' must be of a type that safetensors has, but is {dtype}.")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Written:
    """Write a safetensors file to the disk, and return its size and checksum.

    Args:
        tensors: contiguous, on the CPU; nothing may change them during the call.
        metadata: of the file.

    Raises:
        OSError: the file could not be written.
    """
    # Wide types first, so that every tensor begins at a multiple of its type's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest, total = hashlib.sha256(), 0

    def hash_all() -> None:
        for piece in _pieces(tensors, order, metadata):
            digest.update(piece)

    with beside(hash_all) as hashing, path.open("wb", buffering=0) as file:
        for piece in _pieces(tensors, order, metadata):
            total += len(piece)
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    hashing.result()
    return Written(total, digest.hexdigest())


def _pieces(
    tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    yield memoryview(_header(tensors, order, metadata))
    for name in order:
        tensor = tensors[name].detach()
        if tensor.numel():
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(content), PIECE_BYTES):
                yield content[start : start + PIECE_BYTES]


def _header(tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
