"""dot_product_attention: the signature and the semantics of jax.nn's, with the kernels of this package."""

import functools
import inspect
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashattn import _arguments, _ffi
from jax_flashattn._prefill import prefill

_JAX_HAS_RESIDUAL = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters

# The logit that jax.nn gives to masked keys, and so the lse of a row that sees nothing.
_MASKED = -0.7 * float(np.finfo(np.float32).max)


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
):
    """A drop-in for `jax.nn.dot_product_attention`: same arguments, defaults, semantics and errors.

    Where jax.nn differs from `prefill`, jax.nn's way holds here: causal masks and windows are aligned to
    the top left; a query that nothing is visible to gets the mean of the values; the residual has the
    inputs' dtype and no gradient. Two differences are left. NaN in a key or value that no query sees has
    no effect. And a query whose visible logits a bias puts at -inf, or below the finite -2.4e38 that
    jax.nn masks with, gets NaN or the values of masked keys from jax.nn; here never (at -inf: 0 or the
    mean).

    Args:
      query: (B, T, N, H) or (T, N, H); key, value: (B, S, K, H) or (S, K, H).
      bias, mask: broadcastable to (B, N, T, S).
      implementation: "flash" demands this package's kernels (NotImplementedError names what is in the
        way), "xla" and "cudnn" are jax.nn's own, None takes the kernels where they can do the call and
        XLA elsewhere; `explain` says which and why.
      The others as in jax.nn.

    Returns:
      (B, T, N, H), with return_residual also the lse (B, T, N).
    """
    options = dict(
        scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
    )  # fmt: skip

    residual = {"return_residual": True} if return_residual else {}

    def jax_nn(query, key, value, bias, mask, implementation="xla", **residual):
        with jax.numpy_dtype_promotion("standard"):  # jax.nn's code needs it on some platforms
            return jax.nn.dot_product_attention(
                query, key, value, bias, mask, implementation=implementation, **options, **residual
            )

    def xla(query, key, value, bias, mask, **residual):
        if mask is None and local_window_size is not None:
            mask = jnp.ones((1, 1, 1, 1), bool)  # jax 0.8.0 forgets a window that is the only mask
        return jax_nn(query, key, value, bias, mask, **residual)

    if implementation not in (None, "flash"):
        return jax_nn(query, key, value, bias, mask, implementation, **residual)
    operands = [jnp.asarray(x) for x in (query, key, value)]
    operands += [None if x is None else jnp.asarray(x) for x in (bias, mask)]
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if options[name] is not None:
            options[name] = jnp.asarray(options[name])
    everywhere, on_cuda = reasons_against(*operands, **options)
    without_jax_nn = implementation == "flash" or (return_residual and not _JAX_HAS_RESIDUAL)
    if everywhere and without_jax_nn:
        jax.eval_shape(xla, *operands)  # a call that jax.nn refuses raises jax.nn's error
        raise NotImplementedError(f"dot_product_attention: no flash kernel, {everywhere}")
    if everywhere:
        return xla(*operands, **residual)

    def flash(*operands):
        return _flash(*operands, **options, return_residual=return_residual)

    if without_jax_nn:
        return flash(*operands)
    branches = {"cpu": flash, "default": functools.partial(xla, **residual)} | (
        {} if on_cuda else {"cuda": flash}
    )
    return jax.lax.platform_dependent(*operands, **branches)


def reasons_against(
    query, key, value, bias, mask, *, scale, is_causal, query_seq_lengths, key_value_seq_lengths,
    local_window_size,
):  # fmt: skip
    """(why no kernel of ours does the call, why none on CUDA); None where one does.

    A call that jax.nn refuses is among the former, so that jax.nn raises its own error.
    """
    arrays = (query, key, value)
    if any(not hasattr(x, "shape") for x in arrays):
        return "query, key or value is not an array", None
    rank, batch = len(query.shape), query.shape[:-3]
    if rank not in (3, 4) or any(len(x.shape) != rank or x.shape[:-3] != batch for x in arrays):
        return "the ranks or batches differ", None
    if any(x.dtype != query.dtype for x in arrays) or str(query.dtype) not in _arguments.FLOATS:
        return f"the dtypes are {[str(x.dtype) for x in arrays]}", None
    t, n, h = query.shape[-3:]
    s, k = key.shape[-3:-1]
    if key.shape != value.shape or key.shape[-1] != h or 0 in (*batch, t, n, h, s, k) or n % k:
        return "the shapes do not agree, or are empty", None
    batch = batch or (1,)
    for name, x, dtypes in (("bias", bias, _arguments.FLOATS), ("mask", mask, ("bool",))):
        if x is None:
            continue
        x = _abstract(x)
        shape = (1,) * (4 - len(x.shape)) + x.shape
        if len(shape) != 4 or any(
            a not in (1, b) for a, b in zip(shape, (*batch, n, t, s), strict=True)
        ):
            return f"the {name} has shape {x.shape}", None
        if str(x.dtype) not in dtypes:
            return f"the {name} has dtype {x.dtype}", None
    for x in (query_seq_lengths, key_value_seq_lengths):
        if x is not None and (_abstract(x).shape != batch or _abstract(x).dtype != jnp.int32):
            return "a length is not int32, one a sequence", None
    if not _is_scale(scale):
        return f"the scale is {scale!r}", None
    if not isinstance(is_causal, numbers.Integral | np.bool_):
        return f"is_causal is {is_causal!r}", None
    if not _is_window(local_window_size):
        return f"the window is {local_window_size!r}", None
    if _ffi.cuda_problem is not None:
        return None, _ffi.cuda_problem
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return None, f"there is no CUDA kernel for {query.dtype}"
    largest = _ffi.cuda().largest_head_dim()
    if h > largest:
        return None, f"the head dim {h} is above {largest}"
    return None, None


def _abstract(x):
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def _is_scale(scale) -> bool:
    """Whether it is one number; jax.nn broadcasts more than that."""
    if hasattr(scale, "dtype"):
        real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
        if not real or scale.shape != ():
            return False
        abstract = isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct)
        return abstract or bool(np.isfinite(float(scale)))
    return scale is None or (isinstance(scale, numbers.Real) and bool(np.isfinite(float(scale))))


def _is_window(size) -> bool:
    """Whether it is none, or two static sides in the range of the kernels; jax.nn takes negative ones too."""
    if size is None:
        return True
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        return False
    return all(isinstance(x, numbers.Integral) and 0 <= x <= _arguments.UNLIMITED for x in sides)


def _flash(
    query, key, value, bias, mask, *, scale, is_causal, query_seq_lengths, key_value_seq_lengths,
    local_window_size, return_residual,
):  # fmt: skip
    if query.ndim == 3:  # without a batch axis, bias, mask and lengths have none either
        bias, mask = (x if x is None or x.ndim < 4 else x[0] for x in (bias, mask))
        query_seq_lengths, key_value_seq_lengths = (
            x if x is None else x[0] for x in (query_seq_lengths, key_value_seq_lengths)
        )
    out, lse = prefill(
        query, key, value, causal=bool(is_causal), scale=scale, bias=bias, mask=mask,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size, causal_alignment="top_left", return_lse=True,
    )  # fmt: skip
    t, s = query.shape[-3], key.shape[-3]
    left = None if local_window_size is None else np.broadcast_to(local_window_size, 2)[0]
    if (
        mask is not None
        or key_value_seq_lengths is not None
        or (left is not None and t > s + int(left))
    ):
        empty = _is_minus_infinity(lse)
        if query_seq_lengths is not None:
            rows = jnp.arange(t, dtype=jnp.int32).reshape((1,) * query_seq_lengths.ndim + (t,))
            inside = rows < query_seq_lengths[..., None]
            empty = empty & inside[..., None]
        out = jnp.where(empty[..., None], _mean(value, query.shape[-2]), out)
    if not return_residual:
        return out
    lse = jnp.where(_is_minus_infinity(lse), _MASKED, lse).astype(key.dtype)
    return out, jax.lax.stop_gradient(lse)


def _is_minus_infinity(x):
    """jnp.isneginf without a constant that is one, which jax.debug_infs would report."""
    return x < float(jnp.finfo(x.dtype).min)


def _mean(value, heads):
    """The mean over the keys, for every query head: (..., S, K, V) -> (..., 1, N, V)."""
    wide = _arguments.wide_dtype(value.dtype)
    mean = jnp.mean(value, axis=-3, keepdims=True, dtype=wide).astype(value.dtype)
    shape = (*mean.shape[:-1], heads // value.shape[-2], mean.shape[-1])
    return jnp.broadcast_to(mean[..., None, :], shape).reshape(*mean.shape[:-2], heads, -1)
