"""Every name of SGLang's internals that Leyline touches, in one place. Checked on SGLang 0.5.23.

Nothing here is imported before it is asked for: the plugin is loaded in every process of the server, the HTTP process
among them, and must not pull torch in there on its own.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

CHECKED_VERSIONS = ("0.5.23",)
BACKEND_NAME = "leyline"
"""Value of ``--radix-cache-backend``."""


def sglang_version() -> str:
    """Version of the installed SGLang, or ``"missing"``."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def version_refusal() -> str | None:
    """A clear message when this SGLang was not checked, else None."""
    version = sglang_version()
    if version in CHECKED_VERSIONS:
        return None
    return f"sglang_version: SGLang {version} is not supported; checked on {', '.join(CHECKED_VERSIONS)}"


def argument(server_args: Any, name: str, default: Any = None) -> Any:
    """A server argument as SGLang resolved it; the field itself keeps what the command line said."""
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, name, default)


# --- the radix cache ---------------------------------------------------------------------------------------------


def register_backend(factory: Callable[[Any], Any]) -> None:
    """Make ``--radix-cache-backend leyline`` known."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

    if BACKEND_NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(BACKEND_NAME, factory)


def build_cache(context: Any, cache_class: type) -> Any:
    """SGLang's unified radix cache, as ``cache_class``."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    return create_unified_radix_cache(context, cache_class=cache_class)


@cache
def tree() -> SimpleNamespace:
    """Classes of the tree's interface."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.common import evict_from_tree_cache
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return SimpleNamespace(
        InsertParams=InsertParams,
        MatchPrefixParams=MatchPrefixParams,
        RadixKey=RadixKey,
        UnifiedRadixCache=UnifiedRadixCache,
        evict_until_free=evict_from_tree_cache,
    )


def match_of(result: Any) -> tuple[int, Any]:
    """``(cached prefix length, node)`` of a match result."""
    return result.device_prefix_len, result.last_device_node


def path_nodes(cache_: Any, node: Any) -> list[tuple[Any, int, int, int]]:
    """Nodes from the root to ``node``: ``(id, path start, path end, number of children)``."""
    (path,) = cache_.tree_core.collect_path_info([node])
    return [(n.node_id, n.path_start, n.path_end, n.num_children) for n in path]


def is_locked(cache_: Any, node: Any) -> bool:
    """Whether somebody holds a lock on ``node`` (or below it, which locks it too)."""
    receipt = cache_.inc_lock_ref(node)
    cache_.dec_lock_ref(node, receipt.to_dec_params())
    return not receipt.delta


def take_leaf(cache_: Any, node: Any) -> list[Any]:
    """Remove an unlocked leaf from the tree and return its slots **unfreed**: tensors of int64 slots, in order.

    The caller owns them. Must only be called on a node without children and locks: the Rust core does not forgive.
    """
    from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

    result = cache_.tree_core.evict_device_leaf(node, False)
    slots = list(result.device_frees.pop(BASE_COMPONENT_TYPE, []))
    cache_._apply_eviction_result(result)
    return slots


def pool_counts(cache_: Any) -> tuple[int, int, int]:
    """``(total, free, cached)`` slots of the KV pool; what is neither free nor evictable is held by requests."""
    allocator = cache_.token_to_kv_pool_allocator
    return int(allocator.size), int(allocator.available_size()), int(cache_.evictable_size())


# --- requests in the scheduler -----------------------------------------------------------------------------------


def order_of(req: Any, key: str) -> str | None:
    """The sealed order a request carries in its ``custom_params``."""
    params = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    value = params.get(key) if isinstance(params, dict) else None
    return value if isinstance(value, str) else None


def set_report(req: Any, key: str, report: dict[str, Any]) -> None:
    """Let ``report`` travel back in the reply's ``meta_info[key]`` (a list whose first element it is)."""
    info = req.customized_info or {}
    info[key] = [report]
    req.customized_info = info


def publishable(req: Any, up_to: int) -> int:
    """How many of an aborted request's tokens the tree may take: the prompt, whose key its sender knows."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not isinstance(req.finished_reason, FINISH_ABORT):
        return up_to
    return max(int(req.kv.cache_protected_len), min(up_to, len(req.origin_input_ids)))


def rows_of(cache_: Any, req: Any, up_to: int) -> tuple[Any, list[int]]:
    """Slots and token ids of the first ``up_to`` tokens of a request that still holds its row."""
    slots = cache_.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to].long()
    return slots, list((req.origin_input_ids + req.output_ids)[:up_to])


def is_admission_match(params: Any) -> bool:
    """Whether a match is the one a prefill starts from: only that one is capped below the prompt's length."""
    return params.req is not None and params.key.limit is not None


# --- the KV pool and the model -----------------------------------------------------------------------------------


def attention_layers(model: Any) -> Iterator[tuple[int, Any]]:
    """``(layer id, rotary module or None)`` of every attention layer of ``model``, by layer id."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, Any] = {}
    for module in model.modules():
        for child in module.children():
            if isinstance(child, RadixAttention) and child.layer_id not in found:
                found[child.layer_id] = getattr(module, "rotary_emb", None)
    yield from sorted(found.items())


def kv_pool(cache_: Any) -> Any:
    """The KV pool behind a cache's allocator."""
    return cache_.token_to_kv_pool_allocator.get_kvcache()


def pool_kind(pool: Any) -> str | None:
    """``"mla"`` or ``"mha"`` for the two plain pools, None for every other one (quantised, hybrid, indexed, ...)."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    return {MLATokenToKVPool: "mla", MHATokenToKVPool: "mha"}.get(type(pool))


def inverse_frequencies(rotary: Any) -> Any | None:
    """The rotary module's effective inverse frequencies, without mscale; None for a class not checked."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding, Llama3RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    by_class = {
        RotaryEmbedding: "base",
        Llama3RotaryEmbedding: "base",
        YaRNScalingRotaryEmbedding: "scaling_factor",
        DeepseekScalingRotaryEmbedding: "scaling_factor",
    }
    attribute = by_class.get(type(rotary))
    return None if attribute is None else rotary._compute_inv_freq(getattr(rotary, attribute)).float().cpu()


def model_of(context: Any) -> Any:
    """The model of a cache build context."""
    return context.tp_worker.model_runner.model


def forward_stream(context: Any) -> Any | None:
    """The CUDA stream the model's forwards run on; None on the CPU."""
    runner = context.tp_worker.model_runner
    return getattr(runner, "forward_stream", None) if str(runner.device).startswith("cuda") else None


# --- the HTTP process --------------------------------------------------------------------------------------------


def http_app() -> Any:
    """SGLang's FastAPI application."""
    import sglang.srt.entrypoints.http_server as http_server

    return http_server.app


def http_state() -> tuple[Any, Any, Any]:
    """``(tokenizer manager, template manager, scheduler info)`` of the running server."""
    import sglang.srt.entrypoints.http_server as http_server

    state = http_server.get_global_state()
    return state.tokenizer_manager, state.template_manager, state.scheduler_info


def server_args() -> Any:
    """The server's arguments, in the HTTP process."""
    return http_state()[0].server_args


@cache
def openai() -> SimpleNamespace:
    """Classes of the OpenAI entry point."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.managers.io_struct import GenerateReqInput

    return SimpleNamespace(ChatCompletionRequest=ChatCompletionRequest, GenerateReqInput=GenerateReqInput)


def register_hook(target: str, hook: Callable[..., Any]) -> None:
    """Run ``hook(original, *args, **kwargs)`` around ``target`` through SGLang's own hook registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
"""Where every request of every SGLang route passes before it reaches a scheduler."""


def imported(name: str) -> bool:
    """Whether a module is loaded already."""
    return name in sys.modules
