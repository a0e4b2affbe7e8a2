"""What only the CPU kernels have: one compiled copy for each instruction set, tested on one machine."""

import pytest
from calls import check_decode, check_gradients, check_prefill
from cases import Case, DecodeCase

from jax_flashattn import _cpu

PREFILL = {
    "plain": Case(q_len=129, head_dim=64),
    "head dim of no vector": Case(q_len=50, head_dim=37, value_dim=19, kv_heads=1),
    "few rows": Case(q_len=3, kv_len=300, head_dim=40),
    "everything": Case(
        q_len=80,
        kv_len=113,
        window=(70, 9),
        softcap=20.0,
        q_lengths=(80, 33),
        kv_lengths=(113, 51),
        bias="B_TS",
        mask="__TS",
        segments=2,
        alibi=True,
        sinks=True,
        layout="BNTH",
    ),
}
DECODE = {
    "plain": DecodeCase(head_dim=64),
    "splits": DecodeCase(head_dim=40, num_splits=3),
    "pages": DecodeCase(head_dim=64, page_size=16, tokens=3),
    "int8": DecodeCase(head_dim=64, cache_dtype="int8"),
    "float8": DecodeCase(head_dim=64, cache_dtype="float8_e4m3fn", window=30, sinks=True),
}


@pytest.fixture(params=["avx512", "avx2", "generic"])
def instruction_set(request):
    best = _cpu.instruction_set()
    if request.param not in _cpu.instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    if request.param == best:
        pytest.skip("the one that every other test runs")
    _cpu.set_instruction_set(request.param)
    yield request.param
    _cpu.set_instruction_set(best)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", PREFILL)
def test_prefill(cpu, instruction_set, case, dtype):
    check_prefill(cpu, PREFILL[case].replace(dtype=dtype))
    check_gradients(cpu, PREFILL[case].replace(dtype=dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", DECODE)
def test_decode(cpu, instruction_set, case, dtype):
    check_decode(cpu, DECODE[case].replace(dtype=dtype))


def test_the_best_set_is_taken(cpu):
    assert _cpu.instruction_set() == _cpu.instruction_sets()[0]


def test_unknown_instruction_set(cpu):
    with pytest.raises(ValueError, match="no such instruction set"):
        _cpu.set_instruction_set("avx1024")
