"""On a GPU, XLA captures the custom calls in command buffers (CUDA graphs) and replays them."""

import os
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import jax_flashattn as fa

def step(q, k, v, lens):
    out = fa.prefill(q, k, v)
    grads = jax.grad(lambda q: fa.prefill(q, k, v).sum(dtype=jnp.float32))(q)
    new = fa.decode(out[:, -1:], k, v, lens)
    return out, grads, new

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(x, (2, 256, 4, 64), jnp.bfloat16) for x in keys)
lens = jnp.array([256, 100], jnp.int32)
compiled = jax.jit(step).lower(q, k, v, lens).compile()
first = jax.tree.map(np.asarray, compiled(q, k, v, lens))
for _ in range(5):  # the first runs capture, later ones replay
    again = compiled(q, k, v, lens)
for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again)):
    np.testing.assert_allclose(np.float32(a), np.float32(b), atol=1e-2)
np.testing.assert_array_equal(np.float32(first[0]), np.float32(again[0]))
print("replayed")
"""

# The attention of a whole step of decoding, with XLA's own choice of what to capture.
STEP_OF_24_LAYERS = """
import jax, jax.numpy as jnp, numpy as np
import jax_flashattn as fa

def step(q, caches, lens):
    for k, v in caches:
        q = fa.decode(q, k, v, lens)
    return q

keys = jax.random.split(jax.random.key(0), 49)
q = jax.random.normal(keys[0], (2, 1, 8, 64), jnp.bfloat16)
arrays = [jax.random.normal(x, (2, 512, 2, 64), jnp.bfloat16) for x in keys[1:]]
lens = jnp.array([512, 100], jnp.int32)
compiled = jax.jit(step).lower(q, list(zip(arrays[::2], arrays[1::2])), lens).compile()
first = compiled(q, list(zip(arrays[::2], arrays[1::2])), lens)
for _ in range(5):
    again = compiled(q, list(zip(arrays[::2], arrays[1::2])), lens)
np.testing.assert_array_equal(np.float32(first), np.float32(again))
print("replayed")
"""


def dumps_of(script, flags, directory) -> dict[str, str]:
    """{name: text} of what XLA dumps about the function `step` of a script that prints "replayed"."""
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("no gpu device")
    flags = f"{flags} --xla_dump_to={directory} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*step.*"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "replayed" in run.stdout
    return {path.name: path.read_text(errors="replace") for path in directory.rglob("*.txt")}


def test_captured_and_replayed(tmp_path):
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    dumps = dumps_of(SCRIPT, flags, tmp_path)
    # XLA makes command buffers of HLO computations, in newer versions of its thunks.
    assert any("CommandBuffer" in text or "command_buffer" in text for text in dumps.values())


def test_a_step_of_24_layers_is_captured_by_default(tmp_path):
    """None of its calls is left outside the command buffer, in the list of thunks that XLA runs."""
    dumps = dumps_of(STEP_OF_24_LAYERS, "", tmp_path)
    thunks = [text for name, text in dumps.items() if "thunk_sequence" in name]
    if not thunks:
        pytest.skip("this XLA dumps no list of its thunks")
    outer = [line for line in thunks[-1].splitlines() if line and not line[0].isspace()]
    assert any("CommandBuffer" in line for line in outer), thunks[-1][:3000]
    assert not any("CustomCall" in line for line in outer), thunks[-1][:3000]
