from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline_client import LeylineClient, Receipt
from leyline_client.testing import FakeServer
from leyline_evals.bench import __main__ as bench
from leyline_evals.bench import sweep, ttft
from leyline_evals.bench.turns import ARMS, MeasurementFailed, Sample, Shape, Timer
from leyline_evals.overhead import traffic

KEYS = {
    "append_ms", "splice_ms", "splice_stub_ms", "reprefill_ms", "splice_over_append", "splice_stub_over_append",
    "reprefill_over_splice", "context_tokens", "cached_fraction", "samples", "machine", "server",
}  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, Path]]:
    """Run the benchmark's command line against a server without a model; its exit code, output and folder."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ttft, "flush", lambda _client: None)
    monkeypatch.setattr(sweep, "flush", lambda _client: None)
    monkeypatch.setattr(sweep, "LENGTHS", (1_500, 2_000))

    def run(*arguments: str) -> tuple[int, str, Path]:
        with FakeServer().serve() as url:
            code = bench.main(["--base-url", url, "--out", str(tmp_path), "--rounds", "2", *arguments])
        return code, capsys.readouterr().out, tmp_path

    return run


def test_the_result_has_the_promised_keys(measured: Callable[..., tuple[int, str, Path]]) -> None:
    code, printed, folder = measured("--tokens", "2000")
    result = json.loads((folder / "bench_ttft.json").read_text())
    assert code == 0
    assert set(result) >= KEYS
    assert result["context_tokens"] == 2000
    assert [sample["arm"] for sample in result["samples"]] == [*ARMS, *ARMS[1:], ARMS[0]]
    assert result["cached_fraction"] >= 0.99
    assert "goal >= 10" in printed
    assert (folder / "bench_ttft.png").read_bytes().startswith(b"\x89PNG")


def test_the_sweep_writes_points_and_a_plot(measured: Callable[..., tuple[int, str, Path]]) -> None:
    code, _, folder = measured("--tokens", "1500", "--sweep")
    result = json.loads((folder / "bench_sweep.json").read_text())
    assert code == 0
    assert [point["context_tokens"] for point in result["points"]] == [1500, 2000]
    assert (folder / "bench_sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_span_outside_the_context_is_refused(measured: Callable[..., tuple[int, str, Path]]) -> None:
    code, printed, folder = measured("--tokens", "1000")
    assert code == 1
    assert "the evicted span must lie within the context" in printed
    assert not list(folder.iterdir())


def test_a_splice_that_did_not_happen_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    with LeylineClient("http://fake", transport=server.transport) as client:
        timer = Timer(client, Shape(context=400, evicted=80, position=60), seed=1, vocabulary=50_000)
        assert timer.take("splice").receipt.rotated_tokens >= 260
        honest = timer.request
        monkeypatch.setattr(timer, "request", lambda _arm, *rest: honest("reprefill", *rest))
        with pytest.raises(MeasurementFailed, match="splice: the server says append"):
            timer.take("splice")
    assert not server.sessions


def test_figures_are_ratios_of_medians() -> None:
    ms = {
        "append": (100, 300, 110),
        "splice": (110, 130, 121),
        "splice_stub": (150, 1, 150),
        "reprefill": (2420, 1, 9000),
    }
    receipt = Receipt(prompt_tokens=1000, cached_tokens=991, prefilled_tokens=9)
    samples = [Sample(arm, value, receipt) for arm, values in ms.items() for value in values]
    result = ttft.figures(samples, Shape())
    assert result["splice_over_append"] == pytest.approx(1.1)
    assert result["splice_stub_over_append"] == pytest.approx(150 / 110, abs=1e-4)
    assert result["reprefill_over_splice"] == pytest.approx(20.0)
    assert result["cached_fraction"] == 0.991


def test_row_sizes_of_both_kinds_of_attention() -> None:
    gqa = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert sweep.row_sizes(gqa, "torch.float32") == (30 * 3 * 64 * 4, 2 * 30 * 3 * 64 * 4)
    mla = {"num_hidden_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    assert sweep.row_sizes(mla, "bfloat16") == (2 * 8 * 2, 2 * 40 * 2)


def test_traffic_asks_all_servers_the_same_in_changing_order() -> None:
    seen: list[tuple[str, str]] = []
    servers = {name: FakeServer() for name in ("leyline", "stock", "control")}
    clients = {}
    for name, server in servers.items():
        client = LeylineClient("http://fake", transport=server.transport)._http
        client.base_url = "http://fake"  # type: ignore[assignment]
        client.event_hooks = {"request": [lambda request, name=name: seen.append((name, request.content.decode()))]}
        clients[name] = client
    samples = traffic.run(clients, conversations=2, turns=3, words=4, new_tokens=2)
    assert len(samples) == 6
    assert [name for name, _ in seen[:6]] == ["leyline", "stock", "control", "stock", "control", "leyline"]
    bodies = [body for _, body in seen]
    assert bodies[::3] == bodies[1::3] == bodies[2::3]
    assert len(servers["leyline"].turns[-1].messages) == 5


def test_figures_of_traffic_are_ratios_to_the_base() -> None:
    samples = [traffic.Sample(0, {"ours": 2.0, "base": 1.0}), traffic.Sample(1, {"ours": 3.0, "base": 3.0})]
    figures = traffic.figures(samples, "base")
    assert figures["median_ms"] == {"ours": 2.5, "base": 2.0}
    assert figures["median_ratio"] == {"ours": 1.25}
    assert figures["paired_median_ratio"] == {"ours": 1.5}
