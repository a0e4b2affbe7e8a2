"""Bad input is refused at trace time, by an error that says what, where, and what is allowed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flashattn
from jax_flashattn import _ffi

FORM = re.compile(r"^[\w.]+: .+, got .+; .+", re.DOTALL)


def array(*shape, dtype="float16"):
    return jnp.zeros(shape, dtype)


def prefill_arguments(**changes):
    good = dict(query=array(2, 9, 4, 16), key=array(2, 11, 2, 16), value=array(2, 11, 2, 24))
    return {**good, **changes}


def decode_arguments(**changes):
    good = dict(
        query=array(3, 1, 4, 16),
        key_cache=array(3, 32, 2, 16),
        value_cache=array(3, 32, 2, 16),
        seq_lens=jnp.full((3,), 7, jnp.int32),
    )
    return {**good, **changes}


def paged_arguments(**changes):
    pool = array(10, 8, 2, 16)
    table = jnp.zeros((3, 4), jnp.int32)
    return decode_arguments(
        **{**dict(key_cache=pool, value_cache=pool, page_table=table), **changes}
    )


def eight_bit_arguments(**changes):
    pool = array(3, 32, 2, 16, dtype="int8")
    scale = jnp.ones(2, jnp.float32)
    good = dict(key_cache=pool, value_cache=pool, key_scale=scale, value_scale=scale)
    return decode_arguments(**{**good, **changes})


def latent_arguments(**changes):
    return decode_arguments(**{**dict(value_cache=None, value_dim=8), **changes})


INT = jnp.zeros((2,), jnp.int32)
PREFILL = [
    # (what is wrong, type, the argument that the message names)
    (dict(query=array(9, 16)), ValueError, "query has the wrong rank"),
    (dict(query=array(9, 4, 16)), ValueError, "key"),
    (dict(key=array(11, 16)), ValueError, "key"),
    (dict(query=array(3, 9, 4, 16)), ValueError, "key"),
    (dict(value=array(3, 11, 2, 24)), ValueError, "value"),
    (dict(key=array(2, 11, 3, 16)), ValueError, "key|value"),
    (dict(key=array(2, 11, 3, 16), value=array(2, 11, 3, 16)), ValueError, "key"),
    (dict(key=array(2, 11, 8, 16), value=array(2, 11, 8, 16)), ValueError, "key"),
    (dict(key=array(2, 11, 0, 16), value=array(2, 11, 0, 16)), ValueError, "key"),
    (dict(key=array(2, 11, 2, 8)), ValueError, "key"),
    (dict(key=array(2, 12, 2, 16)), ValueError, "value|key"),
    (dict(value=array(2, 11, 4, 24)), ValueError, "value"),
    (dict(query=array(2, 9, 4, 0), key=array(2, 11, 2, 0)), ValueError, "query|key"),
    (dict(value=array(2, 11, 2, 0)), ValueError, "value"),
    (dict(query=[[1.0]]), TypeError, "query"),
    (dict(key=array(2, 11, 2, 16, dtype="bfloat16")), TypeError, "key"),
    (dict(value=array(2, 11, 2, 24, dtype="float32")), TypeError, "value"),
    (dict(query=array(2, 9, 4, 16, dtype="int32")), TypeError, "query"),
    (dict(query=array(2, 9, 4, 16, dtype="complex64")), TypeError, "query"),
    (dict(query=array(2, 9, 4, 16, dtype="float8_e4m3fn")), TypeError, "query"),
    (dict(layout="BHTD"), ValueError, "layout"),
    (dict(layout=None), ValueError, "layout"),
    (dict(causal=None), ValueError, "causal"),
    (dict(causal="yes"), ValueError, "causal"),
    (dict(scale=float("nan")), ValueError, "scale"),
    (dict(scale=float("inf")), ValueError, "scale"),
    (dict(scale=np.ones(2)), ValueError, "scale"),
    (dict(scale=jnp.ones(2)), ValueError, "scale"),
    (dict(scale="1"), (TypeError, ValueError), "scale"),
    (dict(causal_alignment="left"), ValueError, "causal_alignment"),
    (dict(local_window_size=-1), ValueError, "local_window_size"),
    (dict(local_window_size=(1, -1)), ValueError, "local_window_size"),
    (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size"),
    (dict(local_window_size=1.5), (TypeError, ValueError), "local_window_size"),
    (dict(local_window_size="4"), (TypeError, ValueError), "local_window_size"),
    (dict(logit_softcap=0.0), ValueError, "logit_softcap"),
    (dict(logit_softcap=-2.0), ValueError, "logit_softcap"),
    (dict(logit_softcap=float("nan")), ValueError, "logit_softcap"),
    (dict(logit_softcap="2"), (TypeError, ValueError), "logit_softcap"),
    (dict(query_seq_lengths=jnp.zeros(3, jnp.int32)), ValueError, "query_seq_lengths"),
    (dict(query_seq_lengths=jnp.zeros((2, 1), jnp.int32)), ValueError, "query_seq_lengths"),
    (dict(query_seq_lengths=jnp.zeros(2, jnp.float32)), TypeError, "query_seq_lengths"),
    (dict(query_seq_lengths=jnp.zeros(2, bool)), TypeError, "query_seq_lengths"),
    (dict(key_value_seq_lengths=5), ValueError, "key_value_seq_lengths"),
    (dict(key_value_seq_lengths=jnp.zeros(2, jnp.float32)), TypeError, "key_value_seq_lengths"),
    (dict(bias=array(2, 4, 9, 12)), ValueError, "bias"),
    (dict(bias=array(2, 2, 9, 11)), ValueError, "bias"),
    (dict(bias=array(1, 2, 4, 9, 11)), ValueError, "bias"),
    (dict(bias=jnp.zeros((2, 4, 9, 11), jnp.int32)), TypeError, "bias"),
    (dict(mask=jnp.ones((2, 4, 9, 12), bool)), ValueError, "mask"),
    (dict(mask=jnp.ones((3, 1, 1, 11), bool)), ValueError, "mask"),
    (dict(mask=array(2, 4, 9, 11)), TypeError, "mask"),
    (dict(query_segment_ids=jnp.zeros((2, 9), jnp.int32)), ValueError, "segment"),
    (dict(key_value_segment_ids=jnp.zeros((2, 11), jnp.int32)), ValueError, "segment"),
    (
        dict(
            query_segment_ids=jnp.zeros((2, 9), jnp.int32),
            key_value_segment_ids=jnp.zeros((2, 9), jnp.int32),
        ),
        ValueError,
        "key_value_segment_ids",
    ),
    (
        dict(
            query_segment_ids=jnp.zeros((2, 9), jnp.float32),
            key_value_segment_ids=jnp.zeros((2, 11), jnp.int32),
        ),
        TypeError,
        "query_segment_ids",
    ),
    (dict(alibi_slopes=jnp.zeros(2, jnp.float32)), ValueError, "alibi_slopes"),
    (dict(alibi_slopes=jnp.zeros(4, jnp.int32)), TypeError, "alibi_slopes"),
    (dict(sinks=jnp.zeros((1, 4), jnp.float32)), ValueError, "sinks"),
    (dict(sinks=jnp.zeros(4, jnp.int32)), TypeError, "sinks"),
]

DECODE = [
    (decode_arguments(query=array(3, 4, 16)), ValueError, "query"),
    (decode_arguments(query=array(2, 1, 4, 16)), ValueError, "key_cache|seq_lens"),
    (decode_arguments(key_cache=array(3, 32, 3, 16)), ValueError, "key_cache|value_cache"),
    (decode_arguments(key_cache=array(3, 32, 2, 8)), ValueError, "key_cache"),
    (decode_arguments(value_cache=array(3, 31, 2, 16)), ValueError, "value_cache"),
    (decode_arguments(value_cache=array(3, 32, 16)), ValueError, "value_cache"),
    (decode_arguments(query=array(3, 1, 5, 16)), ValueError, "key_cache"),
    (decode_arguments(query=array(3, 1, 4, 16, dtype="int8")), TypeError, "query"),
    (decode_arguments(key_cache=array(3, 32, 2, 16, dtype="float32")), TypeError, "key_cache"),
    (decode_arguments(value_cache=array(3, 32, 2, 16, dtype="float32")), TypeError, "value_cache"),
    (decode_arguments(seq_lens=jnp.zeros((2,), jnp.int32)), ValueError, "seq_lens"),
    (decode_arguments(seq_lens=7), ValueError, "seq_lens"),
    (decode_arguments(seq_lens=jnp.zeros((3,), jnp.float32)), TypeError, "seq_lens"),
    (decode_arguments(layout="TBNH"), ValueError, "layout"),
    (decode_arguments(scale=float("inf")), ValueError, "scale"),
    (decode_arguments(local_window_size=-1), ValueError, "local_window_size"),
    (decode_arguments(local_window_size=(4, 1)), ValueError, "local_window_size"),
    (decode_arguments(logit_softcap=-1.0), ValueError, "logit_softcap"),
    (decode_arguments(sinks=jnp.zeros(2, jnp.float32)), ValueError, "sinks"),
    (decode_arguments(num_splits=-1), ValueError, "num_splits"),
    (decode_arguments(num_splits=2.0), (TypeError, ValueError), "num_splits"),
    (decode_arguments(num_splits=10**6), ValueError, "num_splits"),
    (decode_arguments(key_scale=jnp.ones(2, jnp.float32)), ValueError, "key_scale"),
    (decode_arguments(key_scale=[1.0, 1.0]), ValueError, "key_scale"),
    (latent_arguments(value_scale=[1.0, 1.0]), ValueError, "value_scale"),
    (paged_arguments(page_table=jnp.zeros((2, 4), jnp.int32)), ValueError, "page_table"),
    (paged_arguments(page_table=jnp.zeros((3,), jnp.int32)), ValueError, "page_table"),
    (paged_arguments(page_table=jnp.zeros((3, 4), jnp.float32)), TypeError, "page_table"),
    (paged_arguments(value_cache=array(9, 8, 2, 16)), ValueError, "value_cache"),
    (eight_bit_arguments(key_scale=None), ValueError, "key_scale"),
    (eight_bit_arguments(key_scale=jnp.ones(3, jnp.float32)), ValueError, "key_scale"),
    (eight_bit_arguments(value_scale=jnp.ones((3, 2), jnp.float32)), ValueError, "value_scale"),
    (
        eight_bit_arguments(value_cache=array(3, 32, 2, 16, dtype="float8_e4m3fn")),
        TypeError,
        "value_cache",
    ),
    (decode_arguments(value_dim=16), ValueError, "value_dim"),
    (latent_arguments(value_dim=None), ValueError, "value_dim"),
    (latent_arguments(value_dim=17), ValueError, "value_dim"),
    (latent_arguments(value_dim=0), ValueError, "value_dim"),
    (latent_arguments(key_cache=array(3, 32, 2, 8)), ValueError, "key_cache"),
    (
        latent_arguments(**{**eight_bit_arguments(), "value_cache": None}),
        ValueError,
        "value_scale",
    ),
]

MERGE = [
    (dict(outs=[], lses=[]), ValueError, "outs"),
    (dict(outs=[array(2, 3, 4, 8)], lses=[]), ValueError, "outs|lses"),
    (
        dict(outs=[array(2, 3, 4, 8), array(2, 3, 4, 9)], lses=[array(2, 3, 4)] * 2),
        ValueError,
        "outs",
    ),
    (dict(outs=[array(2, 3, 4, 8)] * 2, lses=[array(2, 4, 3)] * 2), ValueError, "lses"),
    (dict(outs=[array(2, 3, 4, 8, dtype="int32")], lses=[array(2, 3, 4)]), TypeError, "outs"),
    (dict(outs=[array(2, 3, 4, 8)], lses=[array(2, 3, 4)], layout="X"), ValueError, "layout"),
]


def _names(problems):
    return [f"{i}-{argument}" for i, (_, _, argument) in enumerate(problems)]


def refused(function, arguments, error, argument):
    """At trace time, so that nothing runs, and eagerly with the same message."""
    static = {n: x for n, x in arguments.items() if not isinstance(x, jax.Array)}
    traced = {n: x for n, x in arguments.items() if n not in static}
    for call in (
        lambda: jax.eval_shape(lambda traced: function(**traced, **static), traced),
        lambda: function(**arguments),
    ):
        with pytest.raises(error) as caught:
            call()
        message = str(caught.value)
        assert FORM.match(message), message
        operation, rest = message.split(": ", 1)
        assert operation == function.__name__, message
        assert re.match(argument, rest), message


@pytest.mark.parametrize("changes,error,argument", PREFILL, ids=_names(PREFILL))
def test_prefill(platform, changes, error, argument):
    refused(jax_flashattn.prefill, prefill_arguments(**changes), error, argument)


@pytest.mark.parametrize("arguments,error,argument", DECODE, ids=_names(DECODE))
def test_decode(platform, arguments, error, argument):
    refused(jax_flashattn.decode, arguments, error, argument)


@pytest.mark.parametrize("arguments,error,argument", MERGE, ids=_names(MERGE))
def test_merge(platform, arguments, error, argument):
    refused(jax_flashattn.merge, arguments, error, argument)


def test_the_good_arguments_are_good(platform):
    """The tests above refuse what they change, not what they start from."""
    jax_flashattn.prefill(**prefill_arguments())
    jax_flashattn.decode(**decode_arguments())
    jax_flashattn.decode(**paged_arguments())
    jax_flashattn.decode(**eight_bit_arguments())
    jax_flashattn.decode(**latent_arguments())


@pytest.mark.parametrize("unknown", ["is_causal", "window", "dropout"])
def test_unknown_arguments(platform, unknown):
    with pytest.raises(TypeError, match=unknown):
        jax_flashattn.prefill(**prefill_arguments(), **{unknown: 1})


def test_decode_has_no_gradient(platform):
    arguments = decode_arguments()
    query = arguments.pop("query")
    with pytest.raises(NotImplementedError, match="decode.*prefill"):
        jax.grad(lambda q: jax_flashattn.decode(q, **arguments).astype(jnp.float32).sum())(query)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtypes_without_a_gpu_kernel(platform, dtype):
    """float32 and float64 are the CPU's; on a GPU the error says what to do instead."""
    if platform.name == "cpu":
        pytest.skip("the CPU computes in every float dtype")
    with jax.enable_x64(dtype == "float64"):
        arrays = {n: x.astype(dtype) for n, x in prefill_arguments().items()}
        with pytest.raises(NotImplementedError, match="prefill.*float16 or bfloat16"):
            jax_flashattn.prefill(**arrays)


def test_platform_without_kernels(platform):
    """Lowered for a platform that we have nothing for."""
    arrays = tuple(prefill_arguments().values())
    with pytest.raises(NotImplementedError, match="flash_prefill|tpu"):
        jax.jit(jax_flashattn.prefill).trace(*arrays).lower(lowering_platforms=("tpu",))


def test_debug_reports_clamped_lengths(platform, capfd):
    lengths = jnp.asarray([3, 99], jnp.int32)
    jax.block_until_ready(
        jax_flashattn.prefill(**prefill_arguments(), key_value_seq_lengths=lengths, debug=True)
    )
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert "prefill" in printed and "key_value_seq_lengths" in printed and "99" in printed
    jax.block_until_ready(jax_flashattn.decode(**decode_arguments(), debug=True))
    jax.effects_barrier()
    assert "seq_lens" not in capfd.readouterr().out


# --- the custom calls themselves: what memory safety needs is checked again in C++


def raw_call(op, operands, results, attributes=None):
    """The custom call, past every check in Python."""
    kinds = _ffi.signature(op)["attributes"]
    defaults = dict(
        layout="BTNH",
        scale=1.0,
        softcap=0.0,
        window_left=2**31 - 1,
        window_right=2**31 - 1,
        bottom_right=True,
        deterministic=False,
        num_splits=0,
        batch_invariant=False,
    )
    given = {name: defaults.get(name) for name in kinds}
    given |= dict(operands=",".join(operands), results=",".join(results))
    given |= attributes or {}
    cast = {"float64": np.float64, "int32": np.int32, "bool": np.bool_, "string": str}
    given = {n: cast[kinds[n]](x) if n in kinds else x for n, x in given.items()}
    call = jax.ffi.ffi_call(_ffi.TARGETS[op], tuple(results.values()))
    return jax.block_until_ready(call(*operands.values(), **given))


def prefill_results(platform, dtype="float16"):
    results = dict(
        out=jax.ShapeDtypeStruct((2, 9, 4, 24), dtype),
        lse=jax.ShapeDtypeStruct((2, 9, 4), "float32"),
    )
    if platform.name == "gpu":
        results["workspace"] = jax.ShapeDtypeStruct((16,), "uint8")
    return results


def test_raw_call_works(platform):
    """The raw form below is the right one: with good operands it runs."""
    raw_call("prefill", prefill_arguments(), prefill_results(platform))


RAW = [
    dict(query=array(9, 4, 16)),
    dict(query=array(2, 8, 4, 16)),
    dict(query=array(2, 9, 5, 16)),
    dict(query=array(2, 9, 4, 32)),
    dict(key=array(2, 11, 3, 16)),
    dict(key=array(2, 12, 2, 16)),
    dict(value=array(2, 10, 2, 24)),
    dict(value=array(2, 11, 2, 16)),
    dict(value=array(2, 11, 2, 24, dtype="bfloat16")),
    dict(query=array(2, 9, 4, 16, dtype="int16")),
    dict(query_seq_lengths=jnp.zeros((3,), jnp.int32)),
    dict(key_value_seq_lengths=jnp.zeros((2,), jnp.int16)),
    dict(key_value_seq_lengths=jnp.zeros((2, 2), jnp.int32)),
    dict(bias=jnp.zeros((2, 4, 9, 10), jnp.float32)),
    dict(bias=jnp.zeros((2, 4, 9, 11), jnp.int32)),
    dict(mask=jnp.zeros((2, 4, 8, 11), bool)),
    dict(mask=jnp.zeros((2, 4, 9, 11), jnp.float32)),
    dict(sinks=jnp.zeros((1, 3), jnp.float32)),
    dict(alibi_slopes=jnp.zeros((1, 4), jnp.float16)),
    dict(
        query_segment_ids=jnp.zeros((2, 9), jnp.int32),
        key_value_segment_ids=jnp.zeros((2, 9), jnp.int32),
    ),
    dict(query_segment_ids=jnp.zeros((2, 9), jnp.int32)),
    dict(surprise=array(2, 2)),
]


@pytest.mark.parametrize("changes", RAW, ids=lambda c: "-".join(c))
def test_raw_call_with_bad_operands(platform, changes):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*prefill"):
        raw_call("prefill", prefill_arguments(**changes), prefill_results(platform))


def raw_workspace_calls():
    """(op, operands, results, floats or bytes of workspace) of calls that use some on a GPU."""
    forward = prefill_arguments()
    out, lse = array(2, 9, 4, 24), jnp.zeros((2, 9, 4), jnp.float32)
    mask = jnp.ones((2, 4, 9, 11), bool)
    shaped = dict(out=out, lse=lse)
    backward = forward | shaped | dict(dout=out)
    grads = dict(dquery=forward["query"], dkey=forward["key"], dvalue=forward["value"])
    split = decode_arguments(
        query=array(1, 1, 4, 16), seq_lens=jnp.full((1,), 7, jnp.int32),
        key_cache=array(1, 4096, 1, 16), value_cache=array(1, 4096, 1, 16),
    )  # fmt: skip
    decoded = dict(out=array(1, 1, 4, 16), lse=jnp.zeros((1, 1, 4), jnp.float32))
    cuda = _ffi.cuda()
    sizes = (2, 9, 4, 11, 2)
    return {
        "prefill": ("prefill", forward, shaped, cuda.prefill_workspace(9, 11, 4, 24, None), {}),
        "prefill-mask": (
            "prefill", forward | dict(mask=mask), shaped,
            cuda.prefill_workspace(9, 11, 4, 24, mask.shape), {},
        ),
        "backward": (
            "backward", backward, grads, cuda.backward_workspace(*sizes, 24, False, None), {},
        ),
        "backward-deterministic": (
            "backward", backward, grads, cuda.backward_workspace(*sizes, 24, True, None),
            dict(deterministic=True),
        ),
        "backward-mask": (
            "backward", backward | dict(mask=mask), grads,
            cuda.backward_workspace(*sizes, 24, False, mask.shape), {},
        ),
        "decode": (
            "decode", split, decoded, cuda.decode_workspace(1, 1, 4, 1, 16, 16),
            dict(num_splits=16),
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "call",
    ["prefill", "prefill-mask", "backward", "backward-deterministic", "backward-mask", "decode"],
)
def test_raw_call_with_a_small_workspace(platform, call):
    """What a kernel is given is compared with what it uses before any of it is written."""
    if platform.name == "cpu":
        pytest.skip("the CPU kernels have no workspace")
    op, operands, results, size, attributes = raw_workspace_calls()[call]
    if op == "prefill" and jax_flashattn.explain(op, **operands).kernel != "sm90":
        pytest.skip("only the Hopper prefill has a workspace")
    results = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in results.items()}
    dtype = "uint8" if op == "prefill" else "float32"

    def run(size):
        workspace = {"workspace": jax.ShapeDtypeStruct((size,), dtype)}
        return raw_call(op, operands, results | workspace, attributes)

    run(size)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{op}.*workspace"):
        run(size // 8)


@pytest.mark.parametrize("missing", ["query", "key", "value"])
def test_raw_call_with_missing_operands(platform, missing):
    operands = prefill_arguments()
    del operands[missing]
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        raw_call("prefill", operands, prefill_results(platform))


@pytest.mark.parametrize(
    "attributes",
    [
        dict(layout="XXXX"),
        dict(operands="query,value,key,mask"),
        dict(operands="query,key"),
        dict(results="lse"),
    ],
    ids=str,
)
def test_raw_call_with_bad_attributes(platform, attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        raw_call("prefill", prefill_arguments(), prefill_results(platform), attributes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(seq_lens=jnp.zeros((2,), jnp.int32)),
        dict(seq_lens=jnp.zeros((3,), jnp.float32)),
        dict(value_cache=array(3, 31, 2, 16)),
        dict(key_cache=array(3, 32, 2, 16, dtype="int8")),
        dict(page_table=jnp.zeros((2, 4), jnp.int32)),
        dict(sinks=jnp.zeros((1, 2), jnp.float32)),
    ],
    ids=lambda c: "-".join(c),
)
def test_raw_decode_with_bad_operands(platform, changes):
    results = dict(
        out=jax.ShapeDtypeStruct((3, 1, 4, 16), "float16"),
        lse=jax.ShapeDtypeStruct((3, 1, 4), "float32"),
    )
    if platform.name == "gpu":
        results["workspace"] = jax.ShapeDtypeStruct((1 << 16,), "float32")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        raw_call("decode", decode_arguments(**changes), results)


def test_raw_decode_wider_than_its_keys(platform):
    """Without values, as many of the keys' dimensions as the output has: more than they have."""
    results = dict(
        out=jax.ShapeDtypeStruct((3, 1, 4, 24), "float16"),
        lse=jax.ShapeDtypeStruct((3, 1, 4), "float32"),
    )
    arrays = {n: x for n, x in decode_arguments().items() if n != "value_cache"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*wider"):
        raw_call("decode", arrays, results)
