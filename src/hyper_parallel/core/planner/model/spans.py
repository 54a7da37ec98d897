"""From marks in measured steps to the numbers of a profile. It is pure: meters and clocks belong to the frameworks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from hyper_parallel.core.planner.model.choices import SWAP, RegionDecision, kept_bytes
from hyper_parallel.core.planner.model.measured_span import MeasuredSpan
from hyper_parallel.core.planner.model.profile import Region, StorageFacts, alike

_MOST_ROUNDED = 0.02  # of all that is kept: more than that is something else, and stays in the peaks


def with_common_times(regions: Sequence[Region]) -> list[Region]:
    """Give regions of one shape the same times: of each op the median over all of them.

    They do the same work, so what differs is noise.
    """
    common = list(regions)
    for indices in alike(regions):
        columns = zip(*(regions[index].ops for index in indices), strict=True)
        op_ms = [statistics.median(op.forward_ms for op in column) for column in columns]
        for index in indices:
            ops = zip(regions[index].ops, op_ms, strict=True)
            common[index] = dataclasses.replace(
                regions[index],
                ops=tuple(dataclasses.replace(op, forward_ms=ms) for op, ms in ops),
                forward_ms=statistics.median(regions[other].forward_ms for other in indices),
                backward_ms=statistics.median(regions[other].backward_ms for other in indices),
            )
    return common


def with_peaks(
    regions: Sequence[Region],
    spans: Sequence[MeasuredSpan] | None,
    again: Sequence[MeasuredSpan],
    decision: Sequence[RegionDecision],
) -> tuple[list[Region], int]:
    """Give the regions their peaks, and say what the turn's is.

    Both steps that were measured add up exactly: the plain one (`spans`, if it fits the device), and the one that runs
    blocks again (`again`, under `decision`), for which the larger working set counts. Where backward does not come to a
    region, that region has no backward, and a peak of 0 there.
    """
    plain = {span.name: span.peak_bytes for span in spans or ()}
    managed = {span.name: span.peak_bytes for span in again}

    def highest(names: tuple[str, ...], kept: int, kept_again: int) -> int:
        found = [managed[name] - kept_again for name in names if name in managed]
        return max(found + [plain[name] - kept for name in names if name in plain], default=0)

    found = []
    kept = kept_again = 0
    for index, region in enumerate(regions):
        between = "start" if index == 0 else f"after {index - 1}"
        kept_again += region.note_bytes
        forward = highest((f"forward {index}", between), kept, kept_again)
        backward = highest((f"backward {index}",), kept, kept_again)
        residual = region.residual_bytes
        found.append(
            dataclasses.replace(
                region,
                forward_peak_bytes=max(forward, residual),
                backward_peak_bytes=max(backward, residual),
                before_peak_bytes=max(highest((between,), kept, kept_again), 0),
            )
        )
        kept += residual
        kept_again += kept_bytes(region, decision[index])
    turn = highest(("turn", f"after {len(regions) - 1}"), kept, kept_again)
    if found:
        # What the last region swaps comes back at once: its way out and back could hide behind nothing.
        found[-1] = _without_swap(found[-1])
    return found, max(turn, 0)


def as_allocated(
    regions: Sequence[Region],
    spans: Sequence[MeasuredSpan],
    again: Sequence[MeasuredSpan],
    decision: Sequence[RegionDecision],
) -> list[Region]:
    """Give the regions their sizes as an allocator counts them.

    Some hand out blocks a little larger than they were asked for. How much larger is seen where forward ends: what the
    plain step (`spans`) holds there above its residuals, and the one that runs blocks again (`again`, under `decision`)
    does not. All that is kept gets its share of it, so that regions that were alike still are.
    """
    end = f"after {len(regions) - 1}"
    levels = [next((span.level_bytes for span in step if span.name == end), None) for step in (spans, again)]
    kept = sum(region.residual_bytes for region in regions)
    kept_again = sum(
        kept_bytes(region, chosen) + region.note_bytes for region, chosen in zip(regions, decision, strict=True)
    )
    if levels[0] is None or levels[1] is None or kept <= kept_again:
        return list(regions)
    share = (levels[0] - levels[1]) / (kept - kept_again) - 1
    if not 0 < share <= _MOST_ROUNDED:
        return list(regions)

    def allocated(value: StorageFacts) -> StorageFacts:
        return dataclasses.replace(value, num_bytes=round(value.num_bytes * (1 + share)))

    return [
        dataclasses.replace(
            region,
            ops=tuple(dataclasses.replace(op, makes=tuple(map(allocated, op.makes))) for op in region.ops),
            inputs=tuple(dataclasses.replace(given, value=allocated(given.value)) for given in region.inputs),
        )
        for region in regions
    ]


def _without_swap(region: Region) -> Region:
    """Take swapping from the region's choices."""
    ops = tuple(
        dataclasses.replace(op, choices=tuple(choice for choice in op.choices if choice != SWAP)) for op in region.ops
    )
    inputs = tuple(dataclasses.replace(given, may_swap=False) for given in region.inputs)
    return dataclasses.replace(region, ops=ops, inputs=inputs)
