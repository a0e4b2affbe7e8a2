"""vmap, scan, jit, eval_shape, donation, export: the primitives under JAX's transformations."""

import functools
import itertools
import logging

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import truth
import xla
from calls import decode as decode_case_call
from calls import gradients, prefill, xla_decode, xla_prefill
from cases import Case, DecodeCase, make_cotangents, make_inputs
from check import check, check_gradient, check_lse, check_same
from jax.experimental.compilation_cache import compilation_cache

import jax_flashattn
from jax_flashattn import _ffi, _reference

SMALL = Case(batch=2, q_len=19, kv_len=23, q_heads=4, kv_heads=2, head_dim=16)
FULL = SMALL.replace(
    q_lengths=(11, 19),
    kv_lengths=(23, 9),
    bias="BNTS",
    mask="__TS",
    segments=3,
    sinks=True,
    alibi=True,
)
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(("query", "key", "value"), n)]


def stacked(case, names, size):
    """Inputs of `size` calls that differ in `names`, and the same with those stacked."""
    first = make_inputs(case, poison=False)
    calls = [first]
    for i in range(1, size):
        fresh = make_inputs(case, seed=i, poison=False)
        for name in ("query_seq_lengths", "key_value_seq_lengths", "alibi_slopes"):
            if name in fresh:  # these do not depend on the seed
                fresh[name] = np.roll(fresh[name], i)
        calls.append({n: fresh[n] if n in names else x for n, x in first.items()})
    joined = {n: np.stack([c[n] for c in calls]) if n in names else x for n, x in first.items()}
    return calls, joined


def check_mapped(case, calls, outs, lses):
    """Entry i of a vmapped call is call i."""
    for i, arrays in enumerate(calls):
        true_out, true_lse = truth.attention(**arrays, **case.options())
        check(outs[i], true_out, xla_prefill(case, arrays), f"out[{i}]")
        check_lse(lses[i], true_lse, f"lse[{i}]")


def mapped_prefill(case, in_axes, out_axes=0):
    call = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())
    names = list(in_axes)
    mapped = jax.vmap(
        lambda *xs: call(**dict(zip(names, xs, strict=True))),
        in_axes=tuple(in_axes.values()),
        out_axes=out_axes,
    )
    return lambda arrays: mapped(*(arrays[n] for n in names))


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_vmap_of_every_subset(platform, names, layout):
    """Three mapped calls of an inner batch of two: rows must not be mixed up between the two."""
    case = platform.fit(SMALL.replace(layout=layout))
    calls, joined = stacked(case, names, 3)
    axes = {n: 0 if n in names else None for n in joined}
    check_mapped(case, calls, *jax.jit(mapped_prefill(case, axes))(joined))


@pytest.mark.parametrize("axis", [1, 2, 3, 4, -1])
@pytest.mark.parametrize(
    "names", [("query",), ("key", "value"), ("query", "key", "value")], ids="-".join
)
def test_vmap_of_every_axis(platform, axis, names):
    case = platform.fit(SMALL)
    calls, joined = stacked(case, names, 3)
    joined = {n: np.moveaxis(x, 0, axis) if n in names else x for n, x in joined.items()}
    axes = {n: axis if n in names else None for n in joined}
    check_mapped(case, calls, *mapped_prefill(case, axes)(joined))


@pytest.mark.parametrize(
    "name",
    [
        "query_seq_lengths",
        "key_value_seq_lengths",
        "bias",
        "mask",
        "query_segment_ids",
        "key_value_segment_ids",
        "sinks",
        "alibi_slopes",
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_vmap_of_every_other_operand(platform, name, alone):
    """Mapped alone, and with the query."""
    case = platform.fit(FULL)
    names = (name,) if alone else (name, "query")
    calls, joined = stacked(case, names, 2)
    axes = {n: 0 if n in names else None for n in joined}
    check_mapped(case, calls, *mapped_prefill(case, axes)(joined))


def test_vmap_of_everything_but_one(platform):
    case = platform.fit(FULL)
    for name in ("query", "key", "bias", "mask", "sinks", "query_seq_lengths"):
        names = tuple(n for n in make_inputs(case) if n != name)
        calls, joined = stacked(case, names, 2)
        axes = {n: 0 if n in names else None for n in joined}
        check_mapped(case, calls, *mapped_prefill(case, axes)(joined))


@pytest.mark.parametrize("inner", SUBSETS, ids="-".join)
@pytest.mark.parametrize("outer", [("query",), ("key",), ("query", "value")], ids="-".join)
def test_nested_vmap(platform, inner, outer):
    """Operands mapped by the outer vmap, the inner, both or neither."""
    case = platform.fit(SMALL)
    rng = np.random.default_rng(0)
    arrays = make_inputs(case)
    sizes = dict(outer=2, inner=3)
    joined = {}
    for name, x in arrays.items():
        lead = (sizes["outer"],) * (name in outer) + (sizes["inner"],) * (name in inner)
        joined[name] = (rng.standard_normal(lead + x.shape) + 0.5).astype(x.dtype)
    f = functools.partial(jax_flashattn.prefill, return_lse=True)
    f = jax.vmap(f, in_axes=tuple(0 if n in inner else None for n in arrays))
    f = jax.vmap(f, in_axes=tuple(0 if n in outer else None for n in arrays))
    outs, lses = jax.jit(f)(*joined.values())
    for i, j in np.ndindex(2, 3):
        one = {}
        for name, x in joined.items():
            x = x[i] if name in outer else x
            one[name] = x[j] if name in inner else x
        check_mapped(case, [one], outs[i, j][None], lses[i, j][None])


def test_vmap_over_an_inner_rank_3(platform):
    """vmap of unbatched attention is batched attention."""
    case = platform.fit(SMALL)
    arrays = make_inputs(case)
    out, lse = prefill(case, arrays)
    mapped_out, mapped_lse = jax.vmap(functools.partial(jax_flashattn.prefill, return_lse=True))(
        *arrays.values()
    )
    check_same(mapped_out, out)
    check_same(mapped_lse, lse)


def test_vmap_of_one_and_none(platform):
    case = platform.fit(SMALL)
    arrays = make_inputs(case)
    for size in (0, 1):
        q = np.broadcast_to(arrays["query"], (size, *arrays["query"].shape))
        out = jax.vmap(jax_flashattn.prefill, in_axes=(0, None, None))(
            q, arrays["key"], arrays["value"]
        )
        assert out.shape == q.shape
    check_same(out[0], prefill(case, arrays)[0])


def test_vmap_out_axes_and_axis_name(platform):
    case = platform.fit(SMALL)
    calls, joined = stacked(case, ("query",), 3)
    axes = dict(query=0, key=None, value=None)
    outs, lses = mapped_prefill(case, axes, out_axes=(2, 1))(joined)
    check_mapped(case, calls, jnp.moveaxis(outs, 2, 0), jnp.moveaxis(lses, 1, 0))
    summed = jax.vmap(
        lambda q: jax.lax.psum(jax_flashattn.prefill(q, joined["key"], joined["value"]), "i"),
        axis_name="i",
    )(joined["query"])
    assert summed.shape == joined["query"].shape


# --- with gradients


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
@pytest.mark.parametrize("order", ["vmap(grad)", "grad(vmap)"])
def test_vmap_and_grad(platform, names, order):
    """Under grad(vmap) an unmapped operand's gradient is the sum over the mapped calls."""
    case = platform.fit(SMALL)
    calls, joined = stacked(case, names, 3)
    cotangents = [make_cotangents(case, seed=10 + i) for i in range(3)]
    douts, dlses = (np.stack(x) for x in zip(*cotangents, strict=True))
    axes = tuple(0 if n in names else None for n in joined)

    attention = functools.partial(jax_flashattn.prefill, return_lse=True)
    if order == "vmap(grad)":

        def one(q, k, v, dout, dlse):
            return jax.vjp(attention, q, k, v)[1]((dout, dlse))

        pull = jax.vmap(one, in_axes=(*axes, 0, 0))
    else:

        def pull(q, k, v, dout, dlse):
            return jax.vjp(jax.vmap(attention, in_axes=axes), q, k, v)[1]((dout, dlse))

    ours = jax.jit(pull)(*joined.values(), douts, dlses)
    summed = () if order == "vmap(grad)" else tuple(n for n in joined if n not in names)
    check_mapped_gradients(dict(zip(joined, ours, strict=True)), cotangents, calls, summed, case)


def check_mapped_gradients(ours, cotangents, calls, summed, case):
    """Gradients by operand: one for each call, or for `summed` operands their sum."""

    def stack(oracle):
        grads = [
            oracle.gradients(*c, **a, **case.options())
            for c, a in zip(cotangents, calls, strict=True)
        ]
        return {name: np.stack([g[name] for g in grads]) for name in ours}

    lse = np.stack([truth.attention(**a, **case.options())[1] for a in calls])
    true, measure = stack(truth), stack(xla)  # (calls, ...) and (calls, draws, ...)
    for name, grad in ours.items():
        draws = list(measure[name].swapaxes(0, 1))
        if name in summed:
            true[name] = true[name].sum(axis=0)
            draws = [x.astype(np.float64).sum(axis=0).astype(x.dtype) for x in draws]
        check_gradient(grad, true[name], draws, f"d{name}", case.dtype, lse)


@pytest.mark.parametrize(
    "name", ["bias", "sinks", "mask", "key_value_seq_lengths", "query_segment_ids"]
)
def test_grad_of_vmap_with_features(platform, name):
    """One feature operand mapped, the gradients of all floats asked for."""
    case = platform.fit(FULL.replace(alibi=False))
    calls, joined = stacked(case, (name,), 2)
    cotangents = [make_cotangents(case, seed=10 + i) for i in range(2)]
    douts, dlses = (np.stack(x) for x in zip(*cotangents, strict=True))
    names = list(joined)
    axes = tuple(0 if n == name else None for n in names)

    attention = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())

    def mapped(**arrays):
        f = jax.vmap(lambda *xs: attention(**dict(zip(names, xs, strict=True))), in_axes=axes)
        return f(*(arrays[n] for n in names))

    ours = gradients(mapped, joined, douts, dlses)
    check_mapped_gradients(ours, cotangents, calls, tuple(n for n in ours if n != name), case)


@pytest.mark.parametrize("names", [("query",), ("key", "value")], ids="-".join)
def test_vmap_of_jvp(platform, names):
    case = platform.fit(SMALL)
    calls, joined = stacked(case, names, 3)
    axes = tuple(0 if n in names else None for n in joined)
    tangent = jnp.asarray(make_inputs(case, seed=20)["query"])

    def push(attention):
        def one(q, k, v):
            return jax.jvp(lambda q: attention(q, k, v), (q,), (tangent,))[1]

        with jax.default_matmul_precision("highest"):
            return jax.vmap(one, in_axes=axes)(*joined.values())

    for ours, same in zip(
        push(functools.partial(jax_flashattn.prefill, return_lse=True)),
        push(_reference.attention),
        strict=True,
    ):
        tolerance = 40 * float(jnp.finfo(joined["query"].dtype).eps)
        np.testing.assert_allclose(ours, same, atol=tolerance, rtol=tolerance)
    assert len(calls) == ours.shape[0]


# --- decode

DECODE = DecodeCase(lengths=(30, 5), capacity=33, tokens=2, head_dim=16, sinks=True)


def _decode_operands(paged):
    names = ["query", "key_cache", "value_cache", "seq_lens", "sinks"]
    return names + ["page_table"] if paged else names


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ("query",),
        ("key_cache",),
        ("value_cache",),
        ("seq_lens",),
        ("sinks",),
        ("page_table",),
        ("query", "seq_lens"),
        ("key_cache", "value_cache"),
        ("query", "key_cache", "value_cache", "seq_lens"),
        ("query", "key_cache", "value_cache", "seq_lens", "sinks", "page_table"),
    ],
    ids="-".join,
)
def test_vmap_of_decode(platform, names, paged):
    names = tuple(n for n in names if paged or n != "page_table")
    if not names:
        pytest.skip("a contiguous cache has no page table")
    case = platform.fit(DECODE.replace(page_size=8 if paged else None))
    calls = [make_inputs(case, seed=i, poison=False) for i in range(3)]
    calls[1]["seq_lens"] = np.int32([7, 33])
    calls = [{n: x if n in names else calls[0][n] for n, x in c.items()} for c in calls]
    joined = {n: np.stack([c[n] for c in calls]) if n in names else x for n, x in calls[0].items()}
    order = _decode_operands(paged)
    mapped = jax.vmap(
        lambda *xs: jax_flashattn.decode(**dict(zip(order, xs, strict=True)), return_lse=True),
        in_axes=tuple(0 if n in names else None for n in order),
    )
    outs, lses = jax.jit(mapped)(*(joined[n] for n in order))
    for i, arrays in enumerate(calls):
        true_out, true_lse = truth.decode(**arrays)
        check(outs[i], true_out, xla_decode(case, arrays), f"out[{i}]")
        check_lse(lses[i], true_lse, f"lse[{i}]")


@pytest.mark.parametrize(
    "mapped",
    [("key_cache", "key_scale"), ("value_scale",), ("key_scale", "value_scale"), None],
    ids=lambda names: "-".join(names or ("all",)),
)
@pytest.mark.parametrize("paged", [False, True])
def test_vmap_of_8_bit_decode(platform, mapped, paged):
    """Every call dequantises with its own scales, with those of all heads and of all calls alike."""
    case = platform.fit(
        DECODE.replace(
            cache_dtype="float8_e4m3fn",
            dtype="bfloat16",
            page_size=8 if paged else None,
            scales="page" if paged else "head",
            sinks=False,
        )
    )
    calls = [make_inputs(case, seed=i, poison=False) for i in range(3)]
    mapped = mapped or tuple(calls[0])
    calls = [{n: x if n in mapped else calls[0][n] for n, x in c.items()} for c in calls]
    axes = {n: calls[0][n].ndim if n in mapped else None for n in calls[0]}
    joined = [
        x if axes[n] is None else np.stack([c[n] for c in calls], axes[n])
        for n, x in calls[0].items()
    ]
    outs = jax.vmap(
        lambda *xs: jax_flashattn.decode(**dict(zip(axes, xs, strict=True))),
        in_axes=tuple(axes.values()),
    )(*joined)
    for i, arrays in enumerate(calls):
        check(outs[i], truth.decode(**arrays)[0], xla_decode(case, arrays))


@pytest.mark.parametrize("mapped", [("key_cache",), ("query",), ("query", "key_cache", "seq_lens")])
@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_vmap_of_latent_decode(platform, mapped, page_size, cache_dtype):
    case = DECODE.replace(latent=True, value_dim=8, page_size=page_size, cache_dtype=cache_dtype)
    case = platform.fit(case)
    calls = [make_inputs(case, seed=i, poison=False) for i in range(3)]
    rest = {n: x for n, x in calls[0].items() if n not in mapped}
    calls = [{n: c[n] for n in mapped} for c in calls]
    outs = jax.vmap(lambda moving: jax_flashattn.decode(**moving, **rest, value_dim=8))(
        {n: np.stack([c[n] for c in calls]) for n in mapped}
    )
    for out, moving in zip(outs, calls, strict=True):
        arrays = moving | rest
        oracles = truth.decode(**arrays, value_dim=8)[0], xla_decode(case, arrays)
        check(out, *oracles)


# --- everything else


def test_eval_shape(platform):
    case = platform.fit(SMALL.replace(layout="BNTH", value_dim=8))
    arrays = make_inputs(case)
    out, lse = jax.eval_shape(
        functools.partial(jax_flashattn.prefill, return_lse=True, layout="BNTH"), *arrays.values()
    )
    assert (out.shape, out.dtype) == ((2, 4, 19, 8), arrays["query"].dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 19), jnp.float32)
    assert not out.weak_type and not lse.weak_type
    step = make_inputs(platform.fit(DECODE))
    out = jax.eval_shape(jax_flashattn.decode, **step)
    assert (out.shape, out.dtype) == (step["query"].shape, step["query"].dtype)


def test_eager_and_jit_agree(platform):
    case = platform.fit(FULL)
    arrays = make_inputs(case)
    eager = jax_flashattn.prefill(**arrays, return_lse=True, **case.options())
    for a, b in zip(eager, prefill(case, arrays), strict=True):
        check_same(a, b)


def test_disable_jit(platform):
    """The primitives run op by op too, and so do their derivatives."""
    case = platform.fit(SMALL)
    arrays = [jnp.asarray(x) for x in make_inputs(case).values()]
    step = make_inputs(platform.fit(DECODE))

    def square(*arrays):
        return (jax_flashattn.prefill(*arrays).astype(jnp.float32) ** 2).sum()

    def results():
        return (
            jax_flashattn.prefill(*arrays),
            jax_flashattn.decode(**step),
            jax.grad(square)(*arrays),
            jax.jvp(jax_flashattn.prefill, arrays, arrays)[1],
            jax.vmap(jax_flashattn.prefill, (0, None, None))(arrays[0][None], *arrays[1:]),
        )

    with jax.disable_jit():
        without = results()
    for a, b in zip(without, results(), strict=True):
        check_same(a, b)


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0)])
@pytest.mark.parametrize("batch,q_len,kv_len", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_zero_sizes(platform, size, axes, batch, q_len, kv_len):
    """Nothing to do, in every mode: zeros of the right shapes."""
    shapes = ((batch, q_len, 4, 8), (batch, kv_len, 2, 8), (batch, kv_len, 2, 8))
    arrays = tuple(
        jnp.zeros(shape if axis is None else (size, *shape), platform.dtype)
        for axis, shape in zip(axes, shapes, strict=True)
    )
    mapped = jax.vmap(jax_flashattn.prefill, axes)
    assert not mapped(*arrays).any()
    assert not jax.jvp(mapped, arrays, arrays)[1].any()

    def total(*arrays):
        return mapped(*arrays).astype(jnp.float32).sum()

    for gradient, x in zip(jax.grad(total, (0, 1, 2))(*arrays), arrays, strict=True):
        assert gradient.shape == x.shape and not gradient.any()
    jax.jvp(jax.grad(total), arrays, arrays)


def test_scan_and_while(platform):
    case = platform.fit(SMALL.replace(kv_len=19))
    q, k, v = (jnp.asarray(x) for x in make_inputs(case).values())

    def layer(x):
        return jax_flashattn.prefill(x, k, v)

    looped = q
    for _ in range(3):
        looped = layer(looped)
    scanned = jax.lax.scan(lambda x, _: (layer(x), None), q, length=3)[0]
    _, while_looped = jax.lax.while_loop(
        lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, layer(carry[1])), (0, q)
    )
    check_same(scanned, looped)
    check_same(while_looped, looped)


def test_persistent_cache(platform, tmp_path, caplog):
    """A program that was compiled before comes from the cache."""
    case = platform.fit(SMALL)
    arrays = make_inputs(case)
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    caplog.set_level(logging.DEBUG, logger="jax._src.compiler")
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        first = jax.jit(lambda x: jax_flashattn.prefill(**x))(arrays)
        assert "cache hit" not in caplog.text and any(tmp_path.iterdir())
        jax.clear_caches()
        again = jax.jit(lambda x: jax_flashattn.prefill(**x))(arrays)
        assert "cache hit" in caplog.text
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    check_same(again, first)


def test_donation(platform):
    case = platform.fit(SMALL)
    arrays = make_inputs(case)
    expected = prefill(case, arrays)[0]
    q, k, v = (jnp.asarray(x) for x in arrays.values())
    out = jax.jit(jax_flashattn.prefill, donate_argnums=0)(q, k, v)
    check_same(out, expected)
    assert q.is_deleted() and not k.is_deleted()


def test_control_flow_and_other_dtypes_beside_it(platform):
    case = platform.fit(SMALL)
    arrays = make_inputs(case)

    @jax.jit
    def either(flag, q, k, v):
        return jax.lax.cond(flag, jax_flashattn.prefill, lambda q, k, v: jnp.zeros_like(q), q, k, v)

    check_same(either(True, **_qkv(arrays)), prefill(case, arrays)[0])
    assert not either(False, **_qkv(arrays)).any()


def _qkv(arrays):
    return dict(q=arrays["query"], k=arrays["key"], v=arrays["value"])


needs_cuda_build = pytest.mark.skipif(
    _ffi.cuda_problem is not None, reason="this build has no CUDA kernels to export to"
)
ALLOWED = [jax.export.DisabledSafetyCheck.custom_call(c) for c in jax_flashattn.CUSTOM_CALLS]


@needs_cuda_build
def test_export(platform):
    """Exported for CPU and CUDA at once; what comes back from bytes computes the same."""
    case = platform.fit(SMALL.replace(dtype="bfloat16"))
    arrays = make_inputs(case)

    def both(q, k, v):
        return jax_flashattn.prefill(q, k, v, return_lse=True)

    export = jax.export.export(jax.jit(both), platforms=["cpu", "cuda"], disabled_checks=ALLOWED)
    exported = export(*arrays.values())
    assert set(exported.platforms) == {"cpu", "cuda"}
    results = exported.call(*arrays.values())
    for a, b in zip(results, prefill(case, arrays), strict=True):
        check_same(a, b)


@needs_cuda_build
def test_export_of_gradients(platform):
    pytest.importorskip("flatbuffers")
    case = platform.fit(SMALL.replace(dtype="bfloat16"))
    arrays = make_inputs(case)
    export = jax.export.export(
        jax.jit(jax_flashattn.prefill), platforms=["cpu", "cuda"], disabled_checks=ALLOWED
    )
    exported = jax.export.deserialize(export(*arrays.values()).serialize(vjp_order=1))

    def grad(f):
        return jax.grad(lambda q: f(q, arrays["key"], arrays["value"]).astype(jnp.float32).sum())

    check_same(grad(exported.call)(arrays["query"]), grad(jax_flashattn.prefill)(arrays["query"]))


@needs_cuda_build
def test_export_of_decode(platform):
    case = platform.fit(DECODE.replace(dtype="bfloat16", page_size=8))
    arrays = make_inputs(case)
    names = list(arrays)
    export = jax.export.export(
        jax.jit(lambda *xs: jax_flashattn.decode(**dict(zip(names, xs, strict=True)))),
        platforms=["cpu", "cuda"],
        disabled_checks=ALLOWED,
    )
    check_same(export(*arrays.values()).call(*arrays.values()), decode_case_call(case, arrays)[0])


def test_export_with_symbolic_sizes(platform):
    """One program for every batch and length."""
    case = platform.fit(SMALL.replace(dtype="bfloat16"))
    batch, length = jax.export.symbolic_shape("b, t")
    dtype = jnp.dtype("bfloat16")
    q = jax.ShapeDtypeStruct((batch, length, 4, 16), dtype)
    k = jax.ShapeDtypeStruct((batch, length, 2, 16), dtype)
    exported = jax.export.export(jax.jit(jax_flashattn.prefill), disabled_checks=ALLOWED)(q, k, k)
    for sizes in (dict(batch=1, q_len=7, kv_len=7), dict(batch=3, q_len=65, kv_len=65)):
        concrete = case.replace(**sizes)
        arrays = make_inputs(concrete)
        check_same(exported.call(*arrays.values()), prefill(concrete, arrays)[0])


@pytest.mark.parametrize("rows", [True, False])
def test_export_with_symbolic_sizes_of_a_mask(platform, rows):
    batch, length = jax.export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((batch, length, n, 16), platform.dtype) for n in (4, 2)]
    mask = jax.ShapeDtypeStruct((batch, 1, length if rows else 1, length), bool)

    def attend(q, k, mask):
        return jax_flashattn.prefill(q, k, k, mask=mask)

    exported = jax.export.export(jax.jit(attend), disabled_checks=ALLOWED)(*shapes, mask)
    for sizes in (dict(batch=1, q_len=7, kv_len=7), dict(batch=3, q_len=330, kv_len=330)):
        case = platform.fit(SMALL.replace(mask="B_TS" if rows else "B__S", **sizes))
        arrays = make_inputs(case)
        operands = [arrays[name] for name in ("query", "key", "mask")]
        check_same(exported.call(*operands), attend(*operands))


def test_export_with_symbolic_sizes_beside_one(platform):
    """An operand of one batch broadcasts to a batch that is not known yet, in gradients too."""
    batch, length = jax.export.symbolic_shape("b, t")
    bias = jnp.linspace(-1, 1, 4, dtype=platform.dtype).reshape(4, 1, 1)

    def loss(q, k):
        return jax_flashattn.prefill(q, k, k, bias=bias).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    shapes = [jax.ShapeDtypeStruct((batch, length, n, 16), platform.dtype) for n in (4, 2)]
    if platform.name == "gpu":  # gradients there want to know their workspace
        with pytest.raises(NotImplementedError, match="symbolic sizes"):
            jax.export.export(gradient, disabled_checks=ALLOWED)(*shapes)
        return
    exported = jax.export.export(gradient, disabled_checks=ALLOWED)(*shapes)
    q, k, _ = make_inputs(platform.fit(SMALL.replace(batch=3, kv_len=19))).values()
    for a, b in zip(exported.call(q, k), gradient(q, k), strict=True):
        check_same(a, b)


@needs_cuda_build
@pytest.mark.parametrize("deterministic", [True, False])
def test_workspaces_beyond_32_bits(deterministic):
    """Of lengths whose accumulators of dQ have more than 2^31 floats, and masks of as many bytes."""
    cuda = _ffi.cuda()
    gradients = [8, 65536, 65536, 64, 64, 128, deterministic, None]
    assert cuda.backward_workspace(*gradients) > 8 * 65536 * 64 * 128
    assert cuda.prefill_workspace(1 << 18, 1 << 18, 1, 128, (1, 1, 1 << 18, 1 << 18)) > 1 << 33


@needs_cuda_build
def test_lowering_for_cuda_without_a_gpu(platform):
    case = SMALL.replace(dtype="bfloat16")
    arrays = make_inputs(case)
    loss = jax.jit(
        jax.grad(
            lambda q: (
                jax_flashattn.prefill(q, arrays["key"], arrays["value"]).astype(jnp.float32).sum()
            )
        )
    )
    text = loss.trace(arrays["query"]).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("prefill", "backward"):
        assert f"flashattn_{name}" in text


def test_jaxpr_names_the_operation(platform):
    arrays = make_inputs(platform.fit(SMALL))
    assert "flash_prefill" in str(jax.make_jaxpr(jax_flashattn.prefill)(*arrays.values()))
    step = make_inputs(platform.fit(DECODE))
    assert "flash_decode" in str(jax.make_jaxpr(lambda x: jax_flashattn.decode(**x))(step))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("hidden_by", ["mask", "segments", "causal"])
def test_tangents_of_rows_that_do_not_see_a_value(platform, hidden_by, bad):
    """What is not finite reaches the tangents, first and second, of the rows that see it alone."""
    case = platform.fit(
        Case(batch=1, q_len=20, kv_len=20, dtype="float32", causal=hidden_by == "causal")
    )
    query, key, value = (jnp.asarray(x) for x in make_inputs(case).values())
    options = dict(causal=case.causal)
    sees = np.arange(20) >= 7
    if hidden_by == "mask":
        options["mask"] = jnp.asarray(sees)[:, None] | (jnp.arange(20) != 7)[None]
    if hidden_by == "segments":
        ids = jnp.asarray(sees, jnp.int32)[None]
        options |= dict(query_segment_ids=ids, key_value_segment_ids=ids)

    def tangents(value):
        def attend(q):
            return jax_flashattn.prefill(q, key, value, **options)

        weights = jnp.asarray(~sees, query.dtype)[None, :, None, None]
        pull = jax.grad(lambda q: (attend(q) * weights).astype(jnp.float32).sum())
        return jax.jvp(attend, (query,), (query,))[1], jax.jvp(pull, (query,), (query,))[1]

    first, second = tangents(value.at[:, 7].set(bad))
    good_first, good_second = tangents(value)
    assert np.isnan(np.float64(first))[:, sees].all()
    check_same(first[:, ~sees], good_first[:, ~sees])
    check_same(second[:, ~sees], good_second[:, ~sees])
