"""What Python sends and what C++ expects cannot drift apart."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import gradients
from cases import Case, DecodeCase, make_cotangents, make_inputs

import jax_flashattn
from jax_flashattn import _axes, _ffi

OPERATIONS = ("prefill", "backward", "decode")


def test_operations():
    assert set(_ffi.signature()) == set(OPERATIONS)
    assert set(_ffi.TARGETS) == set(OPERATIONS)
    assert set(jax_flashattn.CUSTOM_CALLS) == set(_ffi.TARGETS.values())
    for op, target in _ffi.TARGETS.items():
        assert re.fullmatch(rf"flashattn_{op}_v\d+", target)


@pytest.mark.skipif(_ffi.cuda_problem is not None, reason="this build has no CUDA kernels")
def test_cuda_and_cpu_have_one_signature():
    assert _ffi.cuda().signature() == _ffi.signature()
    assert set(_ffi.cuda().targets()) == set(_ffi.TARGETS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_buffer_has_axes(op):
    """Names in C++ are names in the one list of axes in Python."""
    native = _ffi.signature(op)
    for name, _ in native["operands"] + native["results"]:
        if name != "workspace":
            assert _axes.axes(name, "BTNH", paged=op == "decode")


def sent(function, *args):
    """Target -> (attributes, operand types, result types) of every custom call in the program."""
    text = jax.jit(function).lower(*args).as_text()
    calls = {}
    for target in jax_flashattn.CUSTOM_CALLS:
        for match in re.finditer(rf"custom_call @{target}\(.*", text):
            config = re.search(r"mhlo\.backend_config = \{([^}]*)\}", match[0])
            calls[target] = dict(re.findall(r'(\w+) = ("[^"]*"|true|false|[^,]+)', config[1]))
    return calls


def everything():
    """Calls that use every operand that there is."""
    case = Case(
        batch=2,
        q_len=9,
        q_lengths=(9, 3),
        kv_lengths=(9, 4),
        bias="BNTS",
        mask="BNTS",
        segments=2,
        sinks=True,
        alibi=True,
        softcap=3.0,
        window=(4, 4),
    )
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)

    def prefill(**arrays):
        return jax_flashattn.prefill(**arrays, return_lse=True, **case.options())

    calls = sent(lambda: gradients(prefill, arrays, dout, dlse))
    step = make_inputs(DecodeCase(page_size=8, cache_dtype="int8", scales="page", sinks=True))
    return calls | sent(lambda: jax_flashattn.decode(**step))


def test_attributes_and_buffers_sent_are_the_native_ones():
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        calls = everything()
    kinds = {"float64": r".*: f64", "int32": r".*: i32", "bool": "true|false", "string": '".*"'}
    for op, target in _ffi.TARGETS.items():
        native, given = _ffi.signature(op), calls[target]
        assert set(given) == set(native["attributes"]), op
        for name, kind in native["attributes"].items():
            assert re.fullmatch(kinds[kind], given[name].strip()), (op, name, given[name])
        operands = given["operands"].strip('"').split(",")
        assert set(operands) == {name for name, _ in native["operands"]}, op
        results = given["results"].strip('"').split(",")
        assert set(results) == {n for n, _ in native["results"]} - {"workspace"}, op


def good_call():
    case = Case(batch=1, q_len=5, head_dim=8, dtype="float32")
    arrays = {n: jnp.asarray(x) for n, x in make_inputs(case).items()}
    results = dict(
        out=jax.ShapeDtypeStruct(arrays["query"].shape, jnp.float32),
        lse=jax.ShapeDtypeStruct(arrays["query"].shape[:3], jnp.float32),
    )
    attributes = dict(
        layout="BTNH",
        scale=0.5,
        softcap=0.0,
        window_left=2**31 - 1,
        window_right=0,
        bottom_right=True,
    )
    return arrays, results, attributes


@pytest.fixture
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_call_by_names(on_cpu):
    """Operands in any order: the names decide."""
    arrays, results, attributes = good_call()
    expected = jax_flashattn.prefill(**arrays, scale=0.5)
    for order in (("value", "query", "key"), ("key", "value", "query")):
        outs = _ffi.call("prefill", {n: arrays[n] for n in order}, results, **attributes)
        np.testing.assert_array_equal(outs["out"], expected)


@pytest.mark.parametrize("change", ["missing", "extra", "renamed"])
def test_attributes_are_checked_in_python(on_cpu, change):
    arrays, results, attributes = good_call()
    if change != "extra":
        del attributes["softcap"]
    if change != "missing":
        attributes["soft_cap"] = 0.0
    with pytest.raises(TypeError, match="prefill: attributes.*native signature"):
        _ffi.call("prefill", arrays, results, **attributes)


def test_unknown_operands_are_refused_in_python(on_cpu):
    arrays, results, attributes = good_call()
    with pytest.raises(TypeError, match="prefill: operands.*keys"):
        _ffi.call("prefill", dict(arrays, keys=arrays["key"]), results, **attributes)
    results["logits"] = results["out"]
    with pytest.raises(TypeError, match="prefill: results.*logits"):
        _ffi.call("prefill", arrays, results, **attributes)


@pytest.mark.parametrize(
    "change,named",
    [
        (dict(softcap=None), "softcap"),
        (dict(soft_cap=np.float64(0)), "attribute"),
        (dict(softcap=np.float32(0)), "softcap"),
        (dict(window_left=np.int64(3)), "window_left"),
        (dict(layout=np.int32(1)), "layout"),
    ],
    ids=str,
)
def test_attributes_are_checked_natively(on_cpu, change, named):
    """Missing, extra and mistyped attributes of a raw call, named by the error."""
    arrays, results, attributes = good_call()
    casts = {"float64": np.float64, "int32": np.int32, "bool": np.bool_, "string": str}
    kinds = _ffi.signature("prefill")["attributes"]
    attributes |= dict(operands=",".join(arrays), results=",".join(results))
    attributes = {n: casts[kinds[n]](x) for n, x in attributes.items()}
    attributes = {n: x for n, x in {**attributes, **change}.items() if x is not None}
    call = jax.ffi.ffi_call(_ffi.TARGETS["prefill"], tuple(results.values()))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{named}"):
        jax.block_until_ready(call(*arrays.values(), **attributes))
