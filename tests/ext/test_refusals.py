"""What a server must not be spliced on is read off its arguments as SGLang resolved them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine")


def arguments(**given: Any) -> SimpleNamespace:
    """SGLang's own defaults, with Leyline's cache and ``given``."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    from leyline_server_ext.refusals import ARGUMENT_NAMES

    defaults = {field.name: field.default for field in record_fields(ServerArgs)}
    known = {name: defaults[name] for name in ARGUMENT_NAMES}
    return SimpleNamespace(**{**known, "radix_cache_backend": "leyline", **given})


def codes(server_args: Any) -> list[str]:
    from leyline_server_ext.refusals import argument_refusals

    return [refusal.partition(":")[0] for refusal in argument_refusals(server_args)]


def test_plain_data_parallel_and_tensor_parallel_servers_are_fine() -> None:
    assert codes(arguments()) == []
    assert codes(arguments(dp_size=2)) == []
    assert codes(arguments(tp_size=2)) == []


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"attn_dp_size": 2}, "attention_data_parallel"),
        ({"dp_size": 2, "tp_size": 2}, "data_and_tensor_parallel"),
        ({"nnodes": 2}, "several_nodes"),
        ({"pp_size": 2}, "pipeline_parallel"),
        ({"speculative_algorithm": "EAGLE"}, "speculative"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"radix_cache_backend": None}, "backend_not_selected"),
    ],
)
def test_what_is_not_proven_is_refused(given: dict[str, Any], code: str) -> None:
    assert codes(arguments(**given)) == [code]


def test_what_sglang_made_of_an_argument_counts() -> None:
    """``--dp-size 2 --enable-dp-attention`` leaves these fields alone and resolves to another layout."""
    resolved = [("deprecated", {"attn_dp_size": 2, "dp_size": 1}), ("deprecated", {"enable_dp_attention": False})]
    assert codes(arguments(dp_size=2, _resolved_overrides=resolved)) == ["attention_data_parallel"]


def test_an_argument_sglang_no_longer_has_is_refused() -> None:
    server_args = arguments()
    del server_args.pp_size
    assert codes(server_args) == ["unknown_argument"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_that_do_not_compile_are_a_refusal_and_beside_other_ranks_a_fault(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that refuses alone would prefill what the others have spliced."""
    from leyline_server_ext import compat, kernels, layout, plugin

    def fails(_: object) -> None:
        raise FileNotFoundError("no C compiler at /somebody/s/path")

    monkeypatch.setattr(kernels, "prepare", fails)
    monkeypatch.setattr(layout, "describe", lambda *_: SimpleNamespace(layout=None))
    monkeypatch.setattr(compat, "model_of", lambda _: None)
    monkeypatch.setattr(compat, "kv_pool", lambda _: None)
    refusals: list[str] = []
    if ranks > 1:
        with pytest.raises(FileNotFoundError):
            plugin._described(None, None, refusals, ranks)
        return
    assert plugin._described(None, None, refusals, ranks) is None
    assert refusals == ["kernels: they cannot be compiled here: FileNotFoundError, see the server's log"]
