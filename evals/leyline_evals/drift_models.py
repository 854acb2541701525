"""The first token of tiny random models after their cached keys were moved, by a chain of rotations or at once.

A span in the middle of a random prompt is evicted from the model's own cache (transformers), the keys after it are
moved to close the gap, and a question is appended. The chain takes ``n`` rotations, back and forth, that sum up to the
same gap. The yardstick is the float64 rotation of the same stored keys, kept in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leyline_server_ext.kernels import KVLayout, RopeSpec, reference, rotate_in_place

# Keys and values of each layer, (heads, n, width).
Cache = list[tuple[Tensor, Tensor]]
PROMPTS = 12
VOCABULARY = 320
HEAD, SPAN, TAIL, QUESTION = 24, 40, 64, 8


@dataclass(frozen=True)
class FirstToken:
    """How many prompts get the same first token as by exact rotation, and the mean relative L2 of the logits."""

    model: str
    storage: str
    rotations: int
    chained: bool
    agreeing: int
    prompts: int
    logit_relative_l2: float


@dataclass(frozen=True)
class TinyModel:
    """A random model; the rotary columns of its cached keys ``(1, heads, n, width)`` begin at ``rot_start``."""

    name: str
    network: Any
    rope: RopeSpec
    rot_start: int


def tiny_models() -> list[TinyModel]:
    """DeepSeek-V2 (interleaved pairs, last columns) and Qwen2 (halves, whole head), seeded."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    qwen = Qwen2ForCausalLM(Qwen2Config(**shared, num_key_value_heads=2)).eval()
    mla = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 3}
    config = DeepseekV2Config(**shared, **mla, **moe, num_key_value_heads=4, n_group=1, topk_group=1)
    deepseek = DeepseekV2ForCausalLM(config).eval()
    return [
        TinyModel("mla", deepseek, RopeSpec(deepseek.model.rotary_emb.inv_freq.float(), 32, True), 32),
        TinyModel("gqa", qwen, RopeSpec(qwen.model.rotary_emb.inv_freq.float(), 32, False), 0),
    ]


def first_tokens(chains: Sequence[int], storage: Mapping[str, torch.dtype]) -> list[FirstToken]:
    """Every tiny model, storage dtype and chain length, chained and once."""
    rows = []
    for model in tiny_models():
        generator = torch.Generator().manual_seed(3)
        prompts = torch.randint(VOCABULARY, (PROMPTS, HEAD + SPAN + TAIL + QUESTION), generator=generator)
        caches = [_cached(model, prompt[:-QUESTION]) for prompt in prompts]
        tails = [torch.cat([_rotary(model, cache[i][0]) for cache in caches]) for i in range(len(caches[0]))]
        for name, dtype in storage.items():
            stored = [tail.to(dtype) for tail in tails]
            shift = torch.full((PROMPTS * TAIL,), -SPAN)
            exact = _answers(model, prompts, caches, [reference.rotate(t, shift, model.rope) for t in stored])
            for steps, chained in [(_steps(n), True) for n in chains] + [([-SPAN], False)]:
                got = _answers(model, prompts, caches, _chain(model, stored, steps))
                same = int((got.argmax(-1) == exact.argmax(-1)).sum())
                error = float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
                rows.append(FirstToken(model.name, name, len(steps), chained, same, PROMPTS, error))
    return rows


def _steps(n: int) -> list[int]:
    """``n`` shifts that sum up to -SPAN: the way there, and 37 back and forth as often as needed."""
    back_and_forth = [37, -37] * ((n - 1) // 2)
    rest = n - len(back_and_forth)
    return back_and_forth + ([-SPAN] if rest == 1 else [-SPAN - 37, 37])


@torch.no_grad()
def _cached(model: TinyModel, tokens: Tensor) -> Cache:
    """What the model caches for the prompt without its question."""
    from transformers import DynamicCache

    cache = DynamicCache()
    model.network(tokens[None], past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def _rotary(model: TinyModel, key: Tensor) -> Tensor:
    """The rotary columns of the tail, ``(TAIL, heads, rotary_dim)``."""
    width = model.rope.rotary_dim
    return key[:, HEAD + SPAN :, model.rot_start : model.rot_start + width].transpose(0, 1).contiguous()


def _chain(model: TinyModel, tails: list[Tensor], steps: Sequence[int]) -> list[Tensor]:
    """The tails of all prompts, per layer, turned step by step and stored in between."""
    turned = [tail.clone() for tail in tails]
    layout = KVLayout.mha(turned, [torch.zeros_like(tail) for tail in turned], [model.rope] * len(turned))
    rows = torch.arange(PROMPTS * TAIL)
    for step in steps:
        rotate_in_place(layout, rows, step)
    return turned


def _answers(model: TinyModel, prompts: Tensor, caches: list[Cache], turned: list[Tensor]) -> Tensor:
    """``(PROMPTS, vocabulary)`` float64 logits with ``turned`` (per layer, all prompts) as rotary columns."""
    split = [layer.float().split(TAIL) for layer in turned]
    return torch.stack(
        [
            _answer(model, prompt, cache, [layer[index] for layer in split])
            for index, (prompt, cache) in enumerate(zip(prompts, caches, strict=True))
        ]
    )


@torch.no_grad()
def _answer(model: TinyModel, tokens: Tensor, cache: Cache, turned: list[Tensor]) -> Tensor:
    """Logits after the question, over the cache without its span and with ``turned`` as the tail's rotary columns."""
    from transformers import DynamicCache

    edited = DynamicCache()
    keep = torch.cat([torch.arange(HEAD), torch.arange(HEAD + SPAN, HEAD + SPAN + TAIL)])
    for index, ((key, value), columns) in enumerate(zip(cache, turned, strict=True)):
        kept = key[:, keep].clone()
        kept[:, HEAD:, model.rot_start : model.rot_start + model.rope.rotary_dim] = columns.transpose(0, 1)
        edited.update(kept[None], value[:, keep][None], index)
    positions = torch.arange(HEAD + TAIL, HEAD + TAIL + QUESTION)
    out = model.network(tokens[None, -QUESTION:], past_key_values=edited, position_ids=positions[None])
    return out.logits[0, -1].double()
