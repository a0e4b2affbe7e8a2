"""docs/recipes.md: every block of code runs as it stands, and does what the page says."""

import contextlib
import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flashattn as fa

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
SETUP = re.search(r"```python setup\n(.*?)```", PAGE, re.DOTALL)[1]
RECIPES = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.M | re.S))


@contextlib.contextmanager
def defaults():
    """jax as a reader has it, without the strictness of this test suite."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(title):
    """The names that the block defines."""
    code = RECIPES[title]
    for package in ("flax", "equinox"):
        if re.search(rf"^(import|from) {package}\b", code, re.M):
            pytest.importorskip(package, reason=f"{package} is not installed")
    names = {}
    exec(compile(SETUP + code, f"docs/recipes.md, {title}", "exec"), names)
    return names


def test_every_section_has_a_recipe():
    assert len(RECIPES) == len(re.findall(r"^## ", PAGE, re.M)) == PAGE.count("```python\n")
    for code in RECIPES.values():
        assert textwrap.dedent(code) == code and max(map(len, code.splitlines())) <= 100


@pytest.mark.parametrize("title", RECIPES)
def test_runs(platform, title):
    with defaults():
        names = run(title)
        result = names["gradient" if "gradient" in names else "y"]
        assert np.isfinite(np.asarray(result, np.float32)).all() and result.dtype == jnp.bfloat16


def test_equinox(platform):
    """The subclass computes what its base class does."""
    with defaults():
        names = run("equinox")
        layer, eqx = names["layer"], names["eqx"]
        x = jax.random.normal(jax.random.key(1), (16, 64), jnp.bfloat16)
        mask = jnp.tril(jnp.ones((16, 16), bool))
        expected = eqx.nn.MultiheadAttention.__call__(layer, x, x, x, mask=mask)
        np.testing.assert_allclose(*map(np.float32, (layer(x), expected)), atol=0.02)


def test_maxtext(platform):
    """Segments, window and soft cap are those of MaxText's masks."""
    with defaults():
        attention_op = run("MaxText")["attention_op"]
        rng = np.random.default_rng(0)
        q, k, v = (
            jnp.asarray(rng.standard_normal((1, 16, n, 64)) / 4, jnp.bfloat16) for n in (8, 2, 2)
        )
        ids = jnp.array([[1] * 9 + [2] * 7])
        out = attention_op(q, k, v, ids, 5.0, 4)
        i, j = np.arange(16)[:, None], np.arange(16)
        visible = (j <= i) & (j > i - 4) & (np.asarray(ids)[0][:, None] == np.asarray(ids)[0])
        q, k, v = (np.asarray(x, np.float64)[0] for x in (q, k, v))
        logits = np.einsum("tnh,snh->nts", q, k.repeat(4, axis=1))
        weights = np.exp(5 * np.tanh(logits / 5)) * visible
        expected = np.einsum(
            "nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v.repeat(4, axis=1)
        )
        np.testing.assert_allclose(np.float32(out[0]), expected, atol=0.01)


def test_ring_gradients(platform):
    with defaults():
        names = run("A sequence over several devices")
        operands = [names[x] for x in "qkv"]

        def gradients(attention):
            def loss(*operands):
                return (attention(*operands).astype(jnp.float32) ** 2).sum()

            return jax.grad(loss, argnums=(0, 1, 2))(*operands)

        for ours, expected in zip(
            gradients(names["attention"]), gradients(fa.prefill), strict=True
        ):
            scale = float(jnp.abs(expected).max())
            np.testing.assert_allclose(*map(np.float32, (ours, expected)), atol=0.02 * scale)


def test_latent_attention(platform):
    """The same as keys and values for every head, projected from the latent vectors."""
    with defaults():
        names = run("Multi-head latent attention")
        w, (q, q_rope, _) = names["w"], names["step"]
        latent, rotated = jnp.split(
            names["new_cache"].keys[:, :41, 0].astype(jnp.float32), [512], -1
        )
        rotated = jnp.broadcast_to(rotated[:, :, None], (*rotated.shape[:2], 16, 64))
        key = jnp.concatenate([jnp.einsum("bsc,ndc->bsnd", latent, w["key"]), rotated], axis=-1)
        value = jnp.einsum("bsc,ncd->bsnd", latent, w["value"])
        query = jnp.concatenate([q, q_rope], axis=-1).astype(jnp.float32)
        with jax.default_device(jax.devices("cpu")[0]):
            expected = fa.prefill(*jax.device_get((query, key, value)))
        np.testing.assert_allclose(*map(np.float32, (names["y"], expected)), atol=0.05, rtol=0.05)


def test_continuations(platform):
    """The same as decode over the prompt and the new tokens in one cache."""
    with defaults():
        names = run("Many continuations of one prompt")
        prompt, caches = names["prompt"], names["caches"]
        whole = [
            jnp.concatenate([jnp.repeat(p, 8, axis=0), c], axis=1)
            for p, c in zip(prompt, caches, strict=True)
        ]
        expected = fa.decode(names["q"], *whole, names["seq_lens"] + 100)
        np.testing.assert_allclose(*map(np.float32, (names["y"], expected)), atol=0.01)


def test_checkpointing(platform):
    """One forward kernel in the program of the gradient."""
    with defaults():
        names = run("Gradient checkpointing")
        loss = lambda w: names["layer"](w, names["x"]).sum(dtype=jnp.float32)  # noqa: E731
        program = str(jax.make_jaxpr(jax.grad(loss))(names["w"]))
        assert program.count("flash_prefill[") == 1 and program.count("flash_backward[") == 1
