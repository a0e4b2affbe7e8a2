"""explain: which kernel a call gets, with which tiles, and why not a faster one."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashattn import _cpu, _ffi, _nn
from jax_flashattn._axes import DIFFERENTIABLE
from jax_flashattn._decode import decode
from jax_flashattn._prefill import head_dim_unit, prefill


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call runs on.

    Attributes:
      op: the operation, or "gradient of" it.
      platform: "cpu" or "cuda".
      kernel: "cpu (avx512)", "sm90", "sm80", ..., or "xla (jax.nn)"; None where there is no kernel.
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


# What GPUs are, for explanations where there is none.
H200 = {"major": 9, "minor": 0, "sm_count": 132, "shared_memory_per_block": 232448}
A100 = {"major": 8, "minor": 0, "sm_count": 108, "shared_memory_per_block": 166912}

_FUNCTIONS = {
    "prefill": prefill, "decode": decode, "dot_product_attention": _nn.dot_product_attention,
}  # fmt: skip
# Primitive -> its custom call.
_PRIMITIVES = {
    "flash_prefill": "prefill", "flash_decode": "decode",
    "flash_backward": "backward", "flash_backward_with_bias": "backward",
}  # fmt: skip


def explain(op, *operands, platform=None, gradient=False, **options) -> Explanation:
    """Says which kernel `op(*operands, **options)` runs and why.

    Args:
      op: prefill, decode or dot_product_attention, or its name.
      operands: arrays or jax.ShapeDtypeStruct, as the operation takes them.
      platform: "cpu" or "cuda"; that of the default device unless given. For "cuda" without a GPU the
        answer is that of an H200.
      gradient: explain the backward pass instead, with gradients to every operand that has one.
      options: as the operation takes them.

    Raises:
      ValueError: an unknown operation or platform; and all that the operation itself raises.
    """
    if platform is None:
        platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    if platform not in ("cpu", "cuda"):
        raise ValueError(
            f"explain: platform is unknown, got {platform!r}; allowed are cpu and cuda"
        )
    gpu = gpu_facts() if platform == "cuda" else None
    return explain_on(gpu, op, operands, options, gradient)


def explain_on(gpu: dict | None, op, operands, options, gradient=False) -> Explanation:
    """`explain` for a GPU of which these facts are known, like H200; None: for the CPU."""
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    # jax.nn's dot_product_attention has the name of ours.
    known = name in _FUNCTIONS and (op == name or inspect.unwrap(op) is _FUNCTIONS[name])
    if not known:
        raise ValueError(f"explain: op is unknown, got {op!r}; allowed are {tuple(_FUNCTIONS)}")
    platform = "cpu" if gpu is None else "cuda"
    answer = functools.partial(Explanation, f"gradient of {name}" if gradient else name, platform)
    if name == "dot_product_attention":
        everywhere, on_cuda = _reasons(*operands, **options)
        reason = everywhere or (gpu and on_cuda) or ""
        if reason:
            return answer("xla (jax.nn)", reason)
        if options.get("implementation") is None:
            options = options | {"implementation": "flash"}
    equation = _equation(_FUNCTIONS[name], operands, options, gradient)
    if equation is None:
        return answer("xla (jax.nn)", "it was asked for")
    if gpu is None:
        return answer(f"cpu ({_cpu.instruction_set()})")
    try:
        cuda = _ffi.cuda()
    except NotImplementedError as e:
        return answer(None, str(e))
    call_options = equation.params["options"]
    names = equation.params["names"]
    avals = [v.aval for v in equation.invars]
    size = call_options.sizes(names, avals)
    unit = head_dim_unit(dict(zip(names, avals, strict=True)), call_options)
    kernel, reason, details = cuda.explain(
        _PRIMITIVES[equation.primitive.name],
        {
            "batch": size["b"], "q_len": size["t"], "kv_len": size["s"] * size.get("m", 1),
            "q_heads": size["n"], "kv_heads": size["k"], "head_dim": -(-size["h"] // unit) * unit,
            "value_dim": -(-size["v"] // unit) * unit, "page_size": size["s"] if "m" in size else 0,
        },
        {x: str(a.dtype) for x, a in zip(names, avals, strict=True)},
        {x: a.shape for x, a in zip(names, avals, strict=True)},
        dataclasses.asdict(call_options),
        gpu,
    )  # fmt: skip
    if size["h"] % unit or size["v"] % unit:
        details += f"; the head dims are padded to multiples of {unit}, which copies the operands"
    return answer(kernel or None, reason, details)


def gpu_facts() -> dict:
    """Those of the default device; of an H200 where that is a CPU."""
    if jax.default_backend() == "cpu":
        return H200
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "9.0")).split(".")
    return H200 | {
        "major": int(capability[0]),
        "minor": int(capability[1]),
        "sm_count": int(getattr(device, "core_count", H200["sm_count"])),
    }


def _reasons(query, key, value, bias=None, mask=None, **options):
    options.pop("implementation", None), options.pop("return_residual", None)
    defaults = dict.fromkeys(
        ("scale", "query_seq_lengths", "key_value_seq_lengths", "local_window_size")
    )
    return _nn.reasons_against(
        query, key, value, bias, mask, **(defaults | {"is_causal": False} | options)
    )


def _equation(function, operands, options, gradient):
    """Where the call, or its gradient, binds a primitive of ours; None if it does not."""
    named = inspect.signature(function).bind(*operands, **options).arguments

    def is_array(x):  # numpy's scalars are options
        return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic)

    arrays = {n: x for n, x in named.items() if is_array(x)}
    static = {n: x for n, x in named.items() if n not in arrays}

    def call(arrays):
        return function(**arrays, **static)

    def pull_back(arrays):
        moving = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
        out, pull = jax.vjp(lambda moving: call(arrays | moving), moving)
        return pull(jax.tree.map(jnp.ones_like, out))

    jaxpr = jax.make_jaxpr(pull_back if gradient else call)(arrays)
    ours = list(_equations(jaxpr.jaxpr))
    return ours[-1] if ours else None


def _equations(jaxpr):
    """Ours; under explicit sharding they are those of one device's part, inside a shard_map."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _PRIMITIVES:
            yield equation
        elif equation.primitive.name == "shard_map":
            yield from _equations(equation.params["jaxpr"])
