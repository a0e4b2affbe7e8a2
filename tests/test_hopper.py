"""The building blocks of the Hopper kernels, one by one: TMA, its swizzle, wgmma, the barrier ring.

They run on a Hopper GPU only, and take a second.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
