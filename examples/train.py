"""Trains a small GPT on Python's standard library, once with each implementation of attention.

    python examples/train.py --length 4096 --attention flash cudnn --plot loss.svg

All start from the same parameters and see the same text in the same order. Tokens per second leave out
compilation and the first steps. One more run, the twin, is the reference (the last of the list) with
the values scaled by 1.3 and the result by 1 / 1.3: the same mathematics, rounded differently. The
distance of the twin's loss curve from the reference's is what rounding does to this training; if an
implementation's is more than LIMIT times as much, the program ends with an error.
"""

import argparse
import datetime
import functools
import json
import pathlib
import sys
import sysconfig
import time

import dump
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_flashattn as fa

ATTENTION = {
    "flash": fa.prefill,  # causal by default
    "cudnn": functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    ),
    # Its probabilities, (B, N, T, T) in each layer, are computed again for the gradients: to keep
    # those of all layers would take 69 GB at T 16384, 16 heads, 8 layers.
    "xla": jax.checkpoint(
        functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    ),
}
DEFAULTS = {
    "gpu": {"length": 4096, "tokens": 16384, "layers": 8, "heads": 16, "head_dim": 64},
    "cpu": {"length": 128, "tokens": 1024, "layers": 4, "heads": 4, "head_dim": 32},
}
LIMIT = 3  # two implementations each round in their own way, and one twin is one sample
SEED = 0
HELD_OUT = 20  # one file in so many is not trained on


def parse() -> argparse.Namespace:
    defaults = DEFAULTS[jax.default_backend()]
    usable = [name for name in ATTENTION if jax.default_backend() == "gpu" or name != "cudnn"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", choices=[*usable, "all"], default=usable[:2])
    parser.add_argument("--length", type=int, default=defaults["length"], help="T, in bytes")
    parser.add_argument("--batch", type=int, help=f"{defaults['tokens']} bytes a step by default")
    parser.add_argument("--layers", type=int, default=defaults["layers"])
    parser.add_argument("--heads", type=int, default=defaults["heads"])
    parser.add_argument("--kv-heads", type=int, help="as many as heads by default")
    parser.add_argument("--head-dim", type=int, default=defaults["head_dim"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="the curves and rates")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="the curves as a figure")
    parser.add_argument("--commit", help="what was built, for the file")
    parser.add_argument(
        "--dump-qk", type=pathlib.Path, metavar="FILE", help="q and k on held-out text, as .npz"
    )
    options = parser.parse_args()
    options.batch = options.batch or max(1, defaults["tokens"] // options.length)
    options.kv_heads = options.kv_heads or options.heads
    if "all" in options.attention:
        options.attention = usable
    return options


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's modules (their documentation is in them), and of some more."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if "site-packages" not in f.parts]
    held_out = files[::HELD_OUT]
    training = [f for f in files if f not in set(held_out)]
    return tuple(
        np.frombuffer(b"".join(f.read_bytes() for f in part), np.uint8)
        for part in (training, held_out)
    )


def inputs_of(text):
    """The tokens from which the model is to tell `text` (B, T): shifted by one, with a NUL in front."""
    return jnp.pad(text[:, :-1], ((0, 0), (1, 0)))


def make_optimizer(shape: gpt.Shape, steps: int):
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0,
        peak_value=0.01 * shape.width**-0.5,
        warmup_steps=max(1, steps // 10),
        decay_steps=steps,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


def make_step(options, attend, optimizer):
    def loss_of(params, text):
        logits, _ = gpt.forward(params, inputs_of(text), attend)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, text).mean()

    def step(state, corpus, number):
        params, optimizer_state = state
        key = jax.random.fold_in(jax.random.key(SEED), number)
        starts = jax.random.randint(key, (options.batch,), 0, corpus.size - options.length)
        window = functools.partial(jax.lax.dynamic_slice_in_dim, corpus, slice_size=options.length)
        text = jax.vmap(window)(starts).astype(jnp.int32)
        loss, gradients = jax.value_and_grad(loss_of)(params, text)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    # Donated: the new parameters and moments are written over the old ones.
    return jax.jit(step, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(shape: gpt.Shape, steps: int):
    """The state before the first step: parameters, and the optimizer's moments."""
    params = gpt.init(shape, jax.random.key(SEED))
    return params, make_optimizer(shape, steps).init(params)


def train(name, options, corpus, attend) -> tuple[dict, dict]:
    """What was measured, and the trained parameters."""
    shape = gpt.Shape(options.layers, options.heads, options.kv_heads, options.head_dim)
    state = start(shape, options.steps)
    step = make_step(options, attend, make_optimizer(shape, options.steps))
    step = step.lower(state, corpus, 0).compile()

    losses, first_timed = [], min(5, options.steps - 1)
    for number in range(options.steps):
        if number == first_timed:
            jax.block_until_ready(state)
            begin = time.perf_counter()
        state, loss = step(state, corpus, number)
        losses.append(loss)  # not read yet: the device goes on without waiting for Python
        if number % max(1, options.steps // 10) == 0:
            print(f"{name:>8}  step {number:4}  loss {float(loss):.4f}", flush=True)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - begin
    tokens = (options.steps - first_timed) * options.batch * options.length
    measured = {
        "tokens_per_second": tokens / seconds,
        "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
        "losses": np.asarray(jax.device_get(losses)).tolist(),
    }
    return measured, state[0]


def rounded_again(attend):
    # The barrier keeps XLA from multiplying in float32 and skipping the rounding.
    return lambda q, k, v: attend(q, k, jax.lax.optimization_barrier(1.3 * v)) / 1.3


def distance(run: dict, reference: dict) -> float:
    """Between two loss curves: root mean square over the steps, smoothed so that what remains is drift."""
    difference = np.subtract(run["losses"], reference["losses"])
    width = max(1, len(difference) // 16)
    smooth = np.convolve(difference, np.ones(width) / width, "valid")
    return float(np.sqrt(np.mean(smooth**2)))


def allowed_distance(options, reference: dict, twin: dict) -> float:
    """LIMIT times what rounding does: to the training, which the twin tells, or to the loss itself.

    The loss of one token is known to half a unit in the last place of bfloat16, the mean of n of them
    to 1 / sqrt(n) of that. It counts in the first few steps, while the twin may still be too near.
    """
    unit = float(jnp.finfo(jnp.bfloat16).eps) / 2
    of_the_loss = unit * np.mean(reference["losses"]) / (options.batch * options.length) ** 0.5
    return LIMIT * max(distance(twin, reference), of_the_loss)


def plot(path, runs: dict, reference: str, twin: dict):
    from matplotlib import pyplot

    figure, (curves, differences) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    base = np.array(runs[reference]["losses"])
    for name, run in runs.items():
        curves.plot(run["losses"], label=name, linewidth=1)
        if name != reference:
            differences.plot(run["losses"] - base, label=f"{name} - {reference}", linewidth=1)
    differences.plot(
        twin["losses"] - base, color="gray", label=f"{reference}, twin - {reference}", linewidth=1
    )
    curves.set(xlabel="step", ylabel="loss, nats per byte")
    differences.set(xlabel="step", ylabel="difference of losses")
    curves.legend(), differences.legend()
    figure.savefig(path)


def main():
    options = parse()
    training, held_out = read_text()
    corpus = jnp.asarray(training)
    runs = {}
    for name in options.attention:
        runs[name], params = train(name, options, corpus, ATTENTION[name])
        if name == options.attention[0] and options.dump_qk:
            text = jnp.asarray(held_out[None, : options.length], jnp.int32)
            dump.queries_and_keys(options.dump_qk, params, inputs_of(text))
        del params
    reference = options.attention[-1]
    twin, _ = train("twin", options, corpus, rounded_again(ATTENTION[reference]))
    allowed = allowed_distance(options, runs[reference], twin)
    for name, run in runs.items():
        run["distance"] = distance(run, runs[reference])
        print(
            f"{name:>8}  {run['tokens_per_second']:10,.0f} tokens/s  "
            f"{run['temporary_bytes'] / 2**30:6.2f} GiB temporary  "
            f"distance from {reference} {run['distance']:.1e}, allowed {allowed:.1e}"
        )
    if options.json:
        settings = {name: x for name, x in vars(options).items() if not isinstance(x, pathlib.Path)}
        device = jax.devices()[0]
        meta = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
        meta |= {"date": datetime.date.today().isoformat(), "commit": options.commit}
        result = {"meta": meta, "settings": settings, "reference": reference, "allowed": allowed}
        result |= {"runs": runs, "twin": twin}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(options.plot, runs, reference, twin)
    failed = [name for name, run in runs.items() if not run["distance"] <= allowed]
    if failed:
        sys.exit(f"not the loss curve of {reference}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
