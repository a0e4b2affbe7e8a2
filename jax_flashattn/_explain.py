"""explain: which kernel a call gets, with which tiles, and why not a faster one."""

import dataclasses

import jax

from jax_flashattn import _cpu, _ffi, _nn
from jax_flashattn._decode import decode
from jax_flashattn._prefill import prefill


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call runs on.

    Attributes:
      op: the operation.
      platform: "cpu" or "cuda".
      kernel: "cpu (avx512)", "sm90", "sm80", ...; None where there is no kernel.
      reason: why there is none, or why the fastest path is refused; empty otherwise.
      details: tiles, splits and the like, in words.
    """

    op: str
    platform: str
    kernel: str | None
    reason: str = ""
    details: str = ""

    def __str__(self):
        parts = [f"{self.op} on {self.platform}: {self.kernel or 'no kernel'}"]
        parts += [self.details] if self.details else []
        parts += [f"because {self.reason}"] if self.reason else []
        return "; ".join(parts)


# What an H200 is, for explanations where there is no GPU.
_H200 = {"major": 9, "minor": 0, "sm_count": 132, "shared_memory_per_block": 232448}


def explain(op, *operands, platform=None, **options) -> Explanation:
    """Says which kernel `op(*operands, **options)` runs and why.

    Args:
      op: prefill, decode or dot_product_attention, or its name.
      operands: arrays or jax.ShapeDtypeStruct, as the operation takes them.
      platform: "cpu" or "cuda"; that of the default device unless given. For "cuda" without a GPU the
        answer is that of an H200.
      options: as the operation takes them.

    Raises:
      ValueError: an unknown operation or platform; and all that the operation itself raises.
    """
    name = op if isinstance(op, str) else op.__name__
    functions = {
        "prefill": prefill, "decode": decode, "dot_product_attention": _nn.dot_product_attention,
    }  # fmt: skip
    if name not in functions:
        raise ValueError(f"explain: op is unknown, got {op!r}; allowed are {tuple(functions)}")
    if platform is None:
        platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    if platform not in ("cpu", "cuda"):
        raise ValueError(
            f"explain: platform is unknown, got {platform!r}; allowed are cpu and cuda"
        )
    if name == "dot_product_attention":
        everywhere, on_cuda = _reasons(*operands, **options)
        reason = everywhere or (platform == "cuda" and on_cuda) or ""
        if reason:
            return Explanation(name, platform, "xla (jax.nn)", reason)
        options = {"implementation": "flash"} | options
    equation = _call(functions[name], operands, options)
    if equation is None:
        return Explanation(name, platform, "xla (jax.nn)", "it was asked for")
    if platform == "cpu":
        return Explanation(name, platform, f"cpu ({_cpu.instruction_set()})")
    try:
        cuda = _ffi.cuda()
    except NotImplementedError as e:
        return Explanation(name, platform, None, str(e))
    call_options = equation.params["options"]
    names = equation.params["names"]
    avals = [v.aval for v in equation.invars]
    size = call_options.sizes(names, avals)
    kernel, reason, details = cuda.explain(
        "decode" if name == "decode" else "prefill",
        {
            "batch": size["b"], "q_len": size["t"], "kv_len": size["s"] * size.get("m", 1),
            "q_heads": size["n"], "kv_heads": size["k"], "head_dim": -(-size["h"] // 8) * 8,
            "value_dim": -(-size["v"] // 8) * 8,
        },
        {x: str(a.dtype) for x, a in zip(names, avals, strict=True)},
        {
            "layout": call_options.layout, "scale": call_options.scale,
            "softcap": call_options.softcap, "window_left": call_options.window_left,
            "window_right": call_options.window_right, "bottom_right": call_options.bottom_right,
            "num_splits": call_options.num_splits, "batch_invariant": call_options.batch_invariant,
        },
        _device_facts(),
    )  # fmt: skip
    if size["h"] % 8 or size["v"] % 8:
        details += "; the head dims are padded to multiples of 8, which copies the operands"
    return Explanation(name, platform, kernel or None, reason, details)


def _device_facts() -> dict:
    if jax.default_backend() == "cpu":
        return _H200
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "9.0")).split(".")
    return _H200 | {
        "major": int(capability[0]),
        "minor": int(capability[1]),
        "sm_count": int(getattr(device, "core_count", _H200["sm_count"])),
    }


def _reasons(query, key, value, bias=None, mask=None, **options):
    options.pop("implementation", None), options.pop("return_residual", None)
    defaults = dict.fromkeys(
        ("scale", "query_seq_lengths", "key_value_seq_lengths", "local_window_size")
    )
    return _nn.reasons_against(
        query, key, value, bias, mask, **(defaults | {"is_causal": False} | options)
    )


def _call(function, operands, options):
    """The equation of our primitive in the call's jaxpr; None if there is none."""
    arrays = {k: v for k, v in options.items() if hasattr(v, "shape") and hasattr(v, "dtype")}
    static = {k: v for k, v in options.items() if k not in arrays}
    jaxpr = jax.make_jaxpr(lambda xs, named: function(*xs, **named, **static))(operands, arrays)
    for equation in jaxpr.jaxpr.eqns:
        if equation.primitive.name in ("flash_prefill", "flash_decode"):
            return equation
    return None
