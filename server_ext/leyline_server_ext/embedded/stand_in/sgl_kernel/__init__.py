"""A stand-in for ``sgl_kernel`` on machines without a GPU.

SGLang imports a few names of its kernel package when its modules load, also on the CPU. The CPU build of that package
is not published on PyPI and the CUDA build does not import without a driver, so the embedded server puts this module on
the ``PYTHONPATH`` of its own processes, and of nothing else.

Only the names that SGLang 0.5.23 imports on the CPU path exist. They belong to speculative decoding and to pool moves
that the embedded server never does: calling one raises `NotImplementedError`, asking for any other name raises
`AttributeError` (an ``ImportError`` in a ``from`` import). Nothing here pretends to compute.
"""

from typing import NoReturn

__version__ = "0.0.0+leyline.standin"

_IMPORTED_BY_SGLANG = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


class _Missing:
    """A kernel that is not here: importable, never callable."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{self.__name__} does not exist on the embedded CPU server; run SGLang on a GPU host for it"
        )

    def __repr__(self) -> str:
        return f"<stand-in for sgl_kernel.{self.__name__}>"


globals().update({name: _Missing(name) for name in _IMPORTED_BY_SGLANG})


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"sgl_kernel.{name}: the embedded CPU server has only a stand-in for sgl_kernel, without this name"
    )
