"""What a server must not be spliced on, read off its own arguments. Anything not known to be safe is named here.

Model and pool are judged in `leyline_server_ext.layout`; requests in `leyline_server_ext.turn`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import compat

_ARGUMENTS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("disable_radix_cache", bool, "radix_cache_disabled", "--disable-radix-cache leaves nothing to splice"),
    (
        "speculative_algorithm",
        lambda v: v is not None,
        "speculative",
        "the draft model's KV would not be spliced along",
    ),
    ("enable_hierarchical_cache", bool, "hierarchical_cache", "host pages are hashed by token ids alone"),
    ("enable_lmcache", bool, "lmcache", "its pages are hashed by token ids alone"),
    ("enable_flexkv", bool, "flexkv", "its pages are hashed by token ids alone"),
    ("enable_unified_cache_external_linker", bool, "external_linker", "its pages are hashed by token ids alone"),
    ("kv_events_config", lambda v: v is not None, "kv_events", "event hashes would mix spliced with clean pages"),
    ("disaggregation_mode", lambda v: v not in (None, "null"), "disaggregation", "prefill and decode pools are apart"),
    ("dcp_size", lambda v: (v or 1) > 1, "decode_context_parallel", "a row's KV is spread over ranks"),
    ("attn_cp_size", lambda v: (v or 1) > 1, "context_parallel", "a row's KV is spread over ranks"),
    ("attn_dp_size", lambda v: (v or 1) > 1, "attention_data_parallel", "not checked yet; --dp-size alone is fine"),
    ("nnodes", lambda v: (v or 1) > 1, "several_nodes", "not checked yet"),
    ("pp_size", lambda v: (v or 1) > 1, "pipeline_parallel", "not checked yet"),
    ("tokenizer_worker_num", lambda v: (v or 1) > 1, "tokenizer_workers", "sessions live in one HTTP process"),
    ("enable_streaming_session", bool, "streaming_session", "the engine's own sessions bypass the radix tree"),
    ("enable_session_radix_cache", bool, "session_radix_cache", "the engine's own sessions hold tree nodes"),
)

_ONE_OF = ("dp_size", "tp_size")
"""Of these one may be more than 1."""


def argument_refusals(server_args: Any) -> list[str]:
    """``"code: explanation"`` for every argument that stands in the way; empty: the arguments are fine."""
    found = [] if (version := compat.version_refusal()) is None else [version]
    if getattr(server_args, "radix_cache_backend", None) != compat.BACKEND_NAME:
        found.append(f"backend_not_selected: start the server with --radix-cache-backend {compat.BACKEND_NAME}")
    missing = object()
    for name, is_bad, code, why in _ARGUMENTS:
        value = compat.argument(server_args, name, missing)
        if value is missing:
            found.append(f"unknown_argument: this SGLang has no {name}; cannot tell whether it is safe")
        elif is_bad(value):
            found.append(f"{code}: {why}")
    if all((compat.argument(server_args, name, 1) or 1) > 1 for name in _ONE_OF):
        found.append("data_and_tensor_parallel: not checked together yet; either alone is fine")
    return found


ARGUMENT_NAMES = tuple(name for name, *_ in _ARGUMENTS)
"""Server arguments looked at; a test holds them against the real ``ServerArgs``."""
