"""dot_product_attention: the signature and the semantics of jax.nn's, with the kernels of this package."""

import jax
import jax.numpy as jnp

from jax_flashattn import _ffi
from jax_flashattn._prefill import prefill

LARGEST_HEAD_DIM_CUDA = 256


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
    inputs' dtype and no gradient.

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
    arguments = dict(
        scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
    )  # fmt: skip

    def xla(query, key, value, bias, mask, name="xla"):
        residual = {"return_residual": True} if return_residual else {}
        return jax.nn.dot_product_attention(
            query, key, value, bias, mask, implementation=name, **arguments, **residual
        )

    if implementation not in (None, "flash"):
        return xla(query, key, value, bias, mask, implementation)
    everywhere, on_cuda = reasons_against(query, key, value, bias, mask, **arguments)
    if implementation == "flash":
        if everywhere:
            raise NotImplementedError(f"dot_product_attention: no flash kernel, {everywhere}")
        return _flash(query, key, value, bias, mask, arguments, return_residual)
    if everywhere:
        return xla(query, key, value, bias, mask)
    branches = {"cpu": lambda *x: _flash(*x, arguments, return_residual), "default": xla}
    if on_cuda is None:
        branches["cuda"] = branches["cpu"]
    operands = [None if x is None else jnp.asarray(x) for x in (query, key, value, bias, mask)]
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
    rank, batch = query.ndim, query.shape[:-3]
    if rank not in (3, 4) or any(x.ndim != rank or x.shape[:-3] != batch for x in arrays):
        return "the ranks or batches differ", None
    if any(x.dtype != query.dtype for x in arrays) or str(query.dtype) not in (
        "float16", "bfloat16", "float32", "float64",
    ):  # fmt: skip
        return f"the dtypes are {[str(x.dtype) for x in arrays]}", None
    t, n, h = query.shape[-3:]
    s, k = key.shape[-3:-1]
    if (
        key.shape != value.shape
        or key.shape[-1] != h
        or 0 in (t, n, h, s, k)
        or n % k
        or 0 in batch
    ):
        return "the shapes do not agree, or are empty", None
    for name, x in (("bias", bias), ("mask", mask)):
        if x is None:
            continue
        shape = (1,) * (4 - jnp.ndim(x)) + jnp.shape(x)
        if len(shape) != 4 or any(
            a not in (1, b) for a, b in zip(shape, (*(batch or (1,)), n, t, s), strict=True)
        ):
            return f"the {name} has shape {jnp.shape(x)}", None
        if (name == "mask") != (jnp.asarray(x).dtype == jnp.bool_):
            return f"the {name} has dtype {jnp.asarray(x).dtype}", None
    for x in (query_seq_lengths, key_value_seq_lengths):
        if x is not None and (jnp.shape(x) != (batch or (1,)) or jnp.asarray(x).dtype != jnp.int32):
            return "a length is not int32, one a sequence", None
    if not isinstance(is_causal, bool):
        return f"is_causal is {is_causal!r}", None
    window = _window(local_window_size)
    if window is not None and (len(window) != 2 or min(window) < 0):
        return f"the window is {local_window_size}", None
    if _ffi.cuda_problem is not None:
        return None, _ffi.cuda_problem
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return None, f"there is no CUDA kernel for {query.dtype}"
    if h > LARGEST_HEAD_DIM_CUDA:
        return None, f"the head dim {h} is above {LARGEST_HEAD_DIM_CUDA}"
    return None, None


def _window(size):
    return (size, size) if isinstance(size, int) else size


def _flash(query, key, value, bias, mask, arguments, return_residual):
    arguments = dict(arguments)
    is_causal = arguments.pop("is_causal")
    window = _window(arguments["local_window_size"])
    if query.ndim == 3:
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            if arguments[name] is not None:
                arguments[name] = arguments[name].reshape(())

    def as_prefill(x):  # without a batch axis, bias and mask have none either
        return x if x is None or query.ndim == 4 or jnp.ndim(x) < 4 else jnp.reshape(x, x.shape[1:])

    out, lse = prefill(
        query, key, value, causal=is_causal, bias=as_prefill(bias), mask=as_prefill(mask),
        causal_alignment="top_left", return_lse=True, **arguments,
    )  # fmt: skip
    may_be_empty = (
        mask is not None or window is not None or arguments["key_value_seq_lengths"] is not None
    )
    if may_be_empty:
        empty = jnp.isneginf(lse)
        if arguments["query_seq_lengths"] is not None:
            lengths = arguments["query_seq_lengths"][..., None]
            rows = jnp.arange(query.shape[-3], dtype=jnp.int32)
            rows = rows.reshape((1,) * (lengths.ndim - 1) + (-1,))
            empty = empty & (rows < lengths)[..., None]
        mean = jnp.mean(value, axis=-3, dtype=jnp.promote_types(value.dtype, jnp.float32))
        mean = jnp.repeat(mean.astype(out.dtype), query.shape[-2] // value.shape[-2], axis=-2)
        out = jnp.where(empty[..., None], mean[..., None, :, :], out)
    if not return_residual:
        return out
    # jax.nn masks with a large negative number, which is then the lse of a row that sees nothing.
    nothing = -0.7 * float(jnp.finfo(lse.dtype).max)
    lse = jnp.where(jnp.isneginf(lse), nothing, lse).astype(key.dtype)
    return out, jax.lax.stop_gradient(lse)
