"""What SGLang's CPU engine lacks for the embedded server, added through SGLang's own plugin hooks.

All of it only in processes started by `EmbeddedServer` (they carry ``LEYLINE_EMBEDDED=1``) and nothing on a GPU host:
MLA models are told to use the absorbed form with the torch-native backend, that backend's attention is replaced by
`cpu_attention`, which computes the new queries only, processes are forked, and several ranks share two cores in peace.
Checked with SGLang 0.5.23.
"""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

ENV_FLAG = "LEYLINE_EMBEDDED"
_POLL_MILLISECONDS = 1000
_BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def install() -> None:
    """Register the fixes. Call it from a plugin's ``register()``, before SGLang applies its hooks.

    Raises:
        ImportError: this SGLang lacks a name the fixes build on.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_processes, HookType.AFTER)
    HookRegistry.register("sglang.srt.utils.numa_utils.init_threads_binding", _share_cores, HookType.AROUND)
    HookRegistry.register(f"{_CONTROLLER}.event_loop", _wait_for_requests, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}.init_forward_metadata", _plan_forward, HookType.AFTER)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_extend", _forward, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_decode", _forward, HookType.AROUND)


def _fork_processes(_result: None, _server_args: Any) -> None:
    """Fork scheduler and detokenizer off the main process, where SGLang would spawn them.

    SGLang spawns because CUDA does not survive a fork. On the CPU nothing speaks against it, and each spawned process
    would import torch, transformers and SGLang again, which is most of what a start costs.
    """
    multiprocessing.set_start_method("fork", force=True)


def _share_cores(original: Callable[..., Any], *, numa_index: int, world_size: int) -> Any:
    """Divide the cores among the ranks of ``--dp`` and ``--tp``.

    SGLang allows one rank per NUMA node unless the user names the cores of each, and binds them with a kernel of
    the CPU build that is not there. Ranks that share a node are fine where nothing is bound.
    """
    if world_size == 1 or os.environ.get(_BIND_VARIABLE):
        return original(numa_index=numa_index, world_size=world_size)
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    return None


def _wait_for_requests(_original: Callable[..., Any], controller: Any) -> None:
    """The loop of the process that hands requests to the ranks of ``--dp``; SGLang's own spins on a core."""
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(_POLL_MILLISECONDS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))


def _plan_forward(_result: None, backend: Any, forward_batch: Any) -> None:
    """Describe the batch once, for all layers of this forward."""
    from leyline_server_ext.embedded.cpu_attention import plan_batch

    backend.leyline_plans = None
    if forward_batch.encoder_lens is not None or forward_batch.forward_mode.is_idle():
        return
    seq_lens = forward_batch.seq_lens.tolist()
    extend = forward_batch.extend_seq_lens
    query_lens = [1] * len(seq_lens) if forward_batch.forward_mode.is_decode() else extend.tolist()
    req_to_token = backend.req_to_token_pool.req_to_token
    backend.leyline_plans = plan_batch(req_to_token, forward_batch.req_pool_indices, seq_lens, query_lens)


def _forward(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    """Attention of a batch, extend and decode alike; what the plans do not cover goes to SGLang's own."""
    from leyline_server_ext.embedded.cpu_attention import attend

    plans = backend.leyline_plans
    if plans is None or kw.get("is_cross_attn") or kw.get("sliding_window_size") is not None:
        return original(backend, query, output, k_cache, v_cache, *args, **kw)
    # A decode query is the newest token and sees everything, so causal changes nothing for it.
    scale = kw["scaling"] if kw["scaling"] is not None else query.shape[-1] ** -0.5
    start = 0
    for plan in plans:
        rows = slice(start, start + plan.query_len)
        output[rows] = attend(query[rows], k_cache, v_cache, plan, scale, kw["causal"])
        start = rows.stop
    return output
