"""Checksums of chunks, and how those of a tensor's chunks become the tensor's own without reading it again.

A CRC is linear over bits: that of two parts one after the other is the first one's, moved on by as many zeros as the
second part is long, xor the second one's. Moving on by a number of zeros is a product with a matrix of bits, which is
kept for each length.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

__all__ = ["CHUNK_BYTES", "combined", "sums_from_text", "sums_to_text"]

CHUNK_BYTES = 1 << 20

_POLYNOMIAL = 0xEDB88320  # of zlib.crc32, lowest bit first


def combined(sums: Iterable[tuple[int, int]]) -> int:
    """Make the checksum of parts that lie one after the other, of (checksum, length in bytes) of each.

    Example:
        >>> import zlib
        >>> combined([(zlib.crc32(b"ab"), 2), (zlib.crc32(b"cde"), 3)]) == zlib.crc32(b"abcde")
        True
    """
    total = 0
    for checksum, num_bytes in sums:
        total = _times(_zeros(num_bytes), total) ^ checksum
    return total


def sums_to_text(sums: Iterable[int]) -> str:
    return "".join(f"{checksum:08x}" for checksum in sums)


def sums_from_text(text: str) -> tuple[int, ...]:
    return tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))


def _times(matrix: tuple[int, ...], vector: int) -> int:
    """Multiply, over bits: the xor of the columns where the vector has a one."""
    result, index = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[index]
        vector >>= 1
        index += 1
    return result


@lru_cache(maxsize=1024)
def _zeros(num_bytes: int) -> tuple[int, ...]:
    """The matrix that moves a checksum on by so many bytes of zeros."""
    if num_bytes == 0:
        return tuple(1 << bit for bit in range(32))
    if num_bytes == 1:
        one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
        matrix = one_bit
        for _ in range(3):
            matrix = tuple(_times(matrix, column) for column in matrix)
        return matrix
    half = _zeros(num_bytes // 2)
    matrix = tuple(_times(half, column) for column in half)
    return tuple(_times(_zeros(1), column) for column in matrix) if num_bytes % 2 else matrix
