"""One scheduler's KV side in one process: SGLang's own cache, pools, allocators and requests, without a model.

Rows are written so that they say what they are: the columns without position hold the content's digits bit for bit,
the rotary columns a vector known from the content, turned to the row's position.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import kv_model
import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from leyline_server_ext.cache import Translators, cache_class
from leyline_server_ext.graft import Grafter
from leyline_server_ext.kernels import KVLayout, RopeSpec
from leyline_server_ext.orders import ORDER_KEY, Sealer

ROTARY = 8
LAYERS = 2
DIGITS = kv_model.BITS // 8
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1, 0.03])
"""Radians per position: one position more or less shows."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def prepare() -> None:
    """What SGLang's requests read of the server's configuration."""
    get_context().override_server_args().install()


def drive(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


class Aborted(Exception):
    """The client went away."""


class World:
    """Pool, allocator, radix cache and grafter of one scheduler, and the oracle's record of what every key means."""

    def __init__(self, *, page: int, kind: str, core: str, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self.page, self.kind, self.tokens, self.dtype = page, kind, tokens, dtype
        self.pool = self._make_pool()
        if page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(tokens, dtype, "cpu", self.pool, need_sort=False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(tokens, page, dtype, "cpu", self.pool, need_sort=False)
        self.rows = ReqToTokenPool(size=8, max_context_len=2048, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            tree_core_backend=core,
        )
        params.tree_components = (ComponentType.FULL,)
        self.cache = cache_class()(params)
        self.sealer = Sealer(b"a key of the server's own")
        translators = Translators(self.sealer)
        self.cache.leyline_translators = translators
        self.cache.leyline_grafter = Grafter(self.cache, translators, self.sealer, self._layout())
        self.meaning: dict[tuple[Any, ...], int] = {}
        """Content by ``(namespace, hash of the tree key up to a position)``: a key says what its KV is."""
        self.made_on: dict[int, tuple[list[int], int]] = {}
        """By content: the row it was prefilled in and its place there; it attends to everything before."""
        self.numbers = itertools.count()

    # --- rows -----------------------------------------------------------------------------------------------------

    def _make_pool(self) -> Any:
        common = {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
        if self.kind == "mla":
            return MLATokenToKVPool(self.tokens, self.page, self.dtype, DIGITS, ROTARY, **common)
        # The keys have columns without position as well (a partial rotary dimension).
        return MHATokenToKVPool(self.tokens, self.page, self.dtype, 2, ROTARY + DIGITS, **common)

    def _layout(self) -> KVLayout:
        rope = RopeSpec(FREQUENCIES, ROTARY, interleaved=self.kind == "mla")
        if self.kind == "mla":
            return KVLayout.mla(self.pool.kv_buffer, [rope] * LAYERS, DIGITS)
        return KVLayout.mha(self.pool.k_buffer, self.pool.v_buffer, [rope] * LAYERS)

    def _planes(self, layer: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``(rotary columns, [columns holding digits, ...])`` of a layer, ``(slots, heads, width)``."""
        if self.kind == "mla":
            buffer = self.pool.kv_buffer[layer]
            return buffer[..., DIGITS:], [buffer[..., :DIGITS]]
        keys, values = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
        return keys[..., :ROTARY], [keys[..., ROTARY:], values[..., :DIGITS]]

    def _band(self, contents: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        """``(rows, ROTARY)``: the vector of each content, turned to its position; float32 math."""
        shifts = torch.arange(ROTARY) * 4 + layer
        vector = 1.0 + ((contents[:, None] >> shifts) & 15).double() / 8
        angle = positions.double()[:, None] * FREQUENCIES.double()
        cos, sin = angle.cos(), angle.sin()
        if self.kind == "mla":
            a, b = vector[:, 0::2], vector[:, 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(1)
        a, b = vector.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    @staticmethod
    def _digits(contents: torch.Tensor) -> torch.Tensor:
        return (contents[:, None] >> (8 * torch.arange(DIGITS))) & 255

    def write(self, slots: torch.Tensor, contents: Sequence[int], first: int) -> None:
        """What a forward would: the KV of positions ``first`` and following."""
        wanted = torch.tensor(contents, dtype=torch.int64)
        positions = torch.arange(first, first + len(wanted))
        for layer in range(LAYERS):
            band, plain = self._planes(layer)
            band[slots] = self._band(wanted, positions, layer)[:, None].to(self.dtype)
            for columns in plain:
                columns[slots] = (self._digits(wanted) ^ layer)[:, None].to(self.dtype)

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> list[int]:
        """Contents of ``slots``, every copy of the digits agreeing and every key turned to its position."""
        contents = torch.zeros(len(slots), dtype=torch.int64)
        for layer in range(LAYERS):
            band, plain = self._planes(layer)
            for columns in plain:
                digits = columns[slots].double().long() ^ layer
                found = (digits << (8 * torch.arange(DIGITS))).sum(-1)
                if layer == 0 and columns is plain[0]:
                    contents = found[:, 0]
                assert torch.equal(found, contents[:, None].expand_as(found)), "a row is a mixture of two"
            off = (band[slots].double() - self._band(contents, positions, layer)[:, None]).abs().amax((1, 2))
            worst = int(off.argmax()) if len(off) else 0
            assert not len(off) or float(off[worst]) <= TOLERANCE[self.dtype], (
                f"position {int(positions[worst])} of {len(off)}: turned elsewhere, off by {float(off[worst]):.2g}"
            )
        return contents.tolist()

    # --- requests -------------------------------------------------------------------------------------------------

    def request(
        self, ids: Sequence[int], *, extra_key: str | None = None, salt: str | None = None, custom: Any = None
    ) -> Req:
        """A request as the scheduler makes it."""
        sampling = SamplingParams(max_new_tokens=8, custom_params=custom)
        return Req(f"r{next(self.numbers)}", "", array("q", ids), sampling, extra_key=extra_key, cache_salt=salt)

    def admit(self, req: Req) -> None:
        """The match a prefill starts from, and the lock that follows it."""
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)

    def step_back(self, req: Req) -> None:
        """Not admitted after all (no room in the batch)."""
        self.cache.unlock(req.lock)
        req.lock = None

    def extend(self, req: Req, end: int) -> bool:
        """Allocate and "prefill" up to ``end``, and publish it; False where the pool has no room."""
        tokens = list(req.origin_input_ids + req.output_ids)
        start = req.kv.kv_allocated_len if req.kv.holds_kv else req.prefix_len
        evict_from_tree_cache(self.cache, end - start + self.page)
        if self.allocator.available_size() < end - start + self.page:
            return False
        if not req.kv.holds_kv:
            self.rows.alloc([req])
            prefix = self.cache.prefix_device_indices(req)
            self.rows.write((req.kv.req_pool_idx, slice(0, start)), prefix.to(torch.int32))
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        slots = self._allocate(row, start, end)
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        there = self.read(row[:start].long(), torch.arange(start))
        contents = kv_model.prefill(there, tokens[:end])
        self.made_on |= {contents[place]: (contents, place) for place in range(start, end)}
        self.write(slots.long(), contents[start:], start)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        return True

    def _allocate(self, row: torch.Tensor, start: int, end: int) -> torch.Tensor:
        if self.page == 1:
            return self.allocator.alloc(end - start)
        last = torch.tensor([int(row[start - 1]) if start else -1])
        lens = torch.tensor([start]), torch.tensor([end])
        return self.allocator.alloc_extend(lens[0], lens[0], lens[1], lens[1], last, end - start)

    def contents(self, req: Req) -> list[int]:
        """Contents of a running request's rows."""
        count = req.kv.kv_committed_len
        return self.read(self.rows.req_to_token[req.kv.req_pool_idx, :count].long(), torch.arange(count))

    def release(self, req: Req, *, keep: bool = True, aborted: bool = False) -> None:
        """The request is over."""
        if not req.kv.holds_kv:
            self.step_back(req)
            return
        if keep:
            req.finished_reason = FINISH_ABORT("gone") if aborted else FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=keep)

    def record(self, req: Req, contents: Sequence[int]) -> None:
        """A tree key means one content, whoever made it."""
        translators = self.cache.leyline_translators
        tokens = array("q", (req.origin_input_ids + req.output_ids)[: len(contents)])
        lineage, rest = translators.lineage(req.extra_key, req.cache_salt)
        from leyline_server_ext.lineage import key_elements

        state = hash((rest, req.cache_salt))
        for element, content in zip(key_elements(np.array(tokens), lineage).tolist(), contents, strict=True):
            state = hash((state, element))
            assert self.meaning.setdefault((state,), content) == content, "one key, two meanings"

    def run(self, req: Req, new_tokens: int, plan: Disturbance) -> list[int]:
        """A request's life. Returns the contents of everything fed; raises `Aborted` where the plan says so."""
        if plan.abort == "before_match":
            raise Aborted
        for quota in plan.evictions:
            self.admit(req)
            self.step_back(req)
            self.evict(quota)
        self.admit(req)
        if plan.abort == "after_match":
            self.step_back(req)
            raise Aborted
        contents = self._generate(req, new_tokens, plan)
        if plan.retract and new_tokens > 0:
            self.release(req, keep=False)
            req.reset_for_retract()
            self.evict(plan.retract)
            self.admit(req)
            contents = self._prefill(req, plan)
        self.record(req, contents)
        self.release(req)
        return contents

    def _prefill(self, req: Req, plan: Disturbance) -> list[int]:
        total = len(req.origin_input_ids) + len(req.output_ids)
        if req.output_ids:
            total -= 1
        cuts = sorted({req.prefix_len + (total - req.prefix_len) * c // 4 for c in plan.chunks})
        cuts = [cut for cut in cuts if req.prefix_len < cut < total]
        for end in [*cuts, total]:
            if not self.extend(req, end):
                self.release(req, aborted=True)
                raise Aborted
            if plan.abort == "mid_prefill" and end != total:
                self.release(req, aborted=True)
                raise Aborted
            req.extend_end = end
            checkpoint_kv_cache(req, self.cache)
        return self.contents(req)

    def _generate(self, req: Req, new_tokens: int, plan: Disturbance) -> list[int]:
        contents = self._prefill(req, plan)
        for _ in range(new_tokens):
            req.output_ids.append(1 + contents[-1] % 5)
            if len(req.output_ids) < new_tokens:
                if not self.extend(req, len(contents) + 1):
                    self.release(req, aborted=True)
                    raise Aborted
                contents = self.contents(req)
        if plan.abort == "streaming":
            self.release(req, aborted=True)
            raise Aborted
        return contents

    def evict(self, tokens: int) -> None:
        """Memory pressure."""
        if tokens:
            self.cache.evict(EvictParams(num_tokens=tokens))

    def cached(self) -> set[int]:
        """Every content in the tree."""
        walk = self.cache.tree_core.walk_for_kv_canary(False, False)
        return set(self.read(walk.slot_indices.long(), walk.positions.long()))

    def influenced_by(self, contents: set[int]) -> set[int]:
        """``contents`` and every content that was ever computed on top of one of them, wherever it was moved to."""
        found = set(contents)
        for content, (row, place) in self.made_on.items():
            if not found.isdisjoint(row[:place]):
                found.add(content)
        return found

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless every slot has one owner, every cached row is in its place and nothing is locked."""
        cached = self.cache.all_values_flatten()
        free = self.allocator.get_all_free_pages()
        if self.page > 1:
            free = (free[:, None] * self.page + torch.arange(self.page)).flatten()
        owned = torch.cat([cached, free])
        first = self.page if self.page > 1 else 1
        assert torch.equal(owned.sort().values, torch.arange(first, first + self.tokens)), "a slot lost or owned twice"
        assert self.cache.protected_size() == 0
        assert self.cache.evictable_size() == len(cached)
        self.cache.sanity_check()
        walk = self.cache.tree_core.walk_for_kv_canary(False, False)
        self.read(walk.slot_indices.long(), walk.positions.long())


class Disturbance(SimpleNamespace):
    """What happens to a request besides being served."""

    abort: str | None = None
    evictions: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    retract: int = 0


class Manager:
    """The tokenizer manager as `Engine` sees it, in front of a `World`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = Disturbance()
        self.contents: list[int] = []
        self.warmups = 0

    async def generate_request(self, request: Any, http_request: Any) -> AsyncIterator[dict[str, Any]]:
        """Serve one request. The plan is for the one that generates: internal prefills are left alone."""
        world, sampling = self.world, request.sampling_params
        req = world.request(
            request.input_ids,
            extra_key=request.extra_key,
            salt=request.cache_salt,
            custom=sampling["custom_params"],
        )
        count = sampling["max_new_tokens"]
        self.warmups += count == 0
        try:
            self.contents = world.run(req, count, self.plan if count else Disturbance())
        except Aborted:
            if count:
                raise
            yield {"meta_info": {"finish_reason": {"type": "abort"}}, "output_ids": []}
            return
        info: dict[str, Any] = {"completion_tokens": count, "finish_reason": {"type": "length"}}
        info["cached_tokens"] = req.num_matched_prefix_tokens
        if count:
            info[ORDER_KEY] = req.customized_info[ORDER_KEY] if req.customized_info else None
        yield {"meta_info": info, "output_ids": list(req.output_ids)}
