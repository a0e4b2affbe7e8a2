"""Checks that the public operations share. Errors say operation, argument, value, and what is allowed."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashattn import _axes

UNLIMITED = 2**31 - 1

FLOATS = ("float16", "bfloat16", "float32", "float64")


def wide_dtype(dtype):
    """What sums over inputs of this dtype are kept in: float32, but float64 for itself."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def fail(error, op: str, argument: str, problem: str, got, allowed: str):
    raise error(f"{op}: {argument} {problem}, got {got}; {allowed}")


def are_known(sizes) -> bool:
    """Whether none is a symbolic one of jax.export."""
    return all(isinstance(n, int) for n in sizes)


def check_known_sizes(op: str, sizes) -> None:
    """Of calls whose workspace only the CUDA module can tell from them."""
    if not are_known(sizes):
        fail(NotImplementedError, op, "the call", "has symbolic sizes", tuple(sizes),
             "on CUDA only prefill without gradients takes them: export for each size")  # fmt: skip


def check_layout(op: str, layout) -> str:
    if layout not in _axes.LAYOUTS:
        fail(ValueError, op, "layout", "is unknown", repr(layout), f"allowed are {_axes.LAYOUTS}")
    return layout


def check_array(op: str, name: str, x, dtypes=FLOATS):
    """x as a jax.Array of one of the dtypes."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        fail(TypeError, op, name, "is not an array", type(x).__name__, "pass a jax.Array")
    if str(x.dtype) not in dtypes:
        fail(TypeError, op, name, "has an unsupported dtype", x.dtype, f"allowed are {dtypes}")
    return jnp.asarray(x)


def check_same_dtype(op: str, names, arrays) -> None:
    for name, x in zip(names[1:], arrays[1:], strict=True):
        if x.dtype != arrays[0].dtype:
            fail(TypeError, op, name, "has the wrong dtype", x.dtype,
                 f"it must be {names[0]}'s, {arrays[0].dtype}")  # fmt: skip


def check_integers(op: str, name: str, x, shape: tuple[int, ...]):
    """x, an array of integers of this shape."""
    if not hasattr(x, "shape"):
        x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        fail(TypeError, op, name, "has an unsupported dtype", x.dtype, "it must be an integer type")
    if tuple(x.shape) != shape:
        fail(ValueError, op, name, "has the wrong shape", tuple(x.shape), f"it must be {shape}")
    return x


def check_lengths(op: str, name: str, x, shape: tuple[int, ...]):
    """Lengths or page ids as int32. What an int32 cannot hold becomes the nearest: as much out of range."""
    x = check_integers(op, name, x, shape)
    kind, int32 = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if kind.max > int32.max:
        x = x.clip(max(kind.min, int32.min), int32.max)
    return jnp.asarray(x).astype(jnp.int32)


def check_per_head(op: str, name: str, x, heads: int):
    """(N,) float32 -> the primitive's (1, N)."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        fail(TypeError, op, name, "has an unsupported dtype", x.dtype, "it must be a float type")
    if x.shape != (heads,):
        fail(ValueError, op, name, "has the wrong shape", x.shape,
             f"it must be one a query head, {(heads,)}")  # fmt: skip
    return x.astype(jnp.float32)[None]


def check_window(op: str, window) -> tuple[int, int]:
    """(left, right) with UNLIMITED for None."""
    sides = (window, window) if window is None or isinstance(window, numbers.Integral) else window
    allowed = "None, an int >= 0, or a pair (left, right) of those"
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        fail(
            ValueError,
            op,
            "local_window_size",
            "is malformed",
            repr(window),
            f"allowed are {allowed}",
        )
    for side in sides:
        if side is not None and (not isinstance(side, numbers.Integral) or side < 0):
            fail(ValueError, op, "local_window_size", "is malformed", repr(window),
                 f"allowed are {allowed}")  # fmt: skip
    left, right = (UNLIMITED if side is None else min(int(side), UNLIMITED) for side in sides)
    return left, right


def check_softcap(op: str, softcap) -> float:
    if softcap is None:
        return 0.0
    if not isinstance(softcap, numbers.Real) or not 0 < softcap < float("inf"):
        fail(ValueError, op, "logit_softcap", "is not a positive number", repr(softcap),
             "allowed are None and a finite number above 0, of Python or numpy, not traced")  # fmt: skip
    return float(softcap)


def apply_scale(op: str, scale, query) -> tuple[jax.Array, float]:
    """(query, scale) with a static scale >= 0: a traced or negative one is folded into the query."""
    if scale is None:
        return query, 1.0 / float(query.shape[-1]) ** 0.5 if query.shape[-1] else 1.0
    if isinstance(scale, jax.core.Tracer):
        if scale.shape != ():
            fail(ValueError, op, "scale", "is not a scalar", scale.shape, "pass one number")
        wide = wide_dtype(query.dtype)
        return (query.astype(wide) * scale.astype(wide)).astype(query.dtype), 1.0
    number = isinstance(scale, numbers.Real) or (np.ndim(scale) == 0 and hasattr(scale, "dtype"))
    if not number or not np.isfinite(float(scale)):
        fail(ValueError, op, "scale", "is not a finite number", repr(scale), "pass one number")
    return (-query if scale < 0 else query), abs(float(scale))


def check_layout_shapes(op: str, layout: str, names, arrays) -> None:
    """Query, key and value: equal batches, head dims and lengths where the axes say so; N % K == 0."""
    q, k, v = arrays
    for name, x in zip(names, arrays, strict=True):
        if x.ndim != 4:
            fail(ValueError, op, name, "has the wrong rank", x.shape,
                 f"it must be {layout}, leading batch axes allowed")  # fmt: skip
    seq, head = (1, 2) if layout == "BTNH" else (2, 1)
    if k.shape[3] != q.shape[3]:
        fail(ValueError, op, names[1], "has the wrong head dim", k.shape[3],
             f"it must be {names[0]}'s, {q.shape[3]}")  # fmt: skip
    for axis, what in ((seq, "length"), (head, "number of heads")):
        if k.shape[axis] != v.shape[axis]:
            fail(ValueError, op, names[2], f"has the wrong {what}", v.shape[axis],
                 f"it must be {names[1]}'s, {k.shape[axis]}")  # fmt: skip
    heads, kv_heads = q.shape[head], k.shape[head]
    if kv_heads == 0 or heads % kv_heads:
        fail(ValueError, op, names[1], f"has {kv_heads} heads, which does not divide the query's",
             heads, "use query heads % key heads == 0")  # fmt: skip
    for name, x in zip(names, arrays, strict=True):
        if x.shape[3] == 0:
            fail(ValueError, op, name, "has no head dim", x.shape, "it must be at least 1")


def fold_batch(x, rank: int):
    """Folds the axes in front of the last `rank` into one; the shape they had."""
    lead = x.shape[: x.ndim - rank]
    if len(lead) == 1:
        return x, lead
    count = 1
    for n in lead:
        count *= n
    return x.reshape(count, *x.shape[x.ndim - rank :]), lead


def report_lengths(op: str, lengths: dict, capacities: dict) -> None:
    """debug=True: prints every length on the device that lies outside [0, capacity] (and is clamped)."""
    for name, x in lengths.items():
        capacity = capacities[name]
        jax.lax.cond(
            jnp.any((x < 0) | (x > capacity)),
            lambda x, name=name, capacity=capacity: jax.debug.print(
                f"{op}: {name} outside [0, {capacity}] is clamped, got {{x}}", x=x
            ),
            lambda x: None,
            x,
        )
