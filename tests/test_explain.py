"""explain: which kernel a call takes, or why a fast path was refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flashattn
from jax_flashattn import _explain, _ffi

needs_cuda_kernels = pytest.mark.skipif(
    _ffi.cuda_problem is not None, reason="this build has no CUDA kernels"
)

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


def test_says_which_kernel_takes_values_in_keys(platform):
    operands = OPERANDS["decode"] | dict(value_cache=None)
    assert jax_flashattn.explain("decode", **operands, value_dim=32).kernel


@pytest.mark.parametrize("op", ["prefill", "dot_product_attention"])
def test_says_which_kernel_the_gradient_runs(platform, op):
    text = str(jax_flashattn.explain(op, *OPERANDS[op].values(), gradient=True))
    assert f"gradient of {op}" in text
    assert platform.name in text.lower() or "sm" in text


@pytest.mark.parametrize("gradient", [False, True])
def test_implementation_of_none_is_the_default(platform, gradient):
    def explain(**options):
        operands = OPERANDS["dot_product_attention"].values()
        return jax_flashattn.explain(
            "dot_product_attention", *operands, gradient=gradient, **options
        )

    assert explain(implementation=None) == explain()


@pytest.mark.parametrize("op", ["prefill", "dot_product_attention"])
def test_shapes_are_enough(platform, op):
    """jax.ShapeDtypeStruct in the place of every array, a scale too."""
    operands = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in OPERANDS[op].items()
    } | {
        "bias": jax.ShapeDtypeStruct((8, 1, 1), jnp.bfloat16),
        "mask": jax.ShapeDtypeStruct((128,), jnp.bool_),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        "scale": jax.ShapeDtypeStruct((), jnp.float32),
    }
    assert "xla" not in jax_flashattn.explain(op, **operands).kernel


def test_decode_has_no_gradient(platform):
    with pytest.raises(NotImplementedError, match="decode: has no derivative"):
        jax_flashattn.explain("decode", *OPERANDS["decode"].values(), gradient=True)


def gradient_on(gpu, operands=OPERANDS["prefill"], **options):
    return _explain.explain_on(gpu, "prefill", (), operands | options, gradient=True)


@needs_cuda_kernels
@pytest.mark.parametrize(
    "shape,dtype,reason",
    [
        ((2, 8, 128, 128), jnp.bfloat16, ""),
        ((1, 1, 1, 128), jnp.bfloat16, ""),
        ((2, 1, 1, 128), jnp.bfloat16, ""),
        ((2, 8, 128, 1), jnp.bfloat16, "the same for all keys"),
        ((2, 8, 128, 128), jnp.float32, "another dtype"),
    ],
)
def test_bias_on_hopper(shape, dtype, reason):
    operands = OPERANDS["prefill"] | dict(bias=jnp.zeros(shape, dtype))
    answer = _explain.explain_on(_explain.H200, "prefill", (), operands)
    assert answer.kernel == ("sm80" if reason else "sm90")
    assert reason in answer.reason


@needs_cuda_kernels
@pytest.mark.parametrize("bias_rows,kernel", [(128, "sm80"), (1, "sm90")])
def test_unaligned_bias_on_hopper(bias_rows, kernel):
    """127 keys are not a multiple of 16 bytes; a single row has no distance to the next."""
    operands = {n: x[:, :127] if n != "query" else x for n, x in OPERANDS["prefill"].items()}
    operands["bias"] = jnp.zeros((1, 1, bias_rows, 127), jnp.bfloat16)
    answer = _explain.explain_on(_explain.H200, "prefill", (), operands)
    assert answer.kernel == kernel
    assert ("multiple of 16 bytes apart" in answer.reason) == (kernel == "sm80")


@needs_cuda_kernels
def test_gradient_on_hopper():
    """The Hopper kernels, one or two by head dim and features; the generic one with a reason."""
    together, apart = "dK, dV and dQ in one kernel", "dQ in another"
    wide = {n: jnp.zeros((*x.shape[:3], 256), x.dtype) for n, x in OPERANDS["prefill"].items()}
    for answer, kernels in (
        (gradient_on(_explain.H200), together),
        (gradient_on(_explain.H200, logit_softcap=9.0), together),
        (gradient_on(_explain.H200, deterministic=True), "in a fixed order"),
        (gradient_on(_explain.H200, deterministic=True, logit_softcap=9.0), apart),
        (gradient_on(_explain.H200, wide), apart),
    ):
        assert answer.kernel == "sm90" and kernels in answer.details and not answer.reason
    for features in (dict(local_window_size=(9, 0)), dict(sinks=jnp.zeros(8))):
        assert gradient_on(_explain.H200, **features).kernel == "sm90"
    biased = gradient_on(_explain.H200, bias=jnp.zeros((8, 1, 1), jnp.bfloat16))
    assert biased.kernel == "sm80" and "bias" in biased.reason


@needs_cuda_kernels
def test_gradient_elsewhere():
    answer = gradient_on(_explain.A100)
    assert answer.kernel == "sm80" and not answer.reason


@needs_cuda_kernels
@pytest.mark.parametrize(
    "head_dim,blocks", [(264, "2 blocks"), (512, "2 blocks"), (576, "3 blocks")]
)
def test_wide_head_dims(head_dim, blocks):
    """Above 256 the generic kernel takes columns in pieces, and values by groups of 256."""
    shape = (2, 128, 4, head_dim)
    operands = {n: jnp.zeros(shape, jnp.bfloat16) for n in ("query", "key", "value")}
    forward = _explain.explain_on(_explain.H200, "prefill", (), operands)
    assert forward.kernel == "sm80" and "above 256" in forward.reason
    assert "pieces of 64 columns" in forward.details and blocks in forward.details
    gradient = gradient_on(_explain.H200, operands)
    assert gradient.kernel == "sm80" and "pieces" in gradient.details


@needs_cuda_kernels
@pytest.mark.parametrize(
    "dims,tile",
    [
        ((192, 128), "head dim 192 with values of 128,"),
        ((136, 8), "head dim 192 with values of 128,"),
        ((192, 136), "head dim 192,"),
        ((64, 72), "head dim 96,"),
        ((128, 64), "head dim 128,"),
    ],
)
def test_value_dims_on_hopper(dims, tile):
    """The tile of the wider dim, or one for both."""
    keys, values = (jnp.zeros((2, 128, 4, dim), jnp.bfloat16) for dim in dims)
    operands = {"query": keys, "key": keys, "value": values}
    forward = _explain.explain_on(_explain.H200, "prefill", (), operands)
    assert forward.kernel == "sm90" and tile in forward.details
    assert gradient_on(_explain.H200, operands).kernel == "sm90"


def test_unknown_operation(platform):
    partial = functools.partial(jax_flashattn.prefill, causal=False)
    for op in ("attention", jax_flashattn.merge, jax.nn.dot_product_attention, partial):
        with pytest.raises(ValueError, match="explain: op is unknown, got .*; "):
            jax_flashattn.explain(op, *OPERANDS["prefill"].values())
    assert jax_flashattn.explain(jax.jit(jax_flashattn.prefill), *OPERANDS["prefill"].values())


def test_bad_arguments_raise_as_the_call_does(platform):
    bad = dict(OPERANDS["prefill"], key=jnp.zeros((2, 128, 3, 64), jnp.bfloat16))
    with pytest.raises(ValueError, match="key"):
        jax_flashattn.explain("prefill", *bad.values())


@pytest.mark.parametrize(
    "op,options",
    [
        ("prefill", dict(logit_softcap=np.float32(30), local_window_size=np.int64(3))),
        ("prefill", dict(return_lse=np.bool_(True))),
        ("decode", dict(num_splits=np.int64(2))),
    ],
    ids=str,
)
def test_numpy_scalars_are_options(platform, op, options):
    assert jax_flashattn.explain(op, *OPERANDS[op].values(), **options).kernel
