"""Entry point ``sglang.srt.plugins: leyline``. SGLang calls `register` in every process, before it starts.

A fault here is logged and swallowed by SGLang: the server would start without Leyline. That is why clients ask
``/leyline/v1/info`` first and do not pretend.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from . import compat, shared

if TYPE_CHECKING:
    from .layout import Described

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the radix backend everywhere, the routes and the guard in the main process."""
    refusal = compat.version_refusal()
    if refusal is not None:
        logger.error("leyline: not loaded: %s", refusal)
        return
    is_main = multiprocessing.parent_process() is None
    shared.prepare(is_main)
    if os.environ.get("LEYLINE_EMBEDDED") == "1":
        from .embedded.cpu_engine import install

        install()
    compat.register_backend(build)
    if is_main:
        from .guard import install_guard
        from .routes import install_routes

        atexit.register(shared.remove_facts)
        install_guard()
        install_routes(compat.http_app())


def build(context: Any) -> Any:
    """Radix cache factory: SGLang's cache with Leyline's keys, and the graft where pool and model allow it."""
    from . import probe
    from .cache import Translators, cache_class
    from .graft import Grafter
    from .orders import Sealer
    from .refusals import argument_refusals

    cache = compat.build_cache(context, cache_class())
    sealer = Sealer(shared.key())
    translators = Translators(sealer)
    refusals = [*argument_refusals(context.server_args), *_hybrid_refusals(context)]
    ranks = compat.argument(context.server_args, "tp_size", 1)
    described = None if refusals else _described(context, cache, refusals, ranks)
    cache.leyline_translators = translators
    cache.leyline_grafter = Grafter(
        cache,
        translators,
        sealer,
        None if described is None else described.layout,
        compat.forward_stream(context),
        ranks=ranks,
    )
    cache.leyline_probe = probe.from_environment()
    if context.tp_rank == 0:
        shared.write_facts(
            {
                "refusals": refusals,
                "page_size": cache.page_size,
                "pool_tokens": compat.pool_counts(cache)[0],
                "kv_dtype": described.kv_dtype if described else str(compat.kv_pool(cache).dtype),
                "rope": described.rope.model_dump() if described else None,
            }
        )
    if refusals:
        logger.warning("leyline: this server cannot be spliced: %s", "; ".join(refusals))
    else:
        logger.info("leyline: ready: %s", described.rope if described else "")
    return cache


def _described(context: Any, cache: Any, refusals: list[str], ranks: int) -> Described | None:
    """The pool, its kernels compiled; None where it cannot be spliced: **appends** to ``refusals`` why."""
    from .kernels import prepare
    from .layout import UnsupportedLayout, describe

    try:
        described = describe(compat.model_of(context), compat.kv_pool(cache))
    except UnsupportedLayout as error:
        refusals.append(str(error))
        return None
    try:
        prepare(described.layout)
    except Exception as error:
        if ranks > 1:  # the others may have compiled theirs, and would splice without this one
            raise
        logger.exception("leyline: the kernels cannot be compiled")
        refusals.append(f"kernels: they cannot be compiled here: {type(error).__name__}, see the server's log")
        return None
    return described


def _hybrid_refusals(context: Any) -> list[str]:
    """Models whose state is more than one row of KV per token."""
    checks = {
        "sliding_window": context.is_hybrid_swa,
        "recurrent_state": context.is_hybrid_ssm,
        "sparse_attention": context.is_dsa,
        "encoder_decoder": context.model_config.is_encoder_decoder,
        "chunked_attention": context.model_config.attention_chunk_size is not None,
        "cache_disabled": context.disable_radix_cache,
    }
    return [f"{code}: a token's state is more than its KV row" for code, bad in checks.items() if bad]
