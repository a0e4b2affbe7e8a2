"""prefill: attention over whole sequences, differentiable in forward and reverse mode."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_flashattn import _arguments as arguments
from jax_flashattn import _blockwise, _ffi
from jax_flashattn._axes import DIFFERENTIABLE
from jax_flashattn._primitive import Operation, Options


def prefill(
    query,
    key,
    value,
    causal=True,
    scale=None,
    *,
    layout="BTNH",
    bias=None,
    mask=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    logit_softcap=None,
    causal_alignment="bottom_right",
    query_segment_ids=None,
    key_value_segment_ids=None,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    deterministic=False,
    debug=False,
):
    """softmax(scale * query key^T + ...) value over whole sequences, in O(T) memory.

    Tiled attention with online softmax: FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1),
    FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.1). Differentiable with respect to query, key,
    value, bias and sinks in forward and reverse mode; residuals can be kept by
    `jax.checkpoint` policies under the names "flash_out" and "flash_lse".

    Args:
      query: (B, T, N, H) in layout BTNH, (B, N, T, H) in BNTH; float16 or bfloat16, on CPU also float32
        and float64. Further leading batch axes are folded; without a batch axis, rank 3.
      key: (B, S, K, H) or (B, K, S, H), N % K == 0: each key/value head serves N / K query heads.
      value: (B, S, K, V) or (B, K, S, V).
      causal: query i sees no key after its own position.
      scale: of the logits; 1 / sqrt(H) by default. A traced scalar is folded into the query, rounded to
        its dtype.
      bias: added to the logits; float, broadcastable to (B, N, T, S) in both layouts.
      mask: bool, True where a query may see a key; broadcastable to (B, N, T, S).
      query_seq_lengths, key_value_seq_lengths: (B,) integers, how many queries and keys of each sequence
        count; clamped to [0, T] and [0, S]. Rows beyond are 0, their lse -inf; keys beyond are not read.
      local_window_size: w or (left, right): query i sees keys i - left .. i + right, inclusive, in aligned
        positions; None means no limit.
      logit_softcap: c: logits become c * tanh(logits / c), before bias and masks.
      causal_alignment: where the diagonal of `causal` and of the window lies when lengths differ:
        "bottom_right" (the last query sees the last key) or "top_left".
      query_segment_ids, key_value_segment_ids: (B, T) and (B, S) integers, both or none; a query sees the
        keys of its own segment. Segments need not be sorted. Of wider integers the low 32 bits count.
      alibi_slopes: (N,): -slope * |distance| is added to the logits (Press et al. 2021, arXiv:2108.12409).
      sinks: (N,) logits that take part in the softmax without a value (gpt-oss). Slopes and sinks are
        rounded to float32 for any query, as are the gradients of sinks and bias.
      return_lse: return (out, lse).
      deterministic: gradients that are bitwise repeatable; outputs always are.
      debug: report lengths that were clamped, by jax.debug.print.

    Returns:
      out, shaped like query with value's head dim, in query's dtype; with return_lse also lse, the
      natural logarithm of the sum of the exponentials of a row's logits, float32 (float64 for float64),
      (B, T, N) or (B, N, T). A query that sees no key has output 0, lse -inf (inside its length, that of
      its head's sink if there is one) and passes no gradients on to query, key, value and bias.

    Raises:
      ValueError: a shape or an option. TypeError: a dtype. NotImplementedError: valid, but not on this
        device or build; raised when the call is lowered for the device.
    """
    op = "prefill"
    names = ("query", "key", "value")
    arguments.check_layout(op, layout)
    arrays = [
        arguments.check_array(op, n, x) for n, x in zip(names, (query, key, value), strict=True)
    ]
    arguments.check_same_dtype(op, names, arrays)
    batch_shape = arrays[0].shape[:-3]
    for name, x in zip(names, arrays, strict=True):
        if x.ndim < 3:
            arguments.fail(ValueError, op, name, "has the wrong rank", x.shape,
                           f"it must be {layout} or {layout[1:]}")  # fmt: skip
        if x.shape[:-3] != batch_shape:
            arguments.fail(ValueError, op, name, "has the wrong batch", x.shape,
                           f"the axes before {layout[1:]} must be query's, {batch_shape}")  # fmt: skip
    q, k, v = (arguments.fold_batch(x, 3)[0] for x in arrays)
    arguments.check_layout_shapes(op, layout, names, (q, k, v))
    q, scale = arguments.apply_scale(op, scale, q)
    seq, head = (1, 2) if layout == "BTNH" else (2, 1)
    t, s, n = q.shape[seq], k.shape[seq], q.shape[head]
    if not isinstance(causal, bool):
        arguments.fail(ValueError, op, "causal", "is not a bool", repr(causal), "True or False")
    if causal_alignment not in ("bottom_right", "top_left"):
        arguments.fail(ValueError, op, "causal_alignment", "is unknown", repr(causal_alignment),
                       "allowed are bottom_right and top_left")  # fmt: skip
    left, right = arguments.check_window(op, local_window_size)
    operands = {"query": q, "key": k, "value": v}
    lengths = {
        name: arguments.check_lengths(op, name, x, batch_shape).reshape(-1)
        for name, x in (
            ("query_seq_lengths", query_seq_lengths),
            ("key_value_seq_lengths", key_value_seq_lengths),
        )
        if x is not None
    }
    operands |= lengths
    if debug:
        arguments.report_lengths(op, lengths, {"query_seq_lengths": t, "key_value_seq_lengths": s})
    if alibi_slopes is not None:
        operands["alibi_slopes"] = arguments.check_per_head(op, "alibi_slopes", alibi_slopes, n)
    full = (*batch_shape, n, t, s)
    if bias is not None:
        bias = arguments.check_array(op, "bias", bias)
        if bias.dtype == jnp.float64 and q.dtype != jnp.float64:
            bias = bias.astype(jnp.float32)
        operands["bias"] = _broadcastable(op, "bias", bias, full)
    if mask is not None:
        mask = arguments.check_array(op, "mask", mask, ("bool",))
        operands["mask"] = _broadcastable(op, "mask", mask, full)
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        arguments.fail(ValueError, op, "segment ids", "are given for one side only",
                       "query" if key_value_segment_ids is None else "key_value",
                       "pass query_segment_ids and key_value_segment_ids, or neither")  # fmt: skip
    if query_segment_ids is not None:
        for name, x, length in (
            ("query_segment_ids", query_segment_ids, t),
            ("key_value_segment_ids", key_value_segment_ids, s),
        ):
            ids = arguments.check_integers(op, name, x, (*batch_shape, length))
            ids = jnp.asarray(ids).astype(jnp.int32)
            operands[name] = arguments.fold_batch(ids, 1)[0]
    if sinks is not None:
        operands["sinks"] = arguments.check_per_head(op, "sinks", sinks, n)

    options = Options(
        layout=layout,
        scale=scale,
        softcap=arguments.check_softcap(op, logit_softcap),
        window_left=left,
        window_right=min(right, 0) if causal else right,
        bottom_right=causal_alignment == "bottom_right",
        deterministic=bool(deterministic),
        lse=bool(return_lse),
    )
    results = [x.reshape(*batch_shape, *x.shape[1:]) for x in prefill_op(operands, options)]
    return tuple(results) if return_lse else results[0]


def _broadcastable(op, name, x, full):
    """An operand that broadcasts to (..., N, T, S), as the primitive's (B or 1, N or 1, T or 1, S or 1)."""
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) != len(full) or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
        arguments.fail(ValueError, op, name, "has the wrong shape", x.shape,
                       f"it must broadcast to (batch, query heads, T, S), {full}")  # fmt: skip
    batch = shape[:-3]
    if any(n != 1 for n in batch):  # several batch axes: all of them or none
        x = jnp.broadcast_to(x.reshape(shape), (*full[:-3], *shape[-3:]))
    count = 1
    for n in x.shape[: max(x.ndim - 3, 0)]:
        count *= n
    return x.reshape(count, *shape[-3:])


# ---- the primitive


def _prefill_results(names, arrays, options):
    dtype = arrays[names.index("query")].dtype
    return {"out": dtype} | ({"lse": arguments.wide_dtype(dtype)} if options.lse else {})


def score_attributes(options: Options) -> dict:
    return {
        "layout": options.layout,
        "scale": options.scale,
        "softcap": options.softcap,
        "window_left": options.window_left,
        "window_right": options.window_right,
        "bottom_right": options.bottom_right,
    }


def _emit_prefill(platform, operands, results, options):
    size = options.sizes(operands, operands.values())
    if 0 in (size["b"], size["t"], size["n"], size["s"]):
        return without_keys(operands, results, options)
    attributes = score_attributes(options)
    if platform == "cpu":
        return list(_ffi.call("prefill", operands, results, **attributes).values())
    check_cuda("prefill", operands["query"].dtype, (size["h"], size["v"]))
    padded, results_padded = pad_head_dims(operands, results, options)
    mask = operands["mask"].shape if "mask" in operands else None
    workspace = {"workspace": jax.ShapeDtypeStruct((_workspace_bytes(size, mask),), jnp.uint8)}
    outs = _ffi.call("prefill", padded, results_padded | workspace, **attributes)
    return [unpad(outs[name], like) for name, like in results.items()]


def _workspace_bytes(size, mask):
    sizes = size["t"], size["s"], size["n"], max(size["h"], size["v"])
    if arguments.are_known((*sizes, *(mask or ()))):
        return _ffi.cuda().prefill_workspace(*sizes, mask)
    counter = _ffi.cuda().prefill_workspace(1, 1, 1, 1, None)
    if mask is None:
        return counter
    # No less than for any sizes: at least 64 keys a block, at most 256 rows a tile, 16 bytes a row and a
    # byte a tile.
    batch, heads, rows, keys = mask
    rows = 1 if rows == 1 else rows + 256
    blocks = 1 if keys == 1 else keys // 64 + 1
    return counter + batch * heads * rows * blocks * 17


def without_keys(operands, results, options):
    """Nothing to read: zeros, and an lse of -inf or of the sinks."""
    out = jnp.zeros(results["out"].shape, results["out"].dtype)
    if "lse" not in results:
        return [out]
    lse = jnp.full(results["lse"].shape, -jnp.inf, results["lse"].dtype)
    if "sinks" in operands and lse.size:
        axis = options.axes("lse").index("n")
        heads = _blockwise.repeat(operands["sinks"], lse.shape[0])
        lse = jnp.broadcast_to(jnp.expand_dims(heads, 3 - axis), lse.shape).astype(lse.dtype)
    return [out, lse]


def check_cuda(op, dtype, head_dims):
    """Raises NotImplementedError if no CUDA kernel takes the call."""
    largest = _ffi.cuda().largest_head_dim()
    if max(head_dims) > largest:
        arguments.fail(NotImplementedError, op, "query", "has a head dim without a CUDA kernel",
                       max(head_dims), f"at most {largest}; jax.nn takes any")  # fmt: skip
    if dtype not in (jnp.float16, jnp.bfloat16):
        arguments.fail(NotImplementedError, op, "query", "has a dtype without a CUDA kernel", dtype,
                       "cast to float16 or bfloat16, or use jax.nn.dot_product_attention")  # fmt: skip


def _ends_in_head_dim(name, options):
    return options.axes(name)[-1] in "hv"


def head_dim_unit(operands, options):
    """What head dims must be multiples of on CUDA, where rows are read 16 bytes at a time."""
    return 16 // min(
        x.dtype.itemsize for name, x in operands.items() if _ends_in_head_dim(name, options)
    )


def pad_head_dims(operands, results, options):
    """Pads head dims to what CUDA needs, which copies."""
    unit = head_dim_unit(operands, options)

    def pad(name, x):
        missing = -x.shape[-1] % unit if _ends_in_head_dim(name, options) else 0
        if not missing:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + missing), x.dtype)
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),))

    return (
        {name: pad(name, x) for name, x in operands.items()},
        {name: pad(name, x) for name, x in results.items()},
    )


def unpad(x, like):
    return x if x.shape == like.shape else x[..., : like.shape[-1]]


# ---- derivatives: the tangent is a primitive that is linear in the operands' tangents; its transpose is
# the backward kernel, its own lowering a blockwise jnp rule.


def _prefill_jvp(primals, tangents, *, names, options, partition):
    operands = dict(zip(names, primals, strict=True))
    count = 2 if options.lse else 1
    options = dataclasses.replace(options, lse=True)  # the gradients need it
    out, lse = prefill_op(operands, options)
    out, lse = checkpoint_name(out, "flash_out"), checkpoint_name(lse, "flash_lse")
    given = {
        name: t for name, t in zip(names, tangents, strict=True)
        if type(t) is not ad.Zero and jnp.issubdtype(operands[name].dtype, jnp.floating)
    }  # fmt: skip
    for name in given:
        if name not in DIFFERENTIABLE:
            raise NotImplementedError(
                f"prefill: {name} has no derivative; pass ALiBi as a bias to differentiate its slopes"
            )
    if not given:
        zeros = [ad.Zero.from_primal_value(x) for x in (out, lse)]
        return [out, lse][:count], zeros[:count]
    linear = {f"tangent:{name}": t for name, t in given.items()}
    tangents = tangent_op(operands | {"out": out, "lse": lse} | linear, options)
    return [out, lse][:count], tangents[:count]


def _split_tangents(operands):
    primals = {n: x for n, x in operands.items() if not n.startswith("tangent:")}
    tangents = {
        n.removeprefix("tangent:"): x for n, x in operands.items() if n.startswith("tangent:")
    }
    return primals, tangents


def _tangent(operands, options):
    """The tangent by its definition, in jnp; out and lse are only there for the transpose."""
    batch = options.sizes(operands, operands.values())["b"]
    primals, tangents = _split_tangents(
        {name: _blockwise.repeat(x, batch) for name, x in operands.items()}
    )
    primals.pop("out"), primals.pop("lse")
    fixed = {n: x for n, x in primals.items() if n not in tangents}
    moving = {n: primals[n] for n in tangents}
    return jax.jvp(lambda m: _blockwise.attention(fixed | m, options), (moving,), (tangents,))[1]


def _tangent_transpose(cotangents, *operands, names, options, partition):
    operands = dict(zip(names, operands, strict=True))
    primals, tangents = _split_tangents(operands)
    out, (dout, dlse) = primals["out"], cotangents
    given = {"dout": jnp.zeros(out.shape, out.dtype) if type(dout) is ad.Zero else dout}
    if type(dlse) is not ad.Zero:
        given["dlse"] = dlse
    wanted = tuple(n for n, t in tangents.items() if ad.is_undefined_primal(t))
    grads = _backward(primals | given, wanted, options)
    return [
        grads[n.removeprefix("tangent:")]
        if n.startswith("tangent:") and n.removeprefix("tangent:") in grads
        else None
        for n in names
    ]


def _backward(operands, wanted, options):
    """name -> gradient, summed over the entries and axes along which an operand was repeated."""
    op = backward_with_bias_op if "bias" in wanted else backward_op
    results = op(operands, options)
    grads = dict(zip(_backward_names(operands, "bias" in wanted), results, strict=True))

    def sum_to(name):
        g, like = grads[f"d{name}"], operands[name]
        if g.shape == like.shape:
            return g.astype(like.dtype)
        g = g.astype(arguments.wide_dtype(like.dtype))
        if g.shape[0] != like.shape[0]:
            g = g.reshape(g.shape[0] // like.shape[0], like.shape[0], *g.shape[1:]).sum(0)
        broadcast = tuple(i for i in range(1, g.ndim) if g.shape[i] != like.shape[i])
        return g.sum(broadcast, keepdims=True).astype(like.dtype)

    return {name: sum_to(name) for name in wanted}


def _backward_names(names, with_bias):
    grads = ("dquery", "dkey", "dvalue")
    grads += ("dsinks",) if "sinks" in names else ()
    return grads + (("dbias",) if with_bias else ())


def _backward_results(with_bias):
    def results(names, arrays, options):
        dtype = arrays[names.index("query")].dtype
        return {
            name: jnp.float32 if name in ("dsinks", "dbias") else dtype
            for name in _backward_names(names, with_bias)
        }

    return results


def _emit_backward(platform, operands, results, options):
    size = options.sizes(operands, operands.values())
    if 0 in (size["b"], size["t"], size["n"], size["s"]):
        return [jnp.zeros(x.shape, x.dtype) for x in results.values()]
    operands = dict(operands)
    for name in ("out", "lse", "dout", "dlse"):  # the kernel takes these one an entry
        if name in operands:
            operands[name] = _blockwise.repeat(operands[name], size["b"])
    attributes = score_attributes(options) | {"deterministic": options.deterministic}
    if platform == "cpu":
        return list(_ffi.call("backward", operands, results, **attributes).values())
    check_cuda("backward", operands["query"].dtype, (size["h"], size["v"]))
    padded, results_padded = pad_head_dims(operands, results, options)
    widest = max(padded[name].shape[-1] for name in ("query", "value"))
    mask = operands["mask"].shape if "mask" in operands else None
    lengths = [size[name] for name in "btsnk"]
    arguments.check_known_sizes("gradients of prefill", (*lengths, *(mask or ())))
    floats = _ffi.cuda().backward_workspace(*lengths, widest, options.deterministic, mask)
    workspace = {"workspace": jax.ShapeDtypeStruct((floats,), jnp.float32)}
    outs = _ffi.call("backward", padded, results_padded | workspace, **attributes)
    return [unpad(outs[name], like) for name, like in results.items()]


def _backward_reference(with_bias):
    """The backward pass by its definition, in jnp: what second derivatives are taken of."""

    def backward(operands, options):
        operands = dict(operands)
        size = options.sizes(operands, operands.values())["b"]
        operands.pop("out")
        no_dlse = jnp.zeros_like(operands.pop("lse"))
        cotangents = operands.pop("dout"), operands.pop("dlse", no_dlse)
        names = ["query", "key", "value"] + (["sinks"] if "sinks" in operands else [])
        names += ["bias"] if with_bias else []
        moving = {n: _blockwise.repeat(operands[n], size) for n in names}
        if with_bias:
            full = (size, *_blockwise.score_shape(operands, options))
            moving["bias"] = jnp.broadcast_to(moving["bias"], full)
        cotangents = [_blockwise.repeat(x, size) for x in cotangents]
        fixed = {n: x for n, x in operands.items() if n not in moving}
        _, vjp = jax.vjp(lambda m: _blockwise.attention(fixed | m, options), moving)
        grads = vjp(tuple(cotangents))[0]
        return [
            g.astype(jnp.float32) if n in ("sinks", "bias") else g
            for n, g in ((n, grads[n]) for n in names)
        ]

    return backward


def _differentiate(op: Operation, function) -> None:
    """Gives an operation the jvp of a jnp function that computes the same."""

    def jvp(primals, tangents, *, names, options, partition):
        operands = dict(zip(names, primals, strict=True))
        moving = {
            n: t for n, t in zip(names, tangents, strict=True)
            if type(t) is not ad.Zero and jnp.issubdtype(operands[n].dtype, jnp.floating)
        }  # fmt: skip
        fixed = {n: x for n, x in operands.items() if n not in moving}
        at = {n: operands[n] for n in moving}
        tangent = jax.jvp(lambda m: list(function(fixed | m, options)), (at,), (moving,))[1]
        return op(operands, options), tangent

    ad.primitive_jvps[op.primitive] = jvp


prefill_op = Operation("prefill", _prefill_results, _emit_prefill)
tangent_op = Operation(
    "prefill_tangent",
    _prefill_results,
    lambda platform, operands, results, options: list(_tangent(operands, options)),
)
backward_op = Operation("backward", _backward_results(False), _emit_backward, ("dkey", "dvalue"))
backward_with_bias_op = Operation(
    "backward_with_bias", _backward_results(True), _emit_backward, ("dkey", "dvalue")
)

ad.primitive_jvps[prefill_op.primitive] = _prefill_jvp
ad.primitive_transposes[tangent_op.primitive] = _tangent_transpose
_differentiate(tangent_op, _tangent)
_differentiate(backward_op, _backward_reference(False))
_differentiate(backward_with_bias_op, _backward_reference(True))
