"""decode: one or a few new tokens per sequence over a KV cache, contiguous or paged."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jax_flashattn import _arguments as arguments
from jax_flashattn import _ffi
from jax_flashattn._prefill import check_cuda, pad_head_dims, unpad, without_keys
from jax_flashattn._primitive import Operation, Options

CACHE_8BIT = ("float8_e4m3fn", "int8")


def decode(
    query,
    key_cache,
    value_cache,
    seq_lens,
    scale=None,
    *,
    layout="BTNH",
    value_dim=None,
    page_table=None,
    key_scale=None,
    value_scale=None,
    local_window_size=None,
    logit_softcap=None,
    sinks=None,
    num_splits=0,
    batch_invariant=False,
    return_lse=False,
    debug=False,
):
    """Attention of the newest tokens of each sequence over its KV cache.

    Split-KV decoding: Flash-Decoding (Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html);
    pages as in PagedAttention (Kwon et al. 2023, arXiv:2309.06180, section 4); values inside the keys as in
    multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    Args:
      query: (B, T, N, H) in layout BTNH, (B, N, T, H) in BNTH; the last T tokens of each sequence, usually
        one. float16 or bfloat16, on CPU also float32 and float64.
      key_cache: (B, S, K, H) or (B, K, S, H); paged: (pages, page_size, K, H) or (pages, K, page_size, H).
        Of query's dtype, or float8_e4m3fn or int8 with scales. N % K == 0.
      value_cache: likewise, with head dim V. None: the values are the first value_dim dimensions of the keys,
        which are then stored and read once (a slice of key_cache as value_cache would be copied every call).
      seq_lens: (B,) integers: valid keys of each sequence, those of the new tokens included. Clamped to
        [0, capacity] on the device. Query i of T sees keys j <= seq_len - T + i.
      scale: of the logits; 1 / sqrt(H) by default. A traced scalar is folded into the query.
      value_dim: V where value_cache is None, at most H.
      page_table: (B, max_pages) integers: which page holds tokens p * page_size ... of a sequence. Entries
        past the length are never followed; an entry outside [0, pages) counts as having no keys.
      key_scale, value_scale: float32 factors of 8-bit caches: (K,), or (pages, K) for a paged cache. Without
        value_cache, key_scale alone.
      local_window_size: w or (w, 0): query i sees keys from i - w on; only those are read.
      logit_softcap: c: logits become c * tanh(logits / c).
      sinks: (N,) logits that take part in the softmax without a value, in float32.
      num_splits: into how many parts a sequence's keys are cut; 0 chooses. For tests and tuning.
      batch_invariant: the bits of a sequence's result do not depend on the rest of the batch, on its
        position in it, or on the cache's capacity.
      return_lse: return (out, lse).
      debug: report lengths that were clamped, by jax.debug.print.

    Returns:
      out, shaped like query with value's head dim, in query's dtype; with return_lse also lse, float32
      (float64 for float64), (B, T, N) or (B, N, T). A query that sees no key has output 0 and lse -inf, or
      that of its head's sink.

    Raises:
      ValueError: a shape or an option. TypeError: a dtype. NotImplementedError: valid, but not on this
        device or build; raised when the call is lowered for the device.
    """
    op = "decode"
    names = ("query", "key_cache", "value_cache")
    arguments.check_layout(op, layout)
    q = arguments.check_array(op, "query", query)
    values_in_keys = value_cache is None
    caches = [
        arguments.check_array(op, name, x, arguments.FLOATS + CACHE_8BIT)
        for name, x in zip(
            names[1:], (key_cache, key_cache if values_in_keys else value_cache), strict=True
        )
    ]
    eight_bit = str(caches[0].dtype) in CACHE_8BIT
    if not eight_bit:
        arguments.check_same_dtype(op, names[:2], (q, caches[0]))
    arguments.check_same_dtype(op, names[1:], caches)
    if q.ndim < 4:
        arguments.fail(
            ValueError, op, "query", "has the wrong rank", q.shape, f"it must be {layout}"
        )
    batch_shape = q.shape[:-3]
    paged = page_table is not None
    if not paged:
        for name, x in zip(names[1:], caches, strict=True):
            if x.shape[:-3] != batch_shape:
                arguments.fail(ValueError, op, name, "has the wrong batch", x.shape,
                               f"the axes before {layout[1:]} must be query's, {batch_shape}")  # fmt: skip
        caches = [arguments.fold_batch(x, 3)[0] for x in caches]
    q = arguments.fold_batch(q, 3)[0]
    arguments.check_layout_shapes(op, layout, names, (q, *caches))
    _check_value_dim(op, value_dim, q.shape[-1] if values_in_keys else None)
    if paged and caches[0].shape[0] != caches[1].shape[0]:
        arguments.fail(ValueError, op, "value_cache", "has the wrong number of pages",
                       caches[1].shape[0], f"it must be key_cache's, {caches[0].shape[0]}")  # fmt: skip
    seq, head = (1, 2) if layout == "BTNH" else (2, 1)
    q, scale = arguments.apply_scale(op, scale, q)
    operands = {
        "query": q,
        "key_cache": caches[0],
        "seq_lens": arguments.check_lengths(op, "seq_lens", seq_lens, batch_shape).reshape(-1),
    }
    if not values_in_keys:
        operands["value_cache"] = caches[1]
    capacity = caches[0].shape[seq]
    if paged:
        if not hasattr(page_table, "ndim") or page_table.ndim != len(batch_shape) + 1:
            arguments.fail(ValueError, op, "page_table", "has the wrong shape",
                           getattr(page_table, "shape", page_table),
                           f"it must be (*batch, max_pages), batch {batch_shape}")  # fmt: skip
        shape = (*batch_shape, page_table.shape[-1])
        table = arguments.check_lengths(op, "page_table", page_table, shape)
        operands["page_table"] = arguments.fold_batch(table, 1)[0]
        capacity *= shape[-1]
    if debug:
        arguments.report_lengths(op, {"seq_lens": operands["seq_lens"]}, {"seq_lens": capacity})
    if values_in_keys:
        if value_scale is not None:
            arguments.fail(ValueError, op, "value_scale", "goes with a value_cache", np.shape(value_scale),
                           "without one, key_scale is that of the values too")  # fmt: skip
        value_scale = key_scale
    for name, x in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (x is not None) != eight_bit:
            arguments.fail(ValueError, op, name, "goes with 8-bit caches, and those with it",
                           "none" if x is None else np.shape(x),
                           f"the cache is {caches[0].dtype}")  # fmt: skip
        if x is not None:
            operands[name] = _check_cache_scale(op, name, jnp.asarray(x), caches[0], head, paged)
    if sinks is not None:
        operands["sinks"] = arguments.check_per_head(op, "sinks", sinks, q.shape[head])
    left, right = arguments.check_window(op, local_window_size)
    if isinstance(local_window_size, tuple | list) and right != 0:
        arguments.fail(ValueError, op, "local_window_size", "looks ahead", local_window_size,
                       "decode is causal: allowed are w and (w, 0)")  # fmt: skip
    if not isinstance(num_splits, numbers.Integral) or not 0 <= num_splits <= 1024:
        arguments.fail(ValueError, op, "num_splits", "is malformed", repr(num_splits),
                       "allowed are 0 (chosen) to 1024")  # fmt: skip

    options = Options(
        layout=layout,
        scale=scale,
        softcap=arguments.check_softcap(op, logit_softcap),
        window_left=left,
        window_right=0,
        num_splits=int(num_splits),
        batch_invariant=bool(batch_invariant),
        paged=paged,
        value_dim=int(value_dim) if values_in_keys else 0,
    )
    out, lse = decode_op(operands, options)
    out = out.reshape(*batch_shape, *out.shape[1:])
    return (out, lse.reshape(*batch_shape, *lse.shape[1:])) if return_lse else out


def _check_value_dim(op, value_dim, head_dim):
    """head_dim: of keys that hold the values; None where the values have a cache of their own."""
    if head_dim is None:
        if value_dim is not None:
            arguments.fail(ValueError, op, "value_dim", "goes with value_cache=None", repr(value_dim),
                           "value_cache has its own head dim")  # fmt: skip
    elif not isinstance(value_dim, numbers.Integral) or not 1 <= value_dim <= head_dim:
        arguments.fail(ValueError, op, "value_dim", "is malformed", repr(value_dim),
                       f"without a value_cache it must be 1 to key_cache's head dim, {head_dim}")  # fmt: skip


def _check_cache_scale(op, name, x, cache, head, paged):
    heads, pages = cache.shape[head], cache.shape[0]
    allowed = [(heads,)] + ([(pages, heads)] if paged else [])
    if x.shape not in allowed:
        arguments.fail(ValueError, op, name, "has the wrong shape", x.shape,
                       f"allowed are {allowed}")  # fmt: skip
    return x.astype(jnp.float32).reshape(-1, heads)


def _decode_results(names, arrays, options):
    dtype = arrays[names.index("query")].dtype
    return {"out": dtype, "lse": arguments.wide_dtype(dtype)}


def _emit_decode(platform, operands, results, options):
    size = options.sizes(operands, operands.values())
    pages = operands["key_cache"].shape[0] if options.paged else 1
    if 0 in (size["b"], size["t"], size["n"], size["s"], size.get("m", 1), pages):
        return without_keys(operands, results, options)
    attributes = {
        "layout": options.layout,
        "scale": options.scale,
        "softcap": options.softcap,
        "window_left": options.window_left,
        "num_splits": options.num_splits,
        "batch_invariant": options.batch_invariant,
    }
    if platform == "cpu":
        return list(_ffi.call("decode", operands, results, **attributes).values())
    check_cuda("decode", operands["query"].dtype, (size["h"], size["v"]))
    padded, results_padded = pad_head_dims(operands, results, options)
    sizes = [size[name] for name in "btnk"]
    arguments.check_known_sizes("decode", sizes)
    floats = _ffi.cuda().decode_workspace(
        *sizes, results_padded["out"].shape[-1], options.num_splits
    )
    workspace = {"workspace": jax.ShapeDtypeStruct((floats,), jnp.float32)}
    outs = _ffi.call("decode", padded, results_padded | workspace, **attributes)
    return [unpad(outs[name], like) for name, like in results.items()]


def _no_derivative(primals, tangents, **params):
    raise NotImplementedError("decode: has no derivative; use prefill to differentiate")


decode_op = Operation("decode", _decode_results, _emit_decode)
ad.primitive_jvps[decode_op.primitive] = _no_derivative
