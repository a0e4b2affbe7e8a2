"""Ours and everybody else: how each implementation is called on the inputs of a case.

An implementation is a function of the inputs that returns its variants, {"": call} when there is
but one. It raises Refused, or whatever the library itself raises, where it cannot do a case; the
reason becomes a gap in the table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import sys
import types

import jax
import jax.numpy as jnp
from inputs import Inputs
from timing import Call

SCORE_LIMIT = 10 << 30  # bytes of scores that XLA's attention may write to memory here
WORDS = {
    "softcap": "soft cap",
    "alibi": "ALiBi slopes",
    "page": "pages",
    "cache": "8-bit cache",
    "layout": "other layout",
    "value_dim": "other head dim of the values",
    "layers": "several layers",
}
SPLITS = (1, 2, 4, 8, 16, 32)
PACKAGES = {
    "flash": "jax_flashattn",
    "flash_sm80": "jax_flashattn",
    "flash_deterministic": "jax_flashattn",
    "fa3": "flash-attn3-jax",
    "tokamax": "tokamax",
    "tokamax_tuned": "tokamax",
    "t_flash2": "torch",
    "t_cudnn": "torch",
}


class Refused(Exception):
    """The implementation cannot do this case; the message says why."""


def variants(implementation: str, inputs: Inputs) -> dict[str, Call]:
    return IMPLEMENTATIONS[implementation](inputs)


def version(implementation: str) -> str | None:
    package = PACKAGES.get(implementation, "jax")
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _only(inputs: Inputs, *features: str):
    """Refuses what is not among the features that an implementation takes."""
    if missing := [name for name, _ in inputs.case.features if name not in features]:
        raise Refused(f"takes no {', '.join(WORDS.get(name, name) for name in missing)}")


def _jax_function(inputs: Inputs, attend):
    """`attend(query, key, value)` under jit or, for backward, its value and its gradients. What
    else it needs comes as arguments, not as constants that XLA could fold."""

    def forward(operands, extra):
        return attend(*operands, **extra)

    def step(operands, extra):
        """The output of a layer is the query of the next."""
        query, keys, values = operands
        outs = []
        for key, value in zip(keys, values, strict=True):
            query = attend(query, key, value, **extra)
            outs.append(query)
        return outs[0], outs[-1]

    def backward(operands, extra):
        *primals, cotangent = operands
        out, pull = jax.vjp(lambda *operands: attend(*operands, **extra), *primals)
        return out, pull(cotangent)

    if inputs.case.layers > 1:
        return jax.jit(step)
    return jax.jit(backward if inputs.case.benchmark == "backward" else forward)


def _jax_call(inputs: Inputs, attend, **extra) -> dict[str, Call]:
    function = _jax_function(inputs, attend)
    return {
        "": Call(
            lambda copy: function(inputs.operands(copy), extra),
            compile=lambda: function.lower(inputs.operands(0), extra).compile(),
        )
    }


# Ours ---------------------------------------------------------------------------------------------


def flash(inputs: Inputs, **options):
    import jax_flashattn

    case, arrays = inputs.case, {}
    for name, value in inputs.extra.items():
        (arrays if isinstance(value, jax.Array) else options)[name] = value
    if layout := case.feature("layout"):
        options["layout"] = layout
    if case.benchmark == "decode":
        return _jax_call(inputs, functools.partial(jax_flashattn.decode, **options), **arrays)
    prefill = functools.partial(jax_flashattn.prefill, causal=case.causal, **options)
    return _jax_call(inputs, prefill, **arrays)


def flash_sm80(inputs: Inputs):
    """Ours by the kernels for every GPU since sm_80, whatever the GPU."""
    from jax_flashattn import _ffi

    if jax.default_backend() != "gpu":
        raise Refused("needs a GPU")

    def limited(start):
        def start_and_wait(copy):
            _ffi.cuda().limit_architecture(80)
            try:
                return jax.block_until_ready(start(copy))
            finally:
                _ffi.cuda().limit_architecture(0)

        return start_and_wait

    return {
        name: dataclasses.replace(call, start=limited(call.start))
        for name, call in flash(inputs).items()
    }


def flash_deterministic(inputs: Inputs):
    if inputs.case.benchmark != "backward":
        raise Refused("is deterministic anyway")
    return flash(inputs, deterministic=True)


# jax.nn and what comes with JAX -------------------------------------------------------------------


def cudnn(inputs: Inputs):
    if jax.default_backend() != "gpu":
        raise Refused("needs a GPU")
    if inputs.case.benchmark == "prefill" and inputs.case.feature("value_dim"):
        return _cudnn_below_jax_nn(inputs)
    return _jax_nn(inputs, "cudnn")


def _cudnn_below_jax_nn(inputs: Inputs):
    """jax.nn wants values of the keys' head dim; what it calls for cuDNN does not."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    _only(inputs, "value_dim")
    mask_type = fused.MaskType.CAUSAL if inputs.case.causal else fused.MaskType.NO_MASK
    options = {"scale": inputs.case.H**-0.5, "mask_type": mask_type}
    return _jax_call(inputs, functools.partial(fused.dot_product_attention, **options))


def xla(inputs: Inputs):
    if inputs.case.score_bytes > SCORE_LIMIT:
        size = inputs.case.score_bytes / 2**30
        raise Refused(f"not tried: {size:.0f} GiB of scores")
    # XLA chooses its matrix products by timing them: when it is called, not while others compile.
    return {variant: Call(call.start) for variant, call in _jax_nn(inputs, "xla").items()}


def _jax_nn(inputs: Inputs, implementation: str):
    _only(inputs, "window", "bias", "mask", "lengths", "layers")
    case, extra = inputs.case, dict(inputs.extra)
    options = {"implementation": implementation, "is_causal": case.causal}
    if case.benchmark == "decode":
        return _jax_nn_decode(inputs, implementation)
    if "local_window_size" in extra:
        options["local_window_size"] = extra.pop("local_window_size")
    attend = functools.partial(jax.nn.dot_product_attention, **options)
    if implementation == "cudnn" and "mask" in extra:
        return _jax_call(inputs, _with_whole_mask(case, attend), **extra)
    return _jax_call(inputs, attend, **extra)


def _with_whole_mask(case, attend):
    """cuDNN takes no mask that is one row for all queries: the call spells it out."""

    def spelled_out(query, key, value, mask):
        whole = jnp.broadcast_to(mask, (case.B, 1, case.T, case.S))
        return attend(query, key, value, mask=whole)

    return spelled_out


def _jax_nn_decode(inputs: Inputs, implementation: str):
    """Lengths cost jax.nn something; where the cache is full it may do without."""
    if inputs.case.T > 1 or inputs.case.feature("window"):
        raise Refused("aligns queries with the first keys")
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    kv_lengths = inputs.extra["seq_lens"]
    lengths = {
        "key_value_seq_lengths": kv_lengths,
        "query_seq_lengths": jnp.ones_like(kv_lengths),
    }
    calls = {"lengths": _jax_call(inputs, attend, **lengths)[""]}
    if not inputs.case.feature("lengths"):
        calls["no lengths"] = _jax_call(inputs, attend)[""]
    return calls


def pallas(inputs: Inputs):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    case = inputs.case
    _only(inputs)
    if case.benchmark == "decode":
        raise Refused("has no decode")

    def attend(query, key, value, block):
        gradients = {}
        if case.benchmark == "backward":
            names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
            gradients = dict.fromkeys(names, 64)
        config = attention_mgpu.TuningConfig(
            block_q=64, block_kv=block, max_concurrent_steps=2, causal=case.causal, **gradients
        )
        # It has no scale: the query is scaled before it. That costs a pass over the query.
        return attention_mgpu.attention(query * case.H**-0.5, key, value, config)

    return {
        f"block_kv {block}": _jax_call(inputs, functools.partial(attend, block=block))[""]
        for block in ((64,) if case.H > 128 else (128, 64))
    }


# Other libraries ----------------------------------------------------------------------------------


def fa3(inputs: Inputs):
    case = inputs.case
    _only(inputs, "window", "lengths", "page", "layers")
    if case.H != 128:
        raise Refused("built for H 128 only")
    library = _flash_attn3()
    if case.benchmark == "decode":
        window = inputs.extra.get("local_window_size", (-1, -1))
        return {f"num_splits {n}": _fa3_decode(library, inputs, window, n) for n in SPLITS}
    if case.feature("lengths"):
        raise Refused("takes no lengths but packed ones")
    attend = _fa3_attention(library, case, inputs.extra.get("local_window_size", (-1, -1)))
    return _jax_call(inputs, attend)


def _fa3_decode(library, inputs: Inputs, window, splits: int) -> Call:
    def attend(query, key, value, seq_lens, **paging):
        return library.kvcache.flash_mha_with_kvcache(
            query,
            key,
            value,
            cache_seqlens=seq_lens,
            is_causal=inputs.case.T > 1,
            window_size=window,
            num_splits=splits,
            **paging,
        )

    paging = {name: x for name, x in inputs.extra.items() if name == "page_table"}
    return _jax_call(inputs, attend, seq_lens=inputs.extra["seq_lens"], **paging)[""]


def _fa3_attention(library, case, window):
    """The operation with its gradient, below the package's own sharding rules."""
    options = {
        "softmax_scale": case.H**-0.5,
        "is_causal": case.causal,
        "window_size": tuple(window),
    }

    @jax.custom_vjp
    def attend(query, key, value):
        return library.flash_hlo._flash_mha_fwd_hlo(query, key, value, **options)[0]

    def forward(query, key, value):
        out, lse = library.flash_hlo._flash_mha_fwd_hlo(query, key, value, **options)
        return out, (query, key, value, out, lse)

    def backward(residuals, cotangent):
        return _fa3_gradients(cotangent, *residuals, **options)

    attend.defvjp(forward, backward)
    return attend


def _fa3_gradients(cotangent, query, key, value, out, lse, softmax_scale, is_causal, window_size):
    """The package's custom call with more room than the package itself gives it.

    Its kernel without a mask works on 80 query rows at a time and writes two statistics for every
    row of whole blocks. The package rounds their buffers up to 128 rows: for lengths like 2048
    (26 blocks: 2080 rows) the kernel writes past their ends, and the gradients come out as NaN.
    """
    batch, length, heads, _ = query.shape
    rows = max(-(-length // block) * block for block in (80, 128))
    statistics = jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)
    gradients = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    absent = [jnp.zeros(0, jnp.int32)] * 4  # packed and used lengths
    call = jax.ffi.ffi_call("flash_mha_bwd", [*gradients, statistics, statistics])
    results = call(
        *(cotangent, query, key, value, out, lse, *absent),
        max_seqlen_q_val=length,
        max_seqlen_q_has_value=True,
        max_seqlen_k_val=key.shape[1],
        max_seqlen_k_has_value=True,
        softmax_scale_val=softmax_scale,
        softmax_scale_has_value=True,
        is_causal=is_causal,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    )
    return tuple(results[:3])


@functools.cache
def _flash_attn3():
    """flash-attn3-jax 0.2.3 imports two names that newer releases of JAX have moved."""
    import jax.core
    import jax.interpreters.xla
    from jax._src import core, dispatch

    if not hasattr(jax.core, "ShapedArray"):
        jax.core.ShapedArray = core.ShapedArray
    if not hasattr(jax.interpreters.xla, "apply_primitive"):
        jax.interpreters.xla.apply_primitive = dispatch.apply_primitive
    import flash_attn3_jax

    return types.SimpleNamespace(
        flash_hlo=importlib.import_module("flash_attn3_jax.flash_hlo"),
        kvcache=importlib.import_module("flash_attn3_jax.kvcache"),
        package=flash_attn3_jax,
    )


def tokamax(inputs: Inputs):
    attend, extra = _tokamax_attention(inputs)
    return _jax_call(inputs, attend, **extra)


def tokamax_tuned(inputs: Inputs):
    """With the configuration that tokamax's own search finds for the shape."""
    attend, extra = _tokamax_attention(inputs)
    function = _jax_function(inputs, attend)
    found = _tokamax().autotune(function, inputs.operands(0), extra, progress_bar=False)

    def start(copy):
        with found:
            return function(inputs.operands(copy), extra)

    return {"": Call(start)}


def _tokamax_attention(inputs: Inputs):
    case = inputs.case
    _only(inputs, "window", "softcap", "bias", "mask", "lengths")
    if case.benchmark == "decode":
        raise Refused("has no decode")
    extra = dict(inputs.extra)
    options = {"is_causal": case.causal, "implementation": "mosaic"}
    if "local_window_size" in extra:
        options["local_window_size"] = extra.pop("local_window_size")
    if "logit_softcap" in extra:
        options["logits_soft_cap"] = extra.pop("logit_softcap")
    return functools.partial(_tokamax().dot_product_attention, **options), extra


@functools.cache
def _tokamax():
    """tokamax imports xprof, a profiler that it does not need; an empty module will do."""
    names = ["xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool"]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
    return importlib.import_module("tokamax")


def t_flash2(inputs: Inputs):
    return _torch(inputs, "FLASH_ATTENTION")


def t_cudnn(inputs: Inputs):
    return _torch(inputs, "CUDNN_ATTENTION")


def _torch(inputs: Inputs, backend: str):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = inputs.case
    _only(inputs)
    if case.benchmark == "decode" and case.T > 1:
        raise Refused("aligns causal queries with the first keys")
    options = {
        "is_causal": case.causal and case.benchmark != "decode",
        "enable_gqa": case.K != case.N,
    }
    copies = inputs.torch_operands

    def attend(operands):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(*operands, **options)

    def forward(copy):
        with torch.no_grad():
            return attend(copies[copy % len(copies)]).transpose(1, 2)

    def backward(copy):
        *primals, cotangent = copies[copy % len(copies)]
        primals = [x.detach().requires_grad_() for x in primals]
        out = attend(primals)
        gradients = torch.autograd.grad(out, primals, cotangent)
        return out.transpose(1, 2), [x.transpose(1, 2) for x in gradients]

    def wait(result):
        torch.cuda.synchronize()
        return result

    return {"": Call(backward if case.benchmark == "backward" else forward, wait)}


IMPLEMENTATIONS = {
    "flash": flash,
    "flash_sm80": flash_sm80,
    "flash_deterministic": flash_deterministic,
    "cudnn": cudnn,
    "fa3": fa3,
    "tokamax": tokamax,
    "tokamax_tuned": tokamax_tuned,
    "pallas": pallas,
    "t_cudnn": t_cudnn,
    "t_flash2": t_flash2,
    "xla": xla,
}
