"""What is measured. The names of the axes are those of jax.nn: B, T, S, N, K, H."""

from __future__ import annotations

import dataclasses
import os
import random

import numpy as np

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
SHORT_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table. `features` holds (name, value) pairs; inputs.py makes their arrays, and the
    queries and keys that `data` names in place of random normal ones."""

    benchmark: str  # the operation: prefill, backward or decode
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str = "bfloat16"
    causal: bool = False
    features: tuple[tuple[str, object], ...] = ()
    data: tuple[str, object] | None = None

    @property
    def name(self) -> str:
        parts = [SHORT_DTYPE[self.dtype], f"B{self.B}"]
        if self.benchmark != "decode" or self.T > 1:
            parts.append(f"T{self.T}")
        if self.benchmark == "decode" or self.S != self.T:
            parts.append(f"S{self.S}")
        parts += [f"N{self.N}", f"K{self.K}", f"H{self.H}"]
        if self.benchmark != "decode":
            parts.append("causal" if self.causal else "full")
        parts += [name if value is True else f"{name}={value}" for name, value in self.features]
        if self.benchmark == "backward" and self.features:  # in a table beside prefill
            parts.append("gradients")
        if self.data:
            name, value = self.data
            parts.append(f"{name}={os.path.basename(value) if name == 'file' else value}")
        return " ".join(parts)

    def feature(self, name: str, default=None):
        return dict(self.features).get(name, default)

    @property
    def lengths(self) -> list[int]:
        """Of the keys of each sequence; with the feature `lengths`, ragged."""
        if self.feature("lengths") is None:
            return [self.S] * self.B
        least = self.S // 16 if self.benchmark == "decode" else self.S // 4
        generator = random.Random(1)
        return [generator.randint(least, self.S) for _ in range(self.B)]

    @property
    def value_dim(self) -> int:
        """Head dim of the values; in decode they are then the first dimensions of the keys."""
        return self.feature("value_dim", self.H)

    @property
    def layers(self) -> int:
        """How many calls one after the other, each over its own cache, make one step."""
        return self.feature("layers", 1)

    @property
    def visible_pairs(self) -> float:
        """(query, key) pairs of all sequences, by head; causal counts as half, as usual."""
        window, segments = self.feature("window"), self.feature("segments")
        if self.benchmark == "decode":
            return self.T * self._visited_keys
        if window is not None and window < self.S:
            return self.B * (self.T * (window + 1) - window * (window + 1) / 2)
        part = (0.5 if self.causal else 1) / (segments or 1)
        if self.feature("lengths"):  # which are the lengths of the queries too
            return part * sum(length * length for length in self.lengths)
        return part * self.B * self.T * self.S

    @property
    def flops(self) -> float:
        """Two matrix products forward; the backward pass counts two and a half times as much."""
        forward = 2 * self.N * (self.H + self.value_dim) * self.visible_pairs * self.layers
        return 3.5 * forward if self.benchmark == "backward" else forward

    @property
    def cache_bytes(self) -> int:
        return self.B * self.S * self._key_bytes

    @property
    def bytes(self) -> int:
        """What must cross the memory bus: in decode the cache, else every operand and result."""
        if self.benchmark == "decode":
            return self._visited_keys * self._key_bytes * self.layers
        query_and_out = (
            self.B * self.T * self.N * (self.H + self.value_dim) * ITEM_BYTES[self.dtype]
        )
        forward = query_and_out + self.cache_bytes
        if self.feature("bias"):
            forward += self.N * self.T * self.S * ITEM_BYTES[self.dtype]
        return 2 * forward if self.benchmark == "backward" else forward

    @property
    def score_bytes(self) -> int:
        """The matrix of scores in float32, which an attention without tiles writes to memory."""
        return 4 * self.B * self.N * self.T * self.S

    @property
    def _visited_keys(self) -> int:
        """Of all sequences in decode."""
        window = self.feature("window")
        longest = self.S if window is None else window + self.T
        return sum(min(length, longest) for length in self.lengths)

    @property
    def _key_bytes(self) -> int:
        """Of one key and its value, all heads."""
        inside = self.benchmark == "decode" and self.feature("value_dim")
        dims = self.H if inside else self.H + self.value_dim
        return self.K * dims * ITEM_BYTES[self.feature("cache", self.dtype)]

    def describe(self) -> dict:
        """The fields of a result row that say what was measured."""
        shape = {axis: getattr(self, axis) for axis in "BTSNKH"}
        row = {"case": self.name, "operation": self.benchmark, **shape}
        row |= {"dtype": self.dtype, "causal": self.causal}
        return row | ({"features": dict(self.features)} if self.features else {})


def prefill_cases() -> list[Case]:
    cases = []
    for head_dim in (128, 64, 256):
        heads = 2048 // head_dim
        for batch, length in ((32, 512), (8, 2048), (4, 4096), (1, 16384)):
            for causal in (False, True):
                cases.append(_prefill(batch, length, heads, heads, head_dim, causal=causal))
    return cases + [
        _prefill(4, 4096, 16, 16, 128, "float16"),
        _prefill(1, 2048, 12, 12, 64, "float16"),
        _prefill(4, 4096, 32, 8, 128),
        _prefill(1, 1024, 14, 2, 64),
    ]


DISTRIBUTIONS = (
    None,
    ("query_scale", 4),
    ("query_scale", 16),
    ("query_scale", 64),
    ("key_ramp", 6),
    ("key_ramp", 60),
    ("key_blocks", 16),
    ("key_blocks", 128),
)


def distribution_cases() -> list[Case]:
    """One shape on data that a softmax may find hard; the result and its speed should not."""
    return [
        dataclasses.replace(_prefill(4, 4096, heads, heads, head_dim, causal=causal), data=data)
        for heads, head_dim in ((16, 128), (32, 64))
        for causal in (False, True)
        for data in DISTRIBUTIONS
    ]


def cases_of_file(path: str) -> list[Case]:
    """The queries and keys that examples/train.py --dump-qk wrote, whose layers are the batch, and random
    ones of the same shape."""
    with np.load(path) as file:
        (layers, length, heads, head_dim), kv_heads = file["query"].shape, file["key"].shape[2]
        plain = _prefill(layers, length, heads, kv_heads, head_dim, str(file["dtype"]))
    return [plain, dataclasses.replace(plain, data=("file", path))]


def backward_cases() -> list[Case]:
    return [
        _gradients(batch, length, heads, heads, head_dim, causal=causal)
        for heads, head_dim in ((16, 128), (32, 64), (8, 256))
        for batch, length in ((8, 2048), (2, 8192))
        for causal in (False, True)
    ]


DECODE_SHAPES = (
    (1, 1024, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (32, 8192, 32, 8, 128),
    (128, 2048, 32, 8, 128),
    (8, 4096, 32, 32, 128),
    (8, 8192, 64, 8, 128),
    (1, 2048, 14, 2, 64),
    (16, 4096, 14, 2, 64),
    (8, 2048, 12, 12, 64),
    (8, 8192, 8, 1, 256),
)


def decode_cases() -> list[Case]:
    return [_decode(*shape) for shape in DECODE_SHAPES]


def decode_variant_cases() -> list[Case]:
    """The rows of decode with the other dtype, the other layout and ragged lengths."""
    return (
        [_decode(*shape, dtype="float16") for shape in DECODE_SHAPES]
        + [_decode(*shape, features=(("layout", "BNTH"),)) for shape in DECODE_SHAPES]
        + [_decode(*shape, features=(("lengths", "random"),)) for shape in DECODE_SHAPES]
    )


def decode_step_cases() -> list[Case]:
    """The attention of a whole model for one token: 24 layers under one jit, with their own caches."""
    shapes = (
        (1, 2048, 14, 2, 64),
        (8, 4096, 14, 2, 64),
        (1, 1024, 32, 8, 128),
        (1, 8192, 32, 8, 128),
        (8, 1024, 32, 8, 128),
    )
    return [_decode(*shape, features=(("layers", 24),)) for shape in shapes]


def feature_cases() -> list[Case]:
    """Each feature beside the plain call of the same shape, then the gradients of some."""
    plain = (2, 8192, 16, 16, 128)
    prefill = [
        _prefill(*plain),
        _prefill(*plain, features=(("softcap", 50.0),)),
        _prefill(*plain, features=(("sinks", True),)),
        _prefill(*plain, features=(("alibi", True),)),
        _prefill(*plain, features=(("bias", True),)),
        _prefill(*plain, features=(("mask", True),)),
        _prefill(*plain, features=(("lengths", "random"),)),
        _prefill(*plain, features=(("segments", 64),)),
        _prefill(*plain, causal=False),
        _prefill(*plain, causal=False, features=(("mask", True),)),  # of padding
        _prefill(*plain, causal=False, features=(("mask", "rows"),)),  # each query its own
        _prefill(1, 16384, 16, 16, 128),
        _prefill(1, 16384, 16, 16, 128, features=(("window", 1024),)),
    ]
    # DeepSeek-V3's heads as it trains and reads prompts, beside values as wide as the keys.
    wide = (2, 8192, 16, 16, 192)
    prefill += [_prefill(*wide), _prefill(*wide, features=(("value_dim", 128),))]
    # gpt-oss: a token sees itself and the 127 before it.
    gpt_oss = (1, 8192, 64, 8, 64)
    prefill += [_prefill(*gpt_oss), _prefill(*gpt_oss, features=(("window", 127), ("sinks", True)))]
    # Their plain rows are in the table of gradients.
    gradients = [
        _gradients(*plain, features=(("sinks", True),)),
        _gradients(*plain, features=(("window", 1024),)),
        _gradients(*plain, features=(("segments", 64),)),
        _gradients(*plain, features=(("softcap", 50.0),)),
        _gradients(*plain, features=(("alibi", True),)),
        _gradients(*plain, causal=False, features=(("mask", "rows"),)),
        _gradients(2, 8192, 8, 8, 256, features=(("window", 1024),)),
        _gradients(1, 16384, 16, 16, 128, features=(("window", 1024),)),
        _gradients(*gpt_oss, features=(("window", 127), ("sinks", True))),
    ]
    return prefill + gradients


def decode_feature_cases() -> list[Case]:
    """What decode promises beside the plain call, then DeepSeek's latent attention."""
    decode = []
    for batch in (1, 32):
        shape = (batch, 8192, 32, 8, 128)
        decode += [
            _decode(*shape),
            _decode(*shape, features=(("page", 16),)),
            _decode(*shape, features=(("window", 1024),)),
            _decode(*shape, features=(("cache", "float8_e4m3fn"),)),
            _decode(*shape, features=(("cache", "int8"),)),
            _decode(*shape, tokens=4),
        ]
    # Multi-head latent attention as DeepSeek decodes it: one key, whose first part is the value. 66
    # sequences are one for every two multiprocessors of an H200.
    return decode + [
        _decode(batch, 8192, 128, 1, 576, features=(("value_dim", 512),)) for batch in (1, 32, 66)
    ]


def naive_cases() -> list[Case]:
    """GPT-2's shape beside the attention that writes its scores to memory."""
    lengths = (1024, 2048, 4096, 8192)
    return [_prefill(1, length, 12, 12, 64, "float16") for length in lengths]


def counter_cases() -> list[Case]:
    """Those of the tables whose kernels counters.py looks into."""
    prefill = [
        case
        for case in prefill_cases()
        if case.T in (512, 16384) and case.N == case.K and case.dtype == "bfloat16"
    ]
    features = ("softcap", "window", "mask")
    featured = [
        case
        for case in feature_cases()
        if case.benchmark == "prefill" and case.features and case.features[0][0] in features
    ]
    backward = [
        case for case in backward_cases() if case.T == 8192 or (case.H == 128 and case.causal)
    ]
    shapes = ((1, 8192, 32, 8, 128), (32, 8192, 32, 8, 128), (1, 2048, 14, 2, 64))
    return [*prefill, *featured, *backward, *(_decode(*shape) for shape in shapes)]


def counter_group(case: Case) -> str:
    """The cases of one run of ncu."""
    return "features" if case.benchmark == "prefill" and case.features else case.benchmark


def generic_counter_cases() -> list[Case]:
    """Where the kernels for every GPU are looked into as well."""
    return [
        case
        for case in counter_cases()
        if case.benchmark == "prefill" and (case.H, case.T) == (64, 16384) and not case.features
    ]


def numerics_cases() -> list[Case]:
    """Error over length, up to a million tokens; nothing is timed."""
    lengths = (1024, 4096, 16384, 131072, 1048576)
    return [
        _prefill(1, length, 1, 1, 128, dtype, causal=causal)
        for dtype in ("bfloat16", "float16")
        for causal in (False, True)
        for length in lengths
    ]


def cpu_numerics_cases() -> list[Case]:
    """As many keys, but few queries: the rows that are looked at, and no more, need computing."""
    lengths = (1024, 4096, 16384, 65536, 262144, 1048576)
    return [
        Case("prefill", 1, 128, length, 1, 1, 128, dtype)
        for dtype in ("float32", "bfloat16")
        for length in lengths
    ]


def cpu_cases() -> list[Case]:
    shapes = ((1, 1024, 8, 8, 64), (1, 4096, 8, 8, 64), (1, 4096, 32, 8, 128))
    forward = [
        _prefill(*shape, dtype, causal=causal)
        for shape in shapes
        for dtype in ("float32", "bfloat16")
        for causal in (False, True)
    ]
    return [*forward, _gradients(*shapes[1], "float32")]


def smoke_cases(benchmark: str) -> list[Case]:
    """Small enough for any machine: they try the harness, not the kernels."""
    decode = [_decode(2, 256, 8, 2, 64), _decode(1, 128, 4, 4, 64, features=(("page", 16),))]
    if benchmark == "decode":
        return decode
    if benchmark == "decode_features":
        caches = (("window", 64), ("cache", "float8_e4m3fn"), ("cache", "int8"))
        return [
            *decode,
            *(_decode(2, 256, 8, 2, 64, features=(cache,)) for cache in caches),
            _decode(2, 256, 8, 2, 64, tokens=4),
            _decode(2, 256, 8, 1, 96, features=(("value_dim", 64),)),
        ]
    if benchmark == "decode_steps":
        return [_decode(2, 256, 8, 2, 64, features=(("layers", 3),))]
    if benchmark == "decode_variants":
        return [
            _decode(2, 256, 8, 2, 64, "float16"),
            _decode(2, 256, 8, 2, 64, features=(("layout", "BNTH"),)),
            _decode(2, 256, 8, 2, 64, features=(("lengths", "random"),)),
        ]
    cases = [
        _prefill(1, 128, 4, 2, 64),
        _prefill(2, 96, 2, 2, 64, "float32", causal=False),
    ]
    if benchmark == "naive":
        return [_prefill(1, 128, 2, 2, 64, "float16")]
    if benchmark == "features":
        names = ("softcap", "sinks", "alibi", "bias", "mask", "lengths", "segments", "window")
        values = (20.0, True, True, True, True, "random", 4, 16)
        features = [*zip(names, values, strict=True), ("mask", "rows"), ("value_dim", 32)]
        cases = [_prefill(1, 128, 4, 2, 64, features=(feature,)) for feature in features]
        gradients = [
            (feature,)
            for feature in features
            if feature[0] in ("window", "sinks", "segments", "softcap", "alibi", "mask")
        ]
        cases += [_gradients(1, 128, 4, 2, 64, features=feature) for feature in gradients]
    if benchmark == "distributions":
        plain = _prefill(1, 384, 4, 2, 64)  # three blocks of keys
        return [dataclasses.replace(plain, data=data) for data in DISTRIBUTIONS]
    if benchmark == "backward":
        cases = [dataclasses.replace(case, benchmark="backward") for case in cases]
    return cases


CASES = {
    "prefill": prefill_cases,
    "distributions": distribution_cases,
    "backward": backward_cases,
    "decode": decode_cases,
    "decode_variants": decode_variant_cases,
    "decode_steps": decode_step_cases,
    "features": feature_cases,
    "decode_features": decode_feature_cases,
    "naive": naive_cases,
    "numerics": numerics_cases,
    "cpu": cpu_cases,
    "cpu_numerics": cpu_numerics_cases,
}


def _prefill(batch, length, heads, kv_heads, head_dim, dtype="bfloat16", causal=True, features=()):
    return Case(
        "prefill", batch, length, length, heads, kv_heads, head_dim, dtype, causal, tuple(features)
    )


def _gradients(*shape, **options):
    return dataclasses.replace(_prefill(*shape, **options), benchmark="backward")


def _decode(batch, length, heads, kv_heads, head_dim, dtype="bfloat16", tokens=1, features=()):
    return Case(
        "decode", batch, tokens, length, heads, kv_heads, head_dim, dtype, True, tuple(features)
    )
