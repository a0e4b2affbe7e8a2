"""The attention of well-known models, with their real settings and a small batch."""

import pytest
from calls import check_decode, check_gradients, check_prefill
from cases import Case, DecodeCase

# Heads, dims, windows and caps as in the models' published configurations; lengths are short.
PREFILL = {
    "gpt2": Case(batch=2, q_len=150, q_heads=12, kv_heads=12, head_dim=64),
    "llama3-8b": Case(batch=1, q_len=130, q_heads=32, kv_heads=8, head_dim=128),
    "qwen2.5-0.5b": Case(batch=2, q_len=100, q_heads=14, kv_heads=2, head_dim=64),
    "mistral-7b": Case(batch=1, q_len=200, q_heads=32, kv_heads=8, head_dim=128, window=(96, 0)),
    "gemma2-9b-local": Case(
        batch=1,
        q_len=140,
        q_heads=16,
        kv_heads=8,
        head_dim=256,
        scale=256**-0.5,
        softcap=50.0,
        window=(64, 0),
    ),
    "gemma2-9b-global": Case(
        batch=1, q_len=140, q_heads=16, kv_heads=8, head_dim=256, scale=256**-0.5, softcap=50.0
    ),
    "gemma3-1b-local": Case(
        batch=2, q_len=140, q_heads=4, kv_heads=1, head_dim=256, window=(64, 0)
    ),
    "gemma3-27b-global": Case(
        batch=1, q_len=100, q_heads=32, kv_heads=16, head_dim=128, scale=168**-0.5
    ),
    "gpt-oss-20b-local": Case(
        batch=1, q_len=200, q_heads=64, kv_heads=8, head_dim=64, window=(127, 0), sinks=True
    ),
    "gpt-oss-20b-full": Case(batch=1, q_len=130, q_heads=64, kv_heads=8, head_dim=64, sinks=True),
    "deepseek-v3": Case(batch=1, q_len=100, q_heads=16, kv_heads=16, head_dim=192, value_dim=128),
    "deepseek-v3-latent": Case(
        batch=1,
        q_len=100,
        q_heads=16,
        kv_heads=1,
        head_dim=576,
        value_dim=512,
        scale=192**-0.5,
    ),
    "global-layer-h512": Case(batch=1, q_len=140, q_heads=8, kv_heads=2, head_dim=512, scale=1.0),
    "vit-h14": Case(batch=1, q_len=257, q_heads=16, kv_heads=16, head_dim=80, causal=False),
    "whisper-large-cross": Case(
        batch=2, q_len=48, kv_len=300, q_heads=20, kv_heads=20, head_dim=64, causal=False
    ),
    "bert-base-padded": Case(
        batch=3, q_len=128, q_heads=12, kv_heads=12, head_dim=64, causal=False, mask="B__S"
    ),
    "esm2-padded-lengths": Case(
        batch=3,
        q_len=130,
        q_heads=20,
        kv_heads=20,
        head_dim=64,
        causal=False,
        kv_lengths=(130, 77, 3),
        q_lengths=(130, 77, 3),
    ),
    "bloom-560m": Case(batch=1, q_len=120, q_heads=16, kv_heads=16, head_dim=64, alibi=True),
    "falcon-7b": Case(batch=1, q_len=80, q_heads=71, kv_heads=1, head_dim=64),
    "t5-relative-bias": Case(
        batch=2,
        q_len=100,
        q_heads=8,
        kv_heads=8,
        head_dim=64,
        causal=False,
        scale=1.0,
        bias="_NTS",
    ),
}

DECODE = {
    "gpt2": DecodeCase(q_heads=12, kv_heads=12, head_dim=64),
    "llama3-8b": DecodeCase(q_heads=32, kv_heads=8, head_dim=128),
    "llama3-70b-per-gpu": DecodeCase(q_heads=8, kv_heads=1, head_dim=128, page_size=64),
    "qwen2.5-0.5b": DecodeCase(q_heads=14, kv_heads=2, head_dim=64, page_size=16),
    "mistral-7b": DecodeCase(q_heads=32, kv_heads=8, head_dim=128, window=64),
    "gemma2-9b": DecodeCase(
        q_heads=16, kv_heads=8, head_dim=256, softcap=50.0, window=64, scale=256**-0.5
    ),
    "gpt-oss-20b": DecodeCase(q_heads=64, kv_heads=8, head_dim=64, sinks=True, window=127),
    "deepseek-v3-mla": DecodeCase(
        q_heads=128, kv_heads=1, head_dim=576, value_dim=512, scale=192**-0.5, page_size=64
    ),
    "speculative": DecodeCase(q_heads=32, kv_heads=8, head_dim=128, tokens=5),
}


@pytest.mark.parametrize("model", PREFILL)
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_prefill(platform, model, dtype):
    check_prefill(platform, PREFILL[model].replace(dtype=dtype))


@pytest.mark.parametrize("model", PREFILL)
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_training(platform, model, dtype):
    check_gradients(platform, PREFILL[model].replace(dtype=dtype), lse=False)


@pytest.mark.parametrize("model", DECODE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode(platform, model, dtype):
    check_decode(platform, DECODE[model].replace(dtype=dtype))
