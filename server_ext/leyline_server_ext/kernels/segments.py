"""The table a request attends through: runs of cached rows, each with the shift its keys need.

AKV article, section 4. Target positions run through the segments of a request without gaps; a dropped span is simply
not in the table::

    source rows   [0 ........ 1000)  [1000 .... 3500)  [3500 .... 4000)
    operation          keep               drop            keep, moved by -2500
    table          segment, delta 0                     segment, delta -2500
    target         [0 ........ 1000)                    [1000 .... 1500)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive target positions whose keys move by one shift.

    Attributes:
        pages: ``(p,)`` int64 page numbers in order (slots, where a page is one token).
        length: tokens of the segment.
        delta: positions its keys move by.
        skip: tokens of the first page that lie before the segment.
    """

    pages: Tensor
    length: int
    delta: int
    skip: int = 0


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Segments of a batch. Build it with :meth:`build`; all tensors int64 on one device.

    Attributes:
        pages: ``(pages,)`` the page lists of all segments, one after the other.
        first_page: ``(segments,)`` where a segment's list begins in ``pages``.
        skip: ``(segments,)`` tokens of its first page before it.
        begin: ``(segments,)`` target position of its first token.
        end: ``(segments,)`` target position after its last token.
        delta: ``(segments,)`` positions its keys move by.
        requests: ``(batch + 1,)``: request ``b`` has segments ``[requests[b], requests[b + 1])``.
        lengths: tokens of each request, on the host.
        page_size: tokens of a page.
    """

    pages: Tensor
    first_page: Tensor
    skip: Tensor
    begin: Tensor
    end: Tensor
    delta: Tensor
    requests: Tensor
    lengths: tuple[int, ...]
    page_size: int

    @classmethod
    def build(
        cls, requests: Sequence[Sequence[Segment]], *, page_size: int = 1, device: torch.device | str = "cpu"
    ) -> SegmentTable:
        """Lay the segments of each request end to end, in the order given.

        Raises:
            ValueError: a request without tokens, a segment longer than its pages, or a page size below 1.
        """
        if page_size < 1:
            raise ValueError(f"a page holds at least one token, not {page_size}")
        rows: list[tuple[int, int, int, int, int]] = []
        bounds, lengths, page_lists, used = [0], [], [torch.empty(0, dtype=torch.int64)], 0
        for segments in requests:
            position = 0
            for segment in segments:
                _check(segment, page_size)
                rows.append((used, segment.skip, position, position + segment.length, segment.delta))
                page_lists.append(segment.pages.cpu())
                used += segment.pages.numel()
                position += segment.length
            if not position:
                raise ValueError("a request attends to at least one token")
            lengths.append(position)
            bounds.append(len(rows))
        first_page, skip, begin, end, delta = torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device).unbind(0)
        pages, owners = torch.cat(page_lists).to(device), torch.tensor(bounds, device=device)
        return cls(pages, first_page, skip, begin, end, delta, owners, tuple(lengths), page_size)

    def segments(self, request: int) -> list[tuple[Tensor, int]]:
        """Slots ``(length,)`` and shift of each segment of a request (waits for the device)."""
        first, last = self.requests[request : request + 2].tolist()
        found = []
        for index in range(first, last):
            length, skip = int(self.end[index] - self.begin[index]), int(self.skip[index])
            inside = torch.arange(skip, skip + length, device=self.pages.device)
            page = self.pages[self.first_page[index] + inside // self.page_size]
            found.append((page * self.page_size + inside % self.page_size, int(self.delta[index])))
        return found


def _check(segment: Segment, page_size: int) -> None:
    if segment.pages.dtype != torch.int64 or segment.pages.ndim != 1:
        raise ValueError("the pages of a segment must be (p,) int64")
    if segment.length < 1 or not 0 <= segment.skip < page_size:
        raise ValueError(f"a segment of {segment.length} tokens after {segment.skip} of a page of {page_size}")
    if segment.skip + segment.length > segment.pages.numel() * page_size:
        raise ValueError(f"a segment of {segment.length} tokens does not fit its {segment.pages.numel()} pages")
