"""The building blocks of the Hopper kernels, one by one: TMA, its swizzle, wgmma, the barrier ring;
and the features of the Hopper forward and backward at the edges of their tiles.

They run on a Hopper GPU only.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
import xla
from calls import check_decode, check_gradients, check_prefill, gradients, prefill, xla_prefill
from cases import Case, DecodeCase, make_cotangents, make_inputs
from check import check, check_gradient, check_lse, check_same, check_zero

import jax_flashattn
from jax_flashattn import _ffi

pytestmark = pytest.mark.gpu

MODES = {  # name: (a is stored K x M, b is stored K x N)
    "shared": (False, False),
    "shared_a_mn_major": (True, False),
    "shared_b_mn_major": (False, True),
    "shared_both_mn_major": (True, True),
    "registers": (False, False),
    "registers_b_mn_major": (False, True),
}


@pytest.fixture(autouse=True)
def hopper():
    devices = [d for d in jax.devices() if d.platform == "gpu"]
    if not devices or not str(devices[0].compute_capability).startswith("9."):
        pytest.skip("no Hopper GPU")


@pytest.fixture
def generic(request):
    """A context in which calls get the kernels for every GPU."""

    @contextlib.contextmanager
    def limited():
        _ffi.cuda().limit_architecture(80)
        yield
        _ffi.cuda().limit_architecture(request.config.getoption("--architecture"))

    return limited


def address(x):
    return jax.block_until_ready(x).unsafe_buffer_pointer()


def small_integers(rng, *shape):
    return rng.integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize("n", [64, 96, 128])
@pytest.mark.parametrize("mode", MODES)
def test_wgmma(mode, n):
    """Every descriptor mode and both fragment maps, on integers: the answer is exact."""
    rng = np.random.default_rng(0)
    a, b = small_integers(rng, 64, 128), small_integers(rng, 128, n)
    a_transposed, b_as_given = MODES[mode]
    a_device = jnp.asarray(a.T if a_transposed else a, jnp.bfloat16)
    b_device = jnp.asarray(b if b_as_given else b.T, jnp.bfloat16)
    d = jnp.full((64, n), jnp.nan, jnp.float32)
    rounded = jnp.full((64, n), jnp.nan, jnp.bfloat16)
    pointers = [address(x) for x in (a_device, b_device, d, rounded)]
    _ffi.cuda().selftest_wgmma(list(MODES).index(mode), n, *pointers)
    np.testing.assert_array_equal(np.asarray(d), a @ b)
    expected = np.asarray(jnp.asarray(a @ b).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(rounded), expected)


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_tma_swizzle(head_dim, group):
    """A packed load puts rows (position, head) where the swizzle says, zeros beyond the tensor."""
    positions, heads, position, group_index = 80, 2 * group, 5, 1
    rng = np.random.default_rng(0)
    x = jnp.asarray(small_integers(rng, positions, heads, head_dim), jnp.bfloat16)
    chunks, box = -(-head_dim // 64), 64 // group
    raw = jnp.full((chunks, 64, 64), jnp.nan, jnp.bfloat16)
    _ffi.cuda().selftest_tma(
        address(x), address(raw), positions, heads, head_dim, group, position, group_index
    )
    padded = np.zeros((positions + 64, heads, chunks * 64), np.float32)
    padded[:positions, :, :head_dim] = np.asarray(x, np.float32)
    rows = padded[position : position + box, group_index * group : (group_index + 1) * group]
    rows = rows.reshape(box * group, chunks, 8, 8)
    expected = np.zeros((chunks, 64, 8, 8), np.float32)
    for row in range(box * group):
        for piece in range(8):  # 16 bytes each
            expected[:, row, piece ^ (row % 8)] = rows[row, :, piece]
    np.testing.assert_array_equal(np.asarray(raw, np.float32), expected.reshape(chunks, 64, 64))


@pytest.mark.parametrize("tiles", [1, 2, 3, 9])
def test_barrier_ring(tiles):
    rng = np.random.default_rng(0)
    x = small_integers(rng, tiles, 64, 64)
    total = jnp.full((64, 64), jnp.nan, jnp.float32)
    device = jnp.asarray(x.reshape(-1, 64), jnp.bfloat16)
    _ffi.cuda().selftest_ring(address(device), address(total), tiles)
    np.testing.assert_array_equal(np.asarray(total), x.sum(0))


# ---- features of the forward

on_gpu = pytest.mark.parametrize("platform", ["gpu"], indirect=True)
LONG = Case(batch=1, q_len=450, q_heads=2, kv_heads=1, head_dim=128, dtype="bfloat16")


def check_sm90(platform, case):
    """The call is the Hopper kernel's, and right."""
    arrays = make_inputs(case)
    operands = [arrays.pop(name) for name in ("query", "key", "value")]
    explanation = jax_flashattn.explain("prefill", *operands, **arrays, **case.options())
    assert explanation.kernel == "sm90", explanation
    check_prefill(platform, case)


@on_gpu
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 193, 257])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_window_edges(platform, size, causal, head_dim):
    """Windows that begin and end at, before and after the edges of blocks."""
    case = LONG.replace(head_dim=head_dim, causal=causal)
    check_sm90(platform, case.replace(window=(size, 0 if causal else size)))
    check_sm90(platform, case.replace(window=(None, 0) if causal else (None, size), sinks=True))


@on_gpu
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "features",
    [
        dict(window=(200, 0)),
        dict(sinks=True, kv_lengths=(400,), q_lengths=(333,)),
        dict(segments=3),
        dict(mask="B_TS"),
        dict(mask="B__S", causal=False),
        dict(softcap=30.0),
        dict(softcap=1.0, window=(100, 20), causal=False),
        dict(alibi=True),
        dict(alibi=True, softcap=20.0, segments=4, mask="BNTS", sinks=True, window=(300, 0)),
    ],
    ids="-".join,
)
def test_features_in_every_kernel(platform, head_dim, dtype, features):
    check_sm90(platform, LONG.replace(head_dim=head_dim, dtype=dtype, **features))


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "features",
    [
        dict(bias="BNTS"),
        dict(bias="B__S", causal=False),
        dict(bias="_NTS", window=(200, 40), causal=False, sinks=True),
        dict(bias="BNTS", softcap=20.0, alibi=True, segments=4, mask="B_TS", kv_lengths=(333,)),
    ],
    ids="-".join,
)
def test_bias_in_every_kernel(platform, head_dim, dtype, features):
    case = LONG.replace(q_len=456, head_dim=head_dim, dtype=dtype)
    check_sm90(platform, case.replace(**features))


@on_gpu
@pytest.mark.parametrize("bias", ["BNTS", "_NTS", "B_TS", "__TS", "BN_S", "_N_S", "B__S", "___S"])
@pytest.mark.parametrize("lengths", [(450, 456), (64, 128), (129, 136), (1, 264), (7, 8)])
@pytest.mark.parametrize("causal", [True, False])
def test_bias_of_every_shape(platform, bias, lengths, causal):
    """Lengths at and off the edges of tiles, also shorter than one; heads of a group, never packed."""
    q_len, kv_len = lengths
    case = LONG.replace(batch=2, q_len=q_len, kv_len=kv_len, q_heads=4, causal=causal, bias=bias)
    check_sm90(platform, case)
    check_sm90(platform, case.replace(layout="BNTH", q_lengths=(q_len, q_len // 2)))


@on_gpu
@pytest.mark.parametrize(
    "mask", ["BNTS", "_NTS", "B_TS", "__TS", "BN_S", "B__S", "BNT_", "B_T_", "_N__", "____"]
)
@pytest.mark.parametrize("lengths", [(450, 464), (129, 333), (7, 8)])
def test_mask_of_every_shape(platform, mask, lengths):
    """Rows of bytes that can be read 16 at a time and that cannot, in whole tiles and in parts."""
    q_len, kv_len = lengths
    case = LONG.replace(batch=2, q_len=q_len, kv_len=kv_len, q_heads=4, causal=False, mask=mask)
    check_sm90(platform, case)
    check_sm90(platform, case.replace(head_dim=64, layout="BNTH", q_lengths=(q_len, q_len // 2)))


@on_gpu
@pytest.mark.parametrize(
    "features", [dict(softcap=20.0), dict(alibi=True), dict(mask="B_TS"), dict(segments=3)]
)
def test_bias_beside_another_feature(platform, features):
    check_sm90(platform, LONG.replace(q_len=456, bias="BNTS", **features))


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bias", ["BNTS", "B__S"])
@pytest.mark.parametrize("features", [{}, dict(softcap=20.0)])
@pytest.mark.parametrize("late", [25.0, 300.0, 3e4])
def test_bias_that_outgrows_the_first_block(platform, dtype, bias, features, late):
    """Raised references and recomputed scores: a bias that is much larger for the blocks met last."""
    case = LONG.replace(q_len=456, dtype=dtype, bias=bias, causal=False, **features)
    arrays = make_inputs(case)
    arrays["bias"][..., :200] += np.asarray(late, arrays["bias"].dtype)
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_infinite_and_missing_biases(platform, dtype, causal):
    """-inf is a mask, a row of it alone is empty; NaN makes the rows that see it NaN, and no other."""
    case = LONG.replace(q_len=456, dtype=dtype, bias="_NTS", causal=causal)
    arrays = make_inputs(case)
    rng = np.random.default_rng(5)
    arrays["bias"][rng.random(arrays["bias"].shape) < 0.3] = -np.inf
    arrays["bias"][..., 300:, 200:] = -np.inf
    arrays["bias"][:, :, 17] = -np.inf
    arrays["bias"][:, :, 40, 3] = np.nan
    arrays["bias"][:, :, 430, 100] = np.nan
    out, lse = prefill(case, arrays)
    assert np.isnan(out[:, [40, 430]]).all() and np.isnan(lse[:, [40, 430]]).all()
    arrays["bias"][:, :, [40, 430]] = -np.inf
    true_out, true_lse = truth.attention(**arrays, **case.options())
    assert np.isneginf(true_lse[:, 17]).all()
    others = np.delete(np.arange(456), [40, 430])
    draws = [draw[:, others] for draw in xla_prefill(case, arrays)]
    check(out[:, others], true_out[:, others], draws)
    check_lse(lse[:, others], true_lse[:, others])


@on_gpu
@pytest.mark.parametrize("mapped", ["bias", "others", "all"])
def test_vmap_over_a_bias(platform, mapped):
    case = LONG.replace(q_len=136, bias="_NTS")
    entries = [make_inputs(case, seed=seed) for seed in range(3)]
    axes = {name: 0 if mapped == "all" or (name == "bias") == (mapped == "bias") else None
            for name in entries[0]}  # fmt: skip
    stacked = {
        name: np.stack([e[name] for e in entries]) if axis == 0 else entries[0][name]
        for name, axis in axes.items()
    }
    ours = jax.vmap(lambda x: jax_flashattn.prefill(**x), in_axes=(axes,))(stacked)
    for i in range(3):
        one = {n: x[i] if axes[n] == 0 else x for n, x in stacked.items()}
        check_same(ours[i], prefill(case, one)[0])


@on_gpu
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("q_len,kv_len", [(70, 700), (700, 70), (129, 513)])
@pytest.mark.parametrize("window", [(128, 0), (60, 130), (None, 64), (257, None)])
def test_windows_across_lengths(platform, alignment, q_len, kv_len, window):
    case = LONG.replace(q_len=q_len, kv_len=kv_len, alignment=alignment, causal=False)
    check_sm90(platform, case.replace(batch=2, window=window, kv_lengths=(kv_len, kv_len // 3)))


@on_gpu
@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (40, 5)])
def test_window_and_sinks_of_packed_heads(platform, heads):
    """Short queries: the heads of a group share a tile's rows, each with its own sink."""
    q_heads, kv_heads = heads
    case = LONG.replace(q_len=9, kv_len=300, q_heads=q_heads, kv_heads=kv_heads)
    check_sm90(platform, case.replace(window=(140, 0), sinks=True))


@on_gpu
def test_blocks_without_a_visible_key_are_not_read(platform):
    """More than 32 blocks, of which most hold NaN that nobody sees; segments in falling order."""
    case = LONG.replace(q_len=5000, q_heads=1, causal=False)
    arrays = make_inputs(case, poison=False)
    ids = (5000 - np.arange(5000))[None] // 300
    arrays["query_segment_ids"] = ids.astype(np.int32)
    arrays["key_value_segment_ids"] = np.where(ids % 2 == 0, ids, -1).astype(np.int32)
    hidden = ids[0] % 2 == 1
    arrays["key"][:, hidden] = arrays["value"][:, hidden] = np.nan
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, causal=False)
    assert np.isneginf(true_lse).any() and np.isfinite(true_lse).any()
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("mask", ["B__S", "B_TS"])
def test_sparse_mask(platform, mask, head_dim, causal, softcap):
    """Blocks without a visible key, with one, with some, with all, far apart among more than 64."""
    case = LONG.replace(
        batch=2, q_len=130, kv_len=9000, q_heads=1, head_dim=head_dim, causal=causal
    )
    case = case.replace(mask=mask, kv_lengths=(9000, 7777), softcap=softcap)
    arrays = make_inputs(case, poison=False)
    mask = arrays["mask"]
    mask[...] = False
    mask[..., ::1003] = True
    mask[..., 4000:4600] = True
    mask[0, ..., 8990:] = True
    mask[1, ..., 6000:6500:3] = True
    mask[..., ::2, 2000:2100] = True  # of every other row, if there are several
    hidden = ~mask.any((0, 1, 2)).reshape(-1, 8).any(1).repeat(8)
    arrays["key"][:, hidden] = arrays["value"][:, hidden] = np.nan
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


@on_gpu
@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0])
@pytest.mark.parametrize(
    "features",
    [
        dict(window=(300, 0)),
        dict(softcap=50.0),
        dict(segments=2),
        dict(mask="B__S"),
        dict(mask="B__S", causal=False, dtype="float16", head_dim=64),
    ],
    ids="-".join,
)
def test_any_size_of_scores(platform, spread, features):
    """Scores that outgrow the first block's, also where a row meets its first key late."""
    case = LONG.replace(**features)
    arrays = make_inputs(case)
    arrays["key"] = (arrays["key"] * np.linspace(spread, 1, 450)[:, None, None]).astype(
        arrays["key"].dtype
    )
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


@on_gpu
def test_features_repeat_bit_by_bit(platform):
    case = LONG.replace(batch=4, q_heads=8, window=(200, 0), softcap=30.0, sinks=True, segments=3)
    arrays = make_inputs(case)
    first = prefill(case, arrays)
    for _ in range(20):
        for a, b in zip(prefill(case, arrays), first, strict=True):
            check_same(a, b)


@on_gpu
@pytest.mark.parametrize(
    "head_dim,value_dim",
    [(64, None), (96, None), (128, None), (192, 128), (192, None), (256, None)],
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_many_tiles_of_few_blocks(platform, head_dim, value_dim, causal, ragged):
    """Several tiles a multiprocessor, some without a key: no sequence sees its neighbours."""
    lengths = (0, 1, 500, 130, 256, 499) * 4 if ragged else None
    case = LONG.replace(batch=24, q_len=500, q_heads=8, kv_heads=8, head_dim=head_dim)
    case = case.replace(value_dim=value_dim, causal=causal, kv_lengths=lengths)
    arrays = make_inputs(case)
    out, lse = prefill(case, arrays)
    backwards = {name: x[::-1].copy() for name, x in arrays.items()}
    backwards_out, backwards_lse = prefill(case, backwards)
    check_same(backwards_out[::-1], out)
    check_same(backwards_lse[::-1], lse)
    for b in (0, 7, 10, 23):
        one = {name: x[b : b + 1] for name, x in arrays.items()}
        case_of_one = case.replace(batch=1, kv_lengths=lengths and lengths[b : b + 1])
        true_out, true_lse = truth.attention(**one, **case.options())
        check(out[b : b + 1], true_out, xla_prefill(case_of_one, one))
        check_lse(lse[b : b + 1], true_lse)


# ---- few tiles: both warpgroups work on the rows of the longest ones

FEW = LONG.replace(head_dim=64)
FEW_128, FEW_FULL = FEW.replace(head_dim=128), FEW.replace(causal=False)
SPLIT = "takes every other block of keys"


def check_split(platform, case):
    arrays = make_inputs(case)
    operands = [arrays.pop(name) for name in ("query", "key", "value")]
    explanation = jax_flashattn.explain("prefill", *operands, **arrays, **case.options())
    assert SPLIT in explanation.details, explanation
    check_prefill(platform, case)


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "few,lengths",
    [
        *itertools.product(
            [FEW.replace(head_dim=40), FEW],
            [(129, 129), (256, 256), (257, 257), (500, 500), (1024, 1024), (300, 1111), (1111, 300),
             (64, 2000), (1, 1500), (700, 383), (640, 704)],
        ),
        *itertools.product([FEW_128, FEW_FULL], [(257, 257), (300, 1111), (1111, 300)]),
    ],
    ids=str,
)  # fmt: skip
def test_split_tiles(platform, few, lengths, dtype):
    q_len, kv_len = lengths
    case = few.replace(q_len=q_len, kv_len=kv_len, dtype=dtype)
    check_split(platform, case)
    check_split(platform, case.replace(alignment="top_left", layout="BNTH"))
    ragged = dict(q_lengths=(q_len, q_len // 2 + 1, q_len), kv_lengths=(kv_len, kv_len - 60, 0))
    check_split(platform, case.replace(batch=3, **ragged))


@on_gpu
@pytest.mark.parametrize(
    "few,heads,lengths",
    [
        *itertools.product(
            [FEW], [(8, 1), (7, 1), (6, 2), (40, 5)], [(9, 300), (20, 1500), (33, 2049)]
        ),
        *itertools.product([FEW_128], [(8, 1), (7, 1)], [(33, 2049)]),
        *itertools.product([FEW_FULL], [(8, 1), (7, 1)], [(133, 900)]),
    ],
    ids=str,
)
def test_split_tiles_of_packed_heads(platform, few, heads, lengths):
    q_heads, kv_heads = heads
    q_len, kv_len = lengths
    case = few.replace(batch=2, q_len=q_len, kv_len=kv_len, q_heads=q_heads, kv_heads=kv_heads)
    check_split(platform, case)
    check_split(platform, case.replace(q_lengths=(q_len, 7), kv_lengths=(kv_len, kv_len // 2)))


@on_gpu
@pytest.mark.parametrize(
    "few,q_len,q_heads",
    [
        (FEW, 1024, 14),
        (FEW, 2048, 12),
        (FEW, 512, 16),
        (FEW, 700, 33),
        (FEW_128, 1024, 8),
        (FEW_128, 512, 16),
        (FEW_FULL, 512, 16),
        (FEW_FULL, 1024, 14),
    ],
    ids=str,
)
def test_split_tiles_beside_whole_ones(platform, few, q_len, q_heads):
    """As many heads as leave only the longest tiles split, and blocks with two tiles; full masks
    split all of them or none.
    """
    check_split(platform, few.replace(q_len=q_len, q_heads=q_heads))


@on_gpu
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(
    "few,key",
    [(FEW, key) for key in (0, 127, 128, 500, 640, 699)] + [(FEW_128, 500), (FEW_FULL, 500)],
    ids=str,
)
def test_nan_in_a_split_tile(platform, name, few, key):
    """It reaches exactly the rows that see it, whichever warpgroup has its block."""
    case = few.replace(q_len=700)
    arrays = make_inputs(case)
    measure = xla_prefill(case, arrays)  # without the NaN: XLA's products would spread it
    arrays[name][0, key, 0, 5] = np.nan
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, measure)
    check_lse(lse, true_lse)


@on_gpu
@pytest.mark.parametrize(
    "few,lengths,block,size",
    [
        *itertools.product(
            [FEW, FEW.replace(dtype="float16")], [(700, 700), (700, 760)], [0, 1, 4], [5.0, 60.0]
        ),
        *itertools.product([FEW_128, FEW_FULL], [(700, 760)], [1, 4], [60.0]),
    ],
    ids=str,
)
def test_split_tiles_with_different_references(platform, few, lengths, block, size):
    """Scores that are far larger in the blocks of one of the warpgroups than in the other's."""
    q_len, kv_len = lengths
    case = few.replace(q_len=q_len, kv_len=kv_len)
    arrays = make_inputs(case)
    arrays["key"][:, block * 128 : (block + 1) * 128] *= np.asarray(size, arrays["key"].dtype)
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


@on_gpu
@pytest.mark.parametrize(
    "few,q_len,heads",
    [(FEW, 1024, 14), (FEW, 2048, 12), (FEW_128, 1024, 8), (FEW_FULL, 512, 16)],
    ids=str,
)
def test_split_tiles_repeat_in_fifty_runs(platform, few, q_len, heads):
    q, k, v = random_arrays(*3 * [(1, q_len, heads, few.head_dim)])
    attend = jax.jit(lambda q: jax_flashattn.prefill(q, k, v, causal=few.causal, return_lse=True))
    same_in_fifty_runs(lambda: attend(q))


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "few,lengths",
    [
        *itertools.product([FEW.replace(head_dim=40), FEW], [(129, 129), (260, 450), (450, 260)]),
        (FEW_128, (260, 450)),
        (FEW_FULL, (600, 450)),
    ],
    ids=str,
)
def test_many_short_tiles(platform, few, lengths, dtype):
    """More of them than are split."""
    q_len, kv_len = lengths
    case = few.replace(batch=26, q_len=q_len, kv_len=kv_len, q_heads=4, kv_heads=2, dtype=dtype)
    check_sm90(platform, case)
    lengths = dict(q_lengths=(q_len, 40) * 13, kv_lengths=(kv_len - 60, kv_len) * 13)
    check_sm90(platform, case.replace(**lengths))


# ---- features of the backward


def check_gradients_sm90(platform, case, poison=True, **extra):
    """The gradients are the Hopper kernels', and right."""
    arrays = make_inputs(case) | case.options() | extra
    operands = [arrays.pop(name) for name in ("query", "key", "value")]
    explanation = jax_flashattn.explain("prefill", *operands, gradient=True, **arrays)
    assert explanation.kernel == "sm90", explanation
    check_gradients(platform, case, poison=poison, **extra)


BOTH_WAYS = [(64, False), (64, True), (128, False), (128, True), (256, False)]


@on_gpu
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 112, 128, 129, 257])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim,deterministic", BOTH_WAYS)
def test_window_edges_of_gradients(platform, size, causal, head_dim, deterministic):
    """Windows that begin and end at, before and after the edges of blocks of keys and of queries."""
    case = LONG.replace(head_dim=head_dim, causal=causal, window=(size, 0 if causal else size))
    check_gradients_sm90(platform, case, deterministic=deterministic)


@on_gpu
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("q_len,kv_len", [(70, 700), (700, 70)])
@pytest.mark.parametrize("window", [(128, 0), (60, 130), (257, None), (3, 3)])
@pytest.mark.parametrize("head_dim,deterministic", BOTH_WAYS)
def test_windows_across_lengths_of_gradients(
    platform, alignment, q_len, kv_len, window, head_dim, deterministic
):
    """Also keys before every window and queries past the keys: what nobody sees is NaN."""
    case = LONG.replace(q_len=q_len, kv_len=kv_len, alignment=alignment, causal=False)
    case = case.replace(batch=2, window=window, kv_lengths=(kv_len, kv_len // 3))
    case = case.replace(head_dim=head_dim, sinks=True)
    check_gradients_sm90(platform, case, deterministic=deterministic)


@on_gpu
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "features",
    [
        dict(window=(200, 0), q_len=390, kv_len=500),
        dict(sinks=True, q_len=500, kv_len=390, kv_lengths=(333,)),
        dict(sinks=True, window=(100, 20), causal=False, layout="BNTH", q_heads=6, kv_heads=2),
        dict(softcap=20.0),
        dict(alibi=True, causal=False, q_len=390, kv_len=500, kv_lengths=(444,)),
        dict(softcap=2.0, alibi=True, sinks=True, window=(150, 0), q_heads=6, kv_heads=2),
    ],
    ids="-".join,
)
def test_features_in_every_kernel_of_gradients(platform, head_dim, dtype, features):
    check_gradients_sm90(platform, LONG.replace(head_dim=head_dim, dtype=dtype, **features))


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [(100, 0), (40, 60)])
def test_window_of_many_heads(platform, head_dim, window):
    """More than a GPU works on at a time: blocks that pass on what others have made ready."""
    case = LONG.replace(batch=16, q_len=140, q_heads=10, kv_heads=10, head_dim=head_dim)
    case = case.replace(causal=window[1] == 0, window=window, sinks=True)
    check_gradients_sm90(platform, case)
    check_gradients_sm90(platform, case.replace(kv_lengths=(130, 0, 1, 129) * 4))


# What hides pairs anywhere. With NaN where nobody looks the generic kernels do the work, without it
# these do.
HIDING = [
    dict(segments=3),
    dict(segments=5, causal=False, q_len=390, kv_len=500),
    dict(segments=40, sinks=True, layout="BNTH", q_heads=6, kv_heads=2),
    dict(segments=4, sinks=True, window=(200, 0), kv_lengths=(400,), q_lengths=(333,)),
    dict(segments=4, softcap=20.0, alibi=True, sinks=True, window=(300, 0)),
    dict(mask="BNTS", q_heads=6, kv_heads=2),
    dict(mask="B__S", causal=False, q_len=390, kv_len=500, layout="BNTH"),
    dict(mask="_NT_", sinks=True, kv_lengths=(400,), q_lengths=(333,)),
    dict(mask="B_TS", segments=4, softcap=20.0, alibi=True, window=(300, 0), q_len=448),
]


@on_gpu
@pytest.mark.parametrize(
    "head_dim,deterministic", [*BOTH_WAYS, (64, True), (96, False), (192, False)]
)
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("features", HIDING, ids="-".join)
def test_hidden_pairs_of_gradients(platform, head_dim, deterministic, poison, features):
    case = LONG.replace(head_dim=head_dim, **features)
    check_gradients_sm90(platform, case, poison=poison, deterministic=deterministic)


@on_gpu
@pytest.mark.parametrize("padding", [0, 150])
@pytest.mark.parametrize("order", [1, -1])
def test_segments_of_many_steps_of_gradients(platform, padding, order):
    """Documents in rising and falling order, most steps of a block without one of its own."""
    case = LONG.replace(batch=2, q_len=1500, q_heads=1, head_dim=64)
    arrays = make_inputs(case)
    ids = np.sort(np.random.default_rng(3).integers(1, 30, (2, 1500)), axis=1)[:, ::order]
    ids[:, 1500 - padding :] = 0
    ids = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids.astype(np.int32))
    dout, dlse = make_cotangents(case)
    attend = functools.partial(jax_flashattn.prefill, return_lse=True)
    ours = gradients(attend, arrays | ids, dout, dlse)
    expected = truth.gradients(dout, dlse, **arrays, **ids)
    measure = xla.gradients(dout, dlse, **arrays, **ids)
    _, lse = truth.attention(**arrays, **ids)
    for name in ours:
        check_gradient(ours[name], expected[name], measure[name], name, case.dtype, lse)


@on_gpu
@pytest.mark.parametrize("shape", ["BNTS", "BN_S", "B___"])
@pytest.mark.parametrize("head_dim,deterministic", [*BOTH_WAYS, (64, True)])
def test_sparse_mask_of_gradients(platform, head_dim, deterministic, shape):
    """Blocks without a visible pair, heads of a group that see nothing at all, rows without a key."""
    case = LONG.replace(batch=2, q_heads=6, kv_heads=2, head_dim=head_dim, mask=shape)
    arrays = make_inputs(case, poison=False)
    mask = arrays["mask"]
    mask[...] = True
    mask[..., 130:380] = False
    mask[:, 1:2] = mask[:, 3:] = False
    mask[:, :, 40:300] &= np.arange(mask.shape[3]) % 7 == 0
    mask[1, ..., :5] = False
    dout, dlse = make_cotangents(case)
    attend = functools.partial(jax_flashattn.prefill, return_lse=True, deterministic=deterministic)
    ours = gradients(attend, arrays, dout, dlse)
    expected = truth.gradients(dout, dlse, **arrays)
    measure = xla.gradients(dout, dlse, **arrays)
    _, lse = truth.attention(**arrays)
    for name in ours:
        check_gradient(ours[name], expected[name], measure[name], name, case.dtype, lse)


@on_gpu
@pytest.mark.parametrize("head_dim,deterministic", [*BOTH_WAYS, (64, True), (192, False)])
def test_what_is_not_finite_leaves_gradients_to_generic_kernels(
    platform, generic, head_dim, deterministic
):
    """One such value, which nobody sees, and the bits are the generic ones; else not."""
    case = LONG.replace(head_dim=head_dim)
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    ids = (np.arange(450) >= 200).astype(np.int32)[None]
    alone = (np.arange(450) == 201).astype(np.int32)
    options = dict(query_segment_ids=ids + 2 * alone, key_value_segment_ids=ids + 3 * alone)
    options |= dict(return_lse=True, deterministic=deterministic)
    operands = dict(arrays, dout=dout)

    @jax.jit
    def residuals(query, key, value):
        return jax.vjp(functools.partial(jax_flashattn.prefill, **options), query, key, value)[1]

    @jax.jit
    def gradients_of(pull, dout):
        return pull((dout, dlse))

    def is_generic(**changed):
        given = operands | changed
        # Of one forward: the generic one rounds in another way.
        pull = jax.block_until_ready(residuals(*(given[n] for n in ("query", "key", "value"))))
        ours = jax.block_until_ready(gradients_of(pull, given["dout"]))
        with generic():
            others = jax.block_until_ready(gradients_of(pull, given["dout"]))
        for x in ours:
            check_zero(x, np.s_[:, 201])
            assert np.isfinite(x).all()
        return all(np.array_equal(*pair) for pair in zip(ours, others, strict=True))

    assert not is_generic()
    for name, x in operands.items():
        for value in (np.nan, np.inf):
            changed = x.copy()
            changed[:, 201, -1, 3] = value
            assert is_generic(**{name: changed}), (name, value)


# ---- The same bits in 50 runs, at lengths where blocks of one call finish in any order.


def same_in_fifty_runs(call):
    """The comparison is the device's: what differs from the first run is counted there."""
    first = call()
    differ = jax.jit(
        lambda a, b: sum(
            (
                jax.lax.bitcast_convert_type(x, word(x)) != jax.lax.bitcast_convert_type(y, word(y))
            ).sum()
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    )
    assert [int(differ(first, call())) for _ in range(49)] == [0] * 49


def word(x):
    return {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]


def random_arrays(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spread", [1, 64])  # with 64, blocks switch to the running maximum
def test_prefill_repeats_in_fifty_runs(platform, head_dim, causal, spread):
    q, k, v = random_arrays(*3 * [(2, 4096, 2048 // head_dim, head_dim)])
    attend = jax.jit(
        lambda q: jax_flashattn.prefill(q * spread, k, v, causal=causal, return_lse=True)
    )
    same_in_fifty_runs(lambda: attend(q))


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"local_window_size": (600, 0)}], ids=str
)
@pytest.mark.parametrize(
    "batch,length,heads,kv_heads",
    [(1, 4096, 4, 2), (2, 1000, 24, 24), (1, 20000, 1, 1)],  # the last: more blocks than processors
)
def test_deterministic_gradients_repeat_in_fifty_runs(
    platform, head_dim, options, batch, length, heads, kv_heads
):
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = random_arrays(*shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(deterministic, q, k, v):
        attend = functools.partial(jax_flashattn.prefill, deterministic=deterministic, **options)
        return jax.vjp(attend, q, k, v)[1](dout)

    same_in_fifty_runs(lambda: gradients(True, q, k, v))
    both = gradients(True, q, k, v), gradients(False, q, k, v)
    for ours, default in zip(*both, strict=True):
        ours, default = ours.astype(jnp.float32), default.astype(jnp.float32)
        assert jnp.linalg.norm(ours - default) < 5e-3 * jnp.linalg.norm(default)


@on_gpu
@pytest.mark.parametrize("batch, length, kv_heads", [(1, 131072, 8), (3, 8192, 2), (64, 1024, 8)])
def test_decode_repeats_in_fifty_runs(platform, batch, length, kv_heads):
    q, k, v = random_arrays((batch, 1, 32, 128), *2 * [(batch, length, kv_heads, 128)])
    lengths = jnp.asarray([length - 7 * i for i in range(batch)], jnp.int32)
    attend = jax.jit(lambda q: jax_flashattn.decode(q, k, v, lengths, return_lse=True))
    same_in_fifty_runs(lambda: attend(q))


# ---- The kernels for every GPU, on this one too. `pytest -m gpu --architecture 80` runs all tests so.


@pytest.fixture
def generic_kernels(generic):
    with generic():
        yield


GENERIC_CASES = [
    Case(head_dim=64, q_len=130, kv_len=200, q_heads=4, kv_heads=2),
    Case(head_dim=96, q_len=65, kv_len=129, causal=False),
    Case(head_dim=128, q_len=257, kv_len=257, layout="BNTH"),
    Case(head_dim=192, q_len=100, kv_len=64, causal=False),
    Case(head_dim=256, q_len=129, kv_len=190),
]


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", GENERIC_CASES, ids=str)
def test_generic_kernels(platform, generic_kernels, case, dtype):
    check_prefill(platform, case.replace(dtype=dtype))
    check_gradients(platform, case.replace(dtype=dtype))


@on_gpu
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_generic_decode(platform, generic_kernels, head_dim, num_splits):
    case = DecodeCase(
        lengths=(1, 300, 700), capacity=700, head_dim=head_dim, dtype="bfloat16",
        num_splits=num_splits,
    )  # fmt: skip
    check_decode(platform, case)


# ---- Keys and values of different head dims: the tiles are those of the wider one, or for both.


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dims", [(192, 128), (136, 72), (128, 64), (64, 128), (40, 72), (96, 200), (256, 64)], ids=str
)
def test_value_dims(platform, dims, causal):
    case = Case(
        q_len=150, kv_len=270, q_heads=4, kv_heads=2, head_dim=dims[0], value_dim=dims[1],
        causal=causal, dtype="bfloat16",
    )  # fmt: skip
    check_sm90(platform, case)
    check_sm90(platform, case.replace(sinks=True, kv_lengths=(270, 33)))
    check_gradients(platform, case)
    check_gradients(platform, case.replace(q_lengths=(150, 7), kv_lengths=(270, 33)))
