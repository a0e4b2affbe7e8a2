"""Several devices: batch and heads shard without communication, in every way JAX has to say so."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
import xla
from calls import xla_decode, xla_prefill
from cases import Case, DecodeCase, make_cotangents, make_inputs
from check import check, check_gradient, check_lse, check_same
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flashattn
from jax_flashattn import _reference

COMMUNICATION = re.compile(
    r"= \S+ (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
)
CASE = Case(batch=8, q_len=16, q_heads=8, kv_heads=8, head_dim=16)
ATTENTION = functools.partial(jax_flashattn.prefill, return_lse=True)


@pytest.fixture
def devices(platform):
    count = len(platform.devices)
    if count < 2:
        pytest.skip("needs two devices or more")
    return platform.devices[: 1 << (count.bit_length() - 1)]


def mesh_of(devices, shape=None, kind=AxisType.Auto):
    """A mesh with axes x and y; by default both longer than 1 where there are enough devices."""
    count = len(devices)
    shape = shape or ((2, count // 2) if count > 2 else (1, count))
    return jax.make_mesh(shape, ("x", "y"), devices=devices, axis_types=(kind,) * 2)


def collectives(function, *arrays):
    return COMMUNICATION.findall(jax.jit(function).lower(*arrays).compile().as_text())


def put(arrays, mesh, specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def check_results(case, arrays, out, lse):
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


def check_grads(arrays, dout, dlse, ours):
    expected, measure = (f(dout, dlse, **arrays) for f in (truth.gradients, xla.gradients))
    _, lse = truth.attention(**arrays)
    for name, grad in zip(arrays, ours, strict=True):
        check_gradient(grad, expected[name], measure[name], f"d{name}", grad.dtype, lse)


LAYOUTS = {
    "batch": (P("y"), P("y")),
    "heads": (P(None, None, "y"), P(None, None, "y")),
    "batch and heads": (P("x", None, "y"), P("x", None, "y")),
    "batch over both axes": (P(("x", "y")), P(("x", "y"))),
    "nothing": (P(), P()),
}


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("heads_first", [False, True])
def test_automatic(platform, devices, where, heads_first):
    """Inputs carry the sharding: no communication, results sharded like the query."""
    case = platform.fit(CASE.replace(layout="BNTH" if heads_first else "BTNH"))
    arrays = make_inputs(case)
    specs = [LAYOUTS[where][0]] + [LAYOUTS[where][1]] * 2
    if heads_first:
        specs = [P(*(tuple(s) + (None,) * 3)[:1], (tuple(s) + (None,) * 3)[2]) for s in specs]
    mesh = mesh_of(devices)
    sharded = put(arrays.values(), mesh, specs)
    call = functools.partial(ATTENTION, layout=case.layout)
    assert not collectives(call, *sharded)
    out, lse = jax.jit(call)(*sharded)
    check_results(case, arrays, out, lse)
    assert out.sharding.is_equivalent_to(sharded[0].sharding, 4)
    local = out.addressable_shards[0].data.size * len(devices)
    if where != "nothing":
        assert local < out.size * len(devices)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_grouped_heads(platform, devices, kv_heads):
    """Query heads sharded with their key heads; one key head for all is replicated."""
    case = platform.fit(CASE.replace(kv_heads=kv_heads))
    arrays = make_inputs(case)
    parts = min(kv_heads, len(devices) // 2)
    mesh = mesh_of(devices, (len(devices) // parts, parts)) if kv_heads > 1 else mesh_of(devices)
    heads = P("x", None, "y") if kv_heads > 1 else P("x")
    sharded = put(arrays.values(), mesh, [P("x", None, "y"), heads, heads])
    assert not collectives(ATTENTION, *sharded)
    check_results(case, arrays, *jax.jit(ATTENTION)(*sharded))


def test_fewer_key_heads_than_devices(platform, devices):
    """Right, whatever has to be gathered for it."""
    case = platform.fit(CASE.replace(kv_heads=2))
    arrays = make_inputs(case)
    mesh = mesh_of(devices, (1, len(devices)))
    sharded = put(arrays.values(), mesh, [P(None, None, "y"), P(), P()])
    check_results(case, arrays, *jax.jit(ATTENTION)(*sharded))


@pytest.mark.parametrize("where", ["batch", "heads", "batch and heads"])
def test_automatic_gradients(platform, devices, where):
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    spec = LAYOUTS[where][0]
    sharded = put([*arrays.values(), dout, dlse], mesh_of(devices), [spec] * 5)

    def pull(attention):
        return lambda q, k, v, dout, dlse: jax.vjp(attention, q, k, v)[1]((dout, dlse))

    assert not collectives(pull(ATTENTION), *sharded)
    ours = jax.jit(pull(ATTENTION))(*sharded)
    check_grads(arrays, dout, dlse, ours)
    assert all(x.sharding.is_equivalent_to(sharded[0].sharding, 4) for x in ours)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_automatic_gradients_of_grouped_heads(platform, devices, kv_heads):
    """Key heads may be summed over devices: allowed to communicate, not to be wrong."""
    case = platform.fit(CASE.replace(kv_heads=kv_heads))
    arrays = make_inputs(case)
    dout, _ = make_cotangents(case)
    specs = [P("x", None, "y"), P("x"), P("x"), P("x", None, "y")]
    sharded = put([*arrays.values(), dout], mesh_of(devices), specs)

    def pull(attention):
        return lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout)

    ours = jax.jit(pull(jax_flashattn.prefill))(*sharded)
    check_grads(arrays, dout, None, ours)


def test_automatic_with_features(platform, devices):
    """Every further operand follows the batch and the heads."""
    case = platform.fit(
        CASE.replace(
            q_lengths=(16, 9, 3, 0, 16, 1, 7, 16),
            kv_lengths=(16, 5, 16, 2, 0, 1, 16, 9),
            bias="BNTS",
            mask="__TS",
            segments=2,
            sinks=True,
            alibi=True,
        )
    )
    arrays = make_inputs(case)
    specs = {
        **dict.fromkeys(("query", "key", "value"), P("x", None, "y")),
        **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), P("x")),
        **dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), P("x")),
        "bias": P("x", "y"),
        "mask": P(),
        "sinks": P("y"),
        "alibi_slopes": P("y"),
    }
    mesh = mesh_of(devices)
    names = list(arrays)
    sharded = put(arrays.values(), mesh, [specs[n] for n in names])
    call = lambda *xs: ATTENTION(**dict(zip(names, xs, strict=True)))  # noqa: E731
    assert not collectives(call, *sharded)
    check_results(case, arrays, *jax.jit(call)(*sharded))


def test_vmap_of_sharded(platform, devices):
    """A mapped query over shared keys, the batch sharded: right, with the batch still apart."""
    case = platform.fit(CASE)
    calls = [make_inputs(case, seed=i) for i in range(2)]
    q = np.stack([c["query"] for c in calls])
    k, v = calls[0]["key"], calls[0]["value"]
    sharded = put([q, k, v], mesh_of(devices), [P(None, "x", None, "y"), P("x"), P("x")])
    outs, lses = jax.jit(jax.vmap(ATTENTION, in_axes=(0, None, None)))(*sharded)
    for i in range(2):
        check_results(case, dict(query=q[i], key=k, value=v), outs[i], lses[i])


@pytest.mark.parametrize(
    "specs",
    [
        [P(None, "y"), P(), P()],
        [P(), P(None, "y"), P(None, "y")],
        [P(None, "y"), P(None, "y"), P(None, "y")],
        [P(None, None, None, "y")] * 3,
        [P("x"), P("y"), P(None, "x")],
    ],
    ids=["queries", "keys", "both", "head dim", "mixed"],
)
def test_sharded_sequences_are_right(platform, devices, specs):
    """Sequences and head dims are not computed locally: gathered, and right."""
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    sharded = put(arrays.values(), mesh_of(devices), specs)
    check_results(case, arrays, *jax.jit(ATTENTION)(*sharded))


# --- shard_map


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("where", ["batch", "heads", "batch and heads"])
def test_shard_map(platform, devices, where, check_vma):
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    mesh, spec = mesh_of(devices), LAYOUTS[where][0]
    mapped = jax.shard_map(
        ATTENTION, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 2, check_vma=check_vma
    )
    sharded = put(arrays.values(), mesh, [spec] * 3)
    assert not collectives(mapped, *sharded)
    check_results(case, arrays, *jax.jit(mapped)(*sharded))


@pytest.mark.parametrize("replicated", [(), ("key", "value"), ("query",)], ids=str)
def test_gradients_through_shard_map(platform, devices, replicated):
    """A replicated operand's gradient is summed over the devices (check_vma inserts the psum)."""
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    mesh = mesh_of(devices)
    specs = tuple(P() if n in replicated else P("y") for n in arrays)
    if (
        replicated
    ):  # every device then holds part of the other operands for all entries: one entry each
        specs = tuple(P() if n in replicated else P(None, None, "y") for n in arrays)
        if replicated == ("query",):
            pytest.skip("keys sharded by head need their query heads")
        case = case.replace(kv_heads=1)
        arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    row = specs[0]
    mapped = jax.shard_map(ATTENTION, mesh=mesh, in_specs=specs, out_specs=(row, row))

    def pull(attention):
        return jax.jit(lambda *x: jax.vjp(attention, *x[:3])[1](tuple(x[3:])))

    ours = pull(mapped)(*arrays.values(), dout, dlse)
    check_grads(arrays, dout, dlse, ours)


def test_gradients_inside_shard_map(platform, devices):
    """A data-parallel training step: grad inside, of replicated weights."""
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), case.dtype)

    def loss(attention, weights, q, k, v):
        return (attention(q @ weights, k, v).astype(jnp.float32) ** 2).mean()

    def step(attention, weights, *x):
        grad = jax.grad(functools.partial(loss, attention))
        return grad(weights, *x) / len(devices)  # of what is the same everywhere: summed by JAX

    mapped = jax.shard_map(
        functools.partial(step, jax_flashattn.prefill),
        mesh=mesh_of(devices, (1, len(devices))),
        in_specs=(P(), P("y"), P("y"), P("y")),
        out_specs=P(),
    )
    ours = jax.jit(mapped)(weights, *arrays.values())
    same = jax.grad(functools.partial(loss, lambda *x: _reference.attention(*x)[0]))(
        weights, *arrays.values()
    )
    tolerance = 40 * float(jnp.finfo(same.dtype).eps)
    np.testing.assert_allclose(ours, same, atol=tolerance * float(jnp.abs(same).max()))


def test_partly_manual_shard_map(platform, devices):
    """Manual over x, automatic over y."""
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    mesh = mesh_of(devices)
    mapped = jax.shard_map(
        ATTENTION, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=(P("x"),) * 2, axis_names={"x"}
    )
    sharded = put(arrays.values(), mesh, [P("x", None, "y")] * 3)
    check_results(case, arrays, *jax.jit(mapped)(*sharded))


def test_ring_of_sharded_keys(platform, devices):
    """Sequence parallelism by hand: each device attends to its keys, merge joins the parts."""
    case = platform.fit(CASE.replace(batch=2, q_len=32, causal=False))
    arrays = make_inputs(case)
    mesh = mesh_of(devices, (1, len(devices)))

    def local(q, k, v):
        out, lse = ATTENTION(q, k, v, causal=False)
        outs, lses = (jax.lax.all_gather(x, "y") for x in (out, lse))
        return jax_flashattn.merge(outs, lses)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(None, "y"), P(None, "y")),
        out_specs=(P(), P()),
        check_vma=False,
    )
    check_results(case, arrays, *jax.jit(mapped)(*arrays.values()))


# --- explicit sharding: types say where things are


@pytest.mark.parametrize("where", ["batch", "heads", "batch and heads"])
def test_explicit(platform, devices, where):
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    mesh, spec = mesh_of(devices, kind=AxisType.Explicit), LAYOUTS[where][0]
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, spec) for x in arrays.values()]
        out, lse = jax.jit(ATTENTION)(*sharded)
        assert jax.typeof(out).sharding.spec == P(*(tuple(spec) + (None,) * 4)[:4])
        assert not collectives(ATTENTION, *sharded)
    check_results(case, arrays, out, lse)


@pytest.mark.parametrize("where", ["batch", "heads", "batch and heads"])
def test_explicit_gradients(platform, devices, where):
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    mesh, spec = mesh_of(devices, kind=AxisType.Explicit), LAYOUTS[where][0]

    def pull(attention):
        return lambda q, k, v, dout, dlse: jax.vjp(attention, q, k, v)[1]((dout, dlse))

    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, spec) for x in (*arrays.values(), dout, dlse)]
        ours = jax.jit(pull(ATTENTION))(*sharded)
        assert not collectives(pull(ATTENTION), *sharded)
    check_grads(arrays, dout, dlse, ours)


def test_explicit_without_a_context(platform, devices):
    """Arrays know their mesh: no jax.set_mesh is needed, in a jitted call or outside."""
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    mesh = mesh_of(devices, kind=AxisType.Explicit)
    sharded = put(arrays.values(), mesh, [P("x", None, "y"), P("x"), P()])
    for call in (ATTENTION, jax.jit(ATTENTION)):
        check_results(case, arrays, *call(*sharded))
    dout, dlse = make_cotangents(case)
    pull = jax.jit(lambda q, k, v, *ct: jax.vjp(ATTENTION, q, k, v)[1](ct))
    grads = pull(*sharded, *put((dout, dlse), mesh, [P("x", None, "y")] * 2))
    check_grads(arrays, dout, dlse, grads)


def test_explicit_sequence(platform, devices):
    """Refused by name or gathered; never a local answer."""
    case = platform.fit(CASE)
    arrays = make_inputs(case)
    with jax.set_mesh(mesh_of(devices, kind=AxisType.Explicit)):
        sharded = [jax.device_put(x, P(None, "y")) for x in arrays.values()]
        try:
            results = jax.jit(ATTENTION)(*sharded)
        except (ValueError, NotImplementedError) as error:
            assert re.match("prefill: ", str(error))
            return
    check_results(case, arrays, *results)


@pytest.mark.parametrize("gradient", [False, True])
def test_explain_of_explicit(platform, devices, gradient):
    """It names the kernel that each device runs."""
    arrays = make_inputs(platform.fit(CASE)).values()
    with jax.set_mesh(mesh_of(devices, kind=AxisType.Explicit)):
        sharded = [jax.device_put(x, P("y")) for x in arrays]
        explanation = jax_flashattn.explain("prefill", *sharded, gradient=gradient)
    assert explanation.kernel == jax_flashattn.explain("prefill", *arrays, gradient=gradient).kernel


# --- decode

DECODE = DecodeCase(
    lengths=(30, 5, 0, 33, 1, 17, 32, 16), capacity=33, q_heads=8, kv_heads=8, head_dim=16
)


def check_decode_results(case, arrays, out, lse):
    true_out, true_lse = truth.decode(**arrays, **case.options())
    check(out, true_out, xla_decode(case, arrays))
    check_lse(lse, true_lse)


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("where", ["batch", "heads"])
def test_decode(platform, devices, where, kind, page_size):
    """A paged pool is shared by the batch: only its heads shard."""
    case = platform.fit(DECODE.replace(page_size=page_size))
    arrays = make_inputs(case)
    heads = P(None, None, "y")
    row = P("y") if where == "batch" else heads
    cache = (P() if page_size and where == "batch" else row) if where == "batch" else heads
    specs = dict(
        query=row,
        key_cache=cache,
        value_cache=cache,
        seq_lens=P("y") if where == "batch" else P(),
        page_table=P("y") if where == "batch" else P(),
    )
    mesh = mesh_of(devices, (1, len(devices)), kind)
    call = functools.partial(jax_flashattn.decode, return_lse=True)
    names = list(arrays)
    named = lambda *xs: call(**dict(zip(names, xs, strict=True)))  # noqa: E731
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()]
        assert not collectives(named, *sharded)
        out, lse = jax.jit(named)(*sharded)
    check_decode_results(case, arrays, out, lse)


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("where", ["batch", "heads"])
def test_latent_decode(platform, devices, where, kind, page_size):
    """Query heads shard over a cache of one key head that every device has whole."""
    case = DECODE.replace(page_size=page_size, latent=True, kv_heads=1, value_dim=8)
    case = platform.fit(case)
    arrays = make_inputs(case)
    row = P("y") if where == "batch" else P()
    specs = dict(
        query=row if where == "batch" else P(None, None, "y"),
        key_cache=P() if page_size else row,
        seq_lens=row,
        page_table=row,
    )
    names = [n for n in arrays if n != "value_cache"]

    def call(*xs):
        named = dict(zip(names, xs, strict=True))
        return jax_flashattn.decode(**named, value_cache=None, value_dim=8, return_lse=True)

    mesh = mesh_of(devices, (1, len(devices)), kind)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(arrays[n], NamedSharding(mesh, specs[n])) for n in names]
        assert not collectives(call, *sharded)
        out, lse = jax.jit(call)(*sharded)
    check_decode_results(case, arrays, out, lse)


def test_decode_in_shard_map(platform, devices):
    case = platform.fit(DECODE)
    arrays = make_inputs(case)
    mesh = mesh_of(devices)
    mapped = jax.shard_map(
        functools.partial(jax_flashattn.decode, return_lse=True),
        mesh=mesh,
        in_specs=(P("y"),) * 4,
        out_specs=(P("y"),) * 2,
    )
    check_decode_results(case, arrays, *jax.jit(mapped)(*arrays.values()))


def test_append_in_explicit_shard_map(platform, devices):
    """Where types shard the batch of a cache, each device appends to its own sequences."""
    case = platform.fit(CASE)
    query, key, value = make_inputs(case).values()
    empty = jax_flashattn.KVCache.allocate(8, 20, 8, 16, key.dtype)

    def step(cache, query, key, value):
        cache = cache.append(key, value)
        return cache, cache.attend(query)

    expected = step(empty, query, key, value)
    with jax.set_mesh(mesh_of(devices, (1, len(devices)), AxisType.Explicit)):
        operands = jax.tree.map(lambda x: jax.device_put(x, P("y")), (empty, query, key, value))
        ours = jax.jit(jax.shard_map(step, in_specs=P("y"), out_specs=P("y")))(*operands)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        check_same(a, b)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("where", ["batch", "heads"])
def test_append_to_a_sharded_cache(platform, devices, where, kind, in_context, layout):
    """Each device writes its own tokens, in a mesh's context and without."""
    case = platform.fit(CASE.replace(q_len=3, kv_len=3, layout=layout))
    tokens = [jnp.asarray(x) for x in make_inputs(case).values()]
    dtype = tokens[0].dtype
    cache = jax_flashattn.KVCache.allocate(8, 20, 8, 16, dtype, layout=layout)
    cache = dataclasses.replace(cache, seq_lens=jnp.arange(8, dtype=jnp.int32) * 3)  # some overflow
    angles = np.arange(20)[:, None] / 4.0 ** np.arange(4)
    rotary = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    def step(cache, query, key, value, new_lens):
        cache = cache.append(key, value, new_lens=new_lens, rotary=rotary)
        return cache, cache.attend(query)

    operands = (cache, *tokens, jnp.asarray([0, 1, 2, 3] * 2, jnp.int32))
    expected = jax.jit(step)(*operands)
    mesh = mesh_of(devices, (1, len(devices)), kind)
    by_head = P(None, None, "y") if layout == "BTNH" else P(None, "y")

    def spec(x):
        return P("y") if where == "batch" else by_head if x.ndim == 4 else P()

    sharded = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), operands)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        assert not collectives(step, *sharded)
        ours = jax.jit(step)(*sharded)
    close = functools.partial(np.testing.assert_allclose, atol=4 * float(jnp.finfo(dtype).eps))
    jax.tree.map(lambda a, b: close(np.float64(a), np.float64(b)), ours, expected)


@pytest.mark.parametrize("given", ["mask", "lengths"])
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_explicit_drop_in_with_empty_rows(platform, devices, kv_heads, given):
    """Rows that see nothing take jax.nn's mean of the values, on each device's heads."""
    case = platform.fit(CASE.replace(kv_heads=kv_heads))
    arrays = [jnp.asarray(x) for x in make_inputs(case).values()]
    options = (
        dict(mask=jnp.ones((16, 16), bool).at[3].set(False))
        if given == "mask"
        else dict(key_value_seq_lengths=jnp.asarray([0, 3, 16, 1] * 2, jnp.int32))
    )
    attend = functools.partial(jax_flashattn.dot_product_attention, **options)
    expected = attend(*arrays)
    mesh = mesh_of(devices[:2], (1, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        out = jax.jit(attend)(*(jax.device_put(x, P(None, None, "y")) for x in arrays))
    assert jax.typeof(out).sharding.spec[2] == "y"
    check_same(out, expected)
