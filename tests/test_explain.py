"""explain: which kernel a call takes, or why a fast path was refused."""

import jax.numpy as jnp
import pytest

import jax_flashattn

OPERANDS = dict(
    prefill=dict(
        query=jnp.zeros((2, 128, 8, 64), jnp.bfloat16),
        key=jnp.zeros((2, 128, 2, 64), jnp.bfloat16),
        value=jnp.zeros((2, 128, 2, 64), jnp.bfloat16),
    ),
    decode=dict(
        query=jnp.zeros((2, 1, 8, 64), jnp.bfloat16),
        key_cache=jnp.zeros((2, 512, 2, 64), jnp.bfloat16),
        value_cache=jnp.zeros((2, 512, 2, 64), jnp.bfloat16),
        seq_lens=jnp.full((2,), 300, jnp.int32),
    ),
)
OPERANDS["dot_product_attention"] = OPERANDS["prefill"]


@pytest.mark.parametrize("op", OPERANDS)
def test_says_which_kernel(platform, op):
    text = str(jax_flashattn.explain(op, *OPERANDS[op].values()))
    assert op in text
    assert platform.name in text.lower() or "sm" in text


def test_unknown_operation(platform):
    with pytest.raises(ValueError, match="explain.*attention"):
        jax_flashattn.explain("attention", *OPERANDS["prefill"].values())


def test_bad_arguments_raise_as_the_call_does(platform):
    bad = dict(OPERANDS["prefill"], key=jnp.zeros((2, 128, 3, 64), jnp.bfloat16))
    with pytest.raises(ValueError, match="key"):
        jax_flashattn.explain("prefill", *bad.values())
