"""examples/train.py: it trains, tells what it measured, and notices attention that is wrong."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
MODEL = "--layers 2 --heads 4 --head-dim 32".split()
SMALL = [*MODEL, *"--length 64 --batch 8 --steps 8 --attention flash xla".split()]

pytest.importorskip("optax")


def run(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=600)


def test_train_compares_plots_and_dumps(tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("result.json", "curves.svg", "qk.npz")}
    done = run(
        "train.py", *SMALL, "--kv-heads", 2, "--json", files["result.json"],
        "--plot", files["curves.svg"], "--dump-qk", files["qk.npz"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(files["result.json"].read_text())
    assert result["runs"].keys() == {"flash", "xla"}
    for measured in result["runs"].values():
        assert measured["losses"][-1] < measured["losses"][0] - 0.5
        assert measured["tokens_per_second"] > 0
    assert 0 < result["runs"]["flash"]["distance"] <= result["allowed"]
    assert "<svg" in files["curves.svg"].read_text()
    check_dump(np.load(files["qk.npz"]))


def check_dump(dump):
    """The statistics against float64."""
    assert str(dump["dtype"]) == "bfloat16"
    bits = {name: dump[name].astype(np.uint32) << 16 for name in ("query", "key")}
    query, key = (bits[name].view(np.float32).astype(np.float64) for name in ("query", "key"))
    assert query.shape == (2, 64, 4, 32) and key.shape == (2, 64, 2, 32)
    logits = np.einsum("btnh,bsnh->btns", query, np.repeat(key, 2, 2)) * 32**-0.5
    logits = np.where(np.tril(np.ones((64, 64), bool))[:, None], logits, -np.inf)
    lse = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(dump["largest_logit"], logits.max(-1), atol=1e-5)
    np.testing.assert_allclose(dump["lse"], lse, atol=1e-5)
    np.testing.assert_allclose(dump["first_weight"], np.exp(logits[..., 0] - lse), atol=1e-5)


def test_train_refuses_another_loss_curve():
    """Attention to nothing but oneself lowers the loss as well, but on another curve."""
    wrong = (
        "import functools, sys, train, jax_flashattn as fa; "
        "train.ATTENTION['flash'] = functools.partial(fa.prefill, local_window_size=(0, 0)); "
        f"sys.argv[1:] = {SMALL}; train.main()"
    )
    done = run("-c", wrong)
    assert done.returncode == 1, done.stdout
    assert "not the loss curve of xla: flash" in done.stderr
