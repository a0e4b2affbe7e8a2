"""decode over paged caches and 8-bit caches."""

import numpy as np
import pytest
import truth
from calls import check_decode, decode, xla_decode
from cases import RUBBISH_PAGE, DecodeCase, make_inputs
from check import check, check_lse, check_same, check_zero


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 8, 16, 17, 32, 64, 128, 200])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_page_sizes(platform, page_size, layout):
    lengths = (160, 1, 0, 129, 64)
    check_decode(platform, DecodeCase(lengths=lengths, page_size=page_size, layout=layout))


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 100])
def test_lengths_around_page_edges(platform, length):
    check_decode(platform, DecodeCase(lengths=(length, length + 1), page_size=16))


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 3])
def test_splits(platform, num_splits, tokens):
    case = DecodeCase(lengths=(300, 31, 2), capacity=320, page_size=16, tokens=tokens)
    check_decode(platform, case.replace(num_splits=num_splits))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim,value_dim", [(64, 64), (128, 128), (80, 80), (192, 128)])
def test_dtypes(platform, dtype, head_dim, value_dim):
    dims = dict(head_dim=head_dim, value_dim=value_dim)
    check_decode(platform, DecodeCase(page_size=16, dtype=dtype, **dims))


def test_features(platform):
    features = dict(window=70, softcap=15.0, sinks=True, scale=0.2, tokens=3)
    check_decode(platform, DecodeCase(lengths=(300, 90, 1), capacity=320, page_size=32, **features))


@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 128])
def test_latent(platform, page_size):
    case = DecodeCase(head_dim=576, value_dim=512, q_heads=16, kv_heads=1, latent=True)
    check_decode(platform, case.replace(page_size=page_size, lengths=(160, 0, 130)))


@pytest.mark.parametrize("page_size", [8, 32, 64])
@pytest.mark.parametrize("tokens", [1, 2])
def test_absent_pages_of_latent_caches(platform, page_size, tokens):
    """In the middle of a sequence and behind its end."""
    case = DecodeCase(head_dim=576, value_dim=512, q_heads=16, kv_heads=1, latent=True)
    case = platform.fit(
        case.replace(page_size=page_size, lengths=(300, 64), capacity=320, tokens=tokens)
    )
    arrays = make_inputs(case)
    arrays["page_table"][:, ::3] = RUBBISH_PAGE
    out, lse = decode(case, arrays)
    true_out, true_lse = truth.decode(**arrays, **case.options())
    check(out, true_out, xla_decode(case, arrays))
    check_lse(lse, true_lse)


def test_equals_contiguous(platform):
    """The same tokens in pages and in one piece."""
    case = platform.fit(DecodeCase(lengths=(150, 64, 3), page_size=16))
    arrays = make_inputs(case)
    paged_out, paged_lse = decode(case, arrays)
    pages = np.where(arrays["page_table"] == RUBBISH_PAGE, 0, arrays["page_table"])
    contiguous = {name: arrays[name] for name in ("query", "seq_lens")}
    for name in ("key_cache", "value_cache"):
        contiguous[name] = arrays[name][pages].reshape(3, 160, 2, 32)
    out, lse = decode(case.replace(page_size=None), contiguous)
    true_out, _ = truth.decode(**arrays)
    check(paged_out, true_out, out)
    check_lse(paged_lse, np.asarray(lse))


def test_order_of_pages_does_not_matter(platform):
    case = platform.fit(DecodeCase(lengths=(150, 64, 3), page_size=16))
    arrays = make_inputs(case)
    first = decode(case, arrays)
    pool = arrays["key_cache"].shape[0]
    order = np.random.default_rng(1).permutation(pool)
    moved = dict(arrays)
    for name in ("key_cache", "value_cache"):
        moved[name] = np.empty_like(arrays[name])
        moved[name][order] = arrays[name]
    used = arrays["page_table"] < pool
    index = np.where(used, arrays["page_table"], 0)
    moved["page_table"] = np.where(used, order[index], -1)
    moved["page_table"] = moved["page_table"].astype(np.int32)
    for once, again in zip(first, decode(case, moved), strict=True):
        check_same(again, once)


def test_shared_pages(platform):
    """Sequences with a common prefix point to the same pages."""
    case = platform.fit(DecodeCase(lengths=(100, 70, 64), page_size=16))
    arrays = make_inputs(case)
    arrays["page_table"][1:, :4] = arrays["page_table"][0, :4]
    out, lse = decode(case, arrays)
    true_out, true_lse = truth.decode(**arrays)
    check(out, true_out, xla_decode(case, arrays))
    check_lse(lse, true_lse)


@pytest.mark.parametrize("rubbish", [RUBBISH_PAGE, -1, -(2**31), 10**6])
def test_absent_pages(platform, rubbish):
    """An id outside the pool in the middle of a sequence: its tokens are absent, the rest stays."""
    case = platform.fit(DecodeCase(lengths=(100, 20), page_size=16))
    arrays = make_inputs(case)
    arrays["page_table"][0, 2] = rubbish
    arrays["page_table"][1, :] = rubbish
    out, lse = decode(case, arrays)
    true_out, true_lse = truth.decode(**arrays)
    assert np.isneginf(true_lse[1]).all() and np.isfinite(true_lse[0]).all()
    check(out, true_out, xla_decode(case, arrays))
    check_lse(lse, true_lse)


def test_length_beyond_the_table(platform):
    """A length counts at most max_pages * page_size tokens."""
    case = platform.fit(DecodeCase(lengths=(10**6, -5), capacity=48, page_size=16))
    check_decode(platform, case)
    arrays = make_inputs(case)
    check_zero(decode(case, arrays)[0][1])


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("page_size,scales", [(None, "head"), (16, "head"), (16, "page")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_8_bit_caches(platform, cache_dtype, page_size, scales, dtype):
    check_decode(
        platform,
        DecodeCase(
            lengths=(150, 1, 64),
            page_size=page_size,
            scales=scales,
            cache_dtype=cache_dtype,
            dtype=dtype,
            head_dim=64,
        ),
    )


def test_8_bit_cache_features(platform):
    features = dict(tokens=3, window=50, softcap=20.0, sinks=True, num_splits=3, layout="BNTH")
    case = DecodeCase(cache_dtype="float8_e4m3fn", dtype="bfloat16", page_size=16, **features)
    check_decode(platform, case)
