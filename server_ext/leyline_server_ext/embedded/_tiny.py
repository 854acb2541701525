"""Random tiny models with the attention shapes that matter: MLA with YaRN (DeepSeek-V2) and GQA (Qwen2).

They answer nonsense, deterministically: seeded weights, a byte-level tokenizer without merges, a real chat template.
Tests compare caches and logits on them, not language. The smallest has a real tokenizer instead and a long context:
what an agent's turns cost in tokens does not depend on weights.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline_server_ext.embedded._templates import chat_template

if TYPE_CHECKING:
    from leyline_server_ext.embedded.models import Progress

VERSION = "2"
CONTEXT_LENGTH = 8192
CHAT_CONTEXT_LENGTH = 32_768
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    # Larger than usual: random layers must matter, or every context would predict the same token.
    "initializer_range": 0.08,
}

_CHAT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CHAT_CONTEXT_LENGTH,
    "tie_word_embeddings": True,
}


def make_mla(folder: Path, progress: "Progress") -> None:
    """Write a DeepSeek-V2 shaped model: MLA, dense MLPs, YaRN by 4 from 2048 positions with mscale 0.707."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    progress("making the tiny MLA model")
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    shape = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "head_dim": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "first_k_dense_replace": _COMMON["num_hidden_layers"],
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": rope,
    }
    _write(folder, DeepseekV2Config, DeepseekV2ForCausalLM, shape)


def make_gqa(folder: Path, progress: "Progress") -> None:
    """Write a Qwen2 shaped model: four query heads on two KV heads, plain RoPE in halves, biases on q, k and v."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    progress("making the tiny GQA model")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    _write(folder, Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2, "rope_parameters": rope})


def make_chat(folder: Path, progress: "Progress", smollm2: Path) -> None:
    """Write a two-layer Qwen2 shaped model with the tokenizer and chat template found in folder ``smollm2``."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    progress("making the tiny chat model")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.model_max_length = CHAT_CONTEXT_LENGTH
    config = Qwen2Config(
        **{**_COMMON, **_CHAT},
        vocab_size=len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    _save(folder, Qwen2ForCausalLM, config, tokenizer)


def _write(folder: Path, config_class: Any, model_class: Any, shape: dict[str, Any]) -> None:
    tokenizer = _byte_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL_TOKENS}
    config = config_class(
        **_COMMON,
        **shape,
        vocab_size=len(tokenizer),
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    _save(folder, model_class, config, tokenizer)


def _save(folder: Path, model_class: Any, config: Any, tokenizer: Any) -> None:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240607)
        model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> Any:
    """One token per byte and the ChatML markers: any text round-trips, and lengths are easy to predict."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template()
    return tokenizer
