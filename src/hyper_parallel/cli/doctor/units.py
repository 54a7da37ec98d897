"""Sizes, rates and counts as people read them: memory in powers of two, links in powers of ten."""

from __future__ import annotations


def gibibytes(num_bytes: int | None) -> str:
    """Write bytes as `23.5 GiB` or `64 MiB`; `unknown` for None."""
    if num_bytes is None:
        return "unknown"
    if num_bytes >= 2**40:
        return f"{num_bytes / 2**40:.1f} TiB"
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB"


def counted(num: int, noun: str) -> str:
    """Write a count as `1 core` or `2 cores`."""
    return f"{num} {noun}{'' if num == 1 else 's'}"


def gigabytes_per_s(bytes_per_s: float) -> str:
    """Write a rate as `55.0 GB/s`."""
    return f"{bytes_per_s / 1e9:.1f} GB/s"
