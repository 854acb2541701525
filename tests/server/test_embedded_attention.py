"""CPU attention against a loop in fp64, over every path: views, gathers, blocks, the fused kernel."""

import pytest

torch = pytest.importorskip("torch")

from leyline_server_ext.embedded.cpu_attention import FEW_QUERIES, MAX_RUNS, attend, plan_batch  # noqa: E402

POOL = 700


def slots_in_runs(kv_len: int, runs: int) -> "torch.Tensor":
    """`kv_len` distinct pool slots in exactly `runs` pieces of consecutive ones, the pieces in falling order."""
    sizes = [kv_len // runs + (i < kv_len % runs) for i in range(runs)]
    start, pieces = POOL, []
    for size in sizes:
        start -= size + 1
        pieces.append(torch.arange(start, start + size))
    return torch.cat(pieces)


def oracle(
    query: "torch.Tensor", keys: "torch.Tensor", values: "torch.Tensor", scale: float, causal: bool
) -> "torch.Tensor":
    group = query.shape[1] // keys.shape[1]
    before = len(keys) - len(query)
    out = torch.empty(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    for i in range(len(query)):
        seen = before + i + 1 if causal else len(keys)
        for head in range(query.shape[1]):
            scores = keys[:seen, head // group].double() @ query[i, head].double() * scale
            out[i, head] = torch.softmax(scores, 0) @ values[:seen, head // group].double()
    return out


SHAPES = [
    # query_len, kv_len, heads, kv_heads, head_dim, v_head_dim
    pytest.param((1, 130, 9, 3, 64, 64), id="decode-gqa"),
    pytest.param((12, 131, 9, 3, 64, 64), id="append-gqa"),
    pytest.param((5, 5, 4, 4, 16, 16), id="first-prefill-mha"),
    pytest.param((FEW_QUERIES, 123, 4, 2, 32, 32), id="at-the-threshold"),
    pytest.param((FEW_QUERIES + 1, FEW_QUERIES + 1, 4, 2, 32, 32), id="fused-no-prefix"),
    pytest.param((FEW_QUERIES + 26, 193, 6, 2, 32, 32), id="fused-with-prefix"),
    pytest.param((7, 77, 4, 1, 144, 128), id="mla-few"),
    pytest.param((2 * FEW_QUERIES + 3, 171, 4, 1, 144, 128), id="mla-blocks"),
]


@pytest.mark.parametrize("runs", [1, 2, 3, MAX_RUNS + 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(
    shape: tuple[int, ...], dtype: "torch.dtype", tolerance: float, causal: bool, runs: int
) -> None:
    query_len, kv_len, heads, kv_heads, head_dim, v_head_dim = shape
    if runs > kv_len:
        runs = kv_len
    generator = torch.Generator().manual_seed(query_len * 1000 + kv_len + runs)
    query = torch.randn(query_len, heads, head_dim, generator=generator).to(dtype)
    k_pool = torch.randn(POOL, kv_heads, head_dim, generator=generator).to(dtype)
    # MLA reads V out of the K rows: the same storage, narrower.
    v_pool = k_pool[..., :v_head_dim] if v_head_dim < head_dim else torch.randn_like(k_pool)
    slots = slots_in_runs(kv_len, runs)
    req_to_token = torch.zeros(3, POOL, dtype=torch.int32)
    req_to_token[2, :kv_len] = slots
    (plan,) = plan_batch(req_to_token, torch.tensor([2]), [kv_len], [query_len])
    assert len(plan.runs) == runs
    untouched = k_pool.clone()
    found = attend(query, k_pool, v_pool, plan, 0.17, causal)
    assert found.dtype == dtype
    expected = oracle(query, k_pool[slots], v_pool[slots], 0.17, causal)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance
    assert torch.equal(k_pool, untouched)


def test_fp32_queries_on_a_bf16_pool() -> None:
    query = torch.randn(3, 4, 16)
    pool = torch.randn(40, 2, 16).to(torch.bfloat16)
    (plan,) = plan_batch(torch.arange(40, dtype=torch.int32).view(1, 40), torch.tensor([0]), [20], [3])
    found = attend(query, pool, pool, plan, 0.25, True)
    expected = oracle(query, pool[:20], pool[:20], 0.25, True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_batch_keeps_its_sequences_apart() -> None:
    req_to_token = torch.tensor([[5, 6, 9, 0], [1, 2, 3, 4]], dtype=torch.int32)
    first, second = plan_batch(req_to_token, torch.tensor([1, 0]), [4, 3], [1, 2])
    assert first.runs == ((1, 4),)
    assert second.runs == ((5, 2), (9, 1))
    assert (first.query_len, first.kv_len, second.query_len, second.kv_len) == (1, 4, 2, 3)
