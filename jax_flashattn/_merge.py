"""merge: exact combination of attention over disjoint sets of keys."""

import jax.numpy as jnp

from jax_flashattn import _arguments as arguments


def merge(outs, lses, *, layout="BTNH"):
    """Attention over the union of key sets, from the results over each of them.

    The same algebra that joins split keys inside the kernels (Flash-Decoding; ring attention, Liu et al.
    2023, arXiv:2310.01889; chunked prefill; shared prefixes). Exact: softmax weights are rescaled, not
    recomputed. Differentiable.

    Args:
      outs: a sequence of (B, T, N, V) in layout BTNH or (B, N, T, V) in BNTH, one for each set of keys, or
        one array with the sets on its first axis.
      lses: likewise, (B, T, N) or (B, N, T): natural logarithms, -inf where a set has no visible key.

    Returns:
      (out, lse) over all keys, in the dtypes given. Rows without keys anywhere: 0 and -inf.

    Raises:
      ValueError: shapes that do not agree, or no set at all. TypeError: not floating point.
    """
    op = "merge"
    arguments.check_layout(op, layout)
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        arguments.fail(ValueError, op, "outs", "and lses differ in number or are empty",
                       (len(outs), len(lses)), "one lse for each out, at least one")  # fmt: skip
    outs = [arguments.check_array(op, "outs", x) for x in outs]
    lses = [arguments.check_array(op, "lses", x) for x in lses]
    for name, xs in (("outs", outs), ("lses", lses)):
        for x in xs[1:]:
            if x.shape != xs[0].shape:
                arguments.fail(ValueError, op, name, "has shapes that differ", x.shape,
                               f"all must be {xs[0].shape}")  # fmt: skip
    if lses[0].shape != outs[0].shape[:-1]:
        arguments.fail(ValueError, op, "lses", "has the wrong shape", lses[0].shape,
                       f"it must be {outs[0].shape[:-1]}")  # fmt: skip
    wide = arguments.wide_dtype(outs[0].dtype)
    lse = jnp.stack([x.astype(wide) for x in lses])
    top = jnp.max(lse, axis=0, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(lse - top)
    total = weights.sum(0, keepdims=True)
    empty = total == 0
    weights = weights / jnp.where(empty, 1, total)
    out = sum(
        w[..., None] * jnp.where(w[..., None] == 0, 0, o.astype(wide))
        for w, o in zip(weights, outs, strict=True)
    )
    merged = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, total)) + top)[0]
    return out.astype(outs[0].dtype), merged.astype(lses[0].dtype)
