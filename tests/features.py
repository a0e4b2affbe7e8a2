"""Every feature of attention with the calls that stand for it: test_features.py runs them in each
direction, and `python tests/features.py` writes docs/features.md from them.

The page says what `explain` says of these calls: writing it takes a build with the CUDA kernels, but no
GPU.
"""

import dataclasses
import inspect
import itertools
import pathlib

from calls import precision
from cases import Case, DecodeCase, make_inputs

import jax_flashattn
from jax_flashattn import _explain

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "features.md"
DIRECTIONS = ("forward", "gradients", "decode")
PATHS = {"CPU": None, "sm_80 and later": _explain.A100, "Hopper": _explain.H200}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A row of the page. Its calls have to agree in every cell, else they are two features."""

    name: str
    prefill: tuple[Case, ...] = ()
    decode: tuple[DecodeCase, ...] = ()
    is_dtype: bool = False  # else float32 stands for any dtype, as in Platform.fit
    deterministic: bool = False  # a matter of the gradients alone

    def __str__(self):
        return self.name

    def calls(self, direction):
        if direction == "decode":
            return self.decode
        return () if direction == "forward" and self.deterministic else self.prefill

    @property
    def extra(self):
        """Arguments beside those that the case says."""
        return {"deterministic": True} if self.deterministic else {}

    def on(self, gpu, case):
        """The case as a GPU runs it; None: as the CPU does."""
        any_dtype = case.dtype == "float32" and not self.is_dtype
        return case.replace(dtype="float16") if gpu and any_dtype else case

    def explain(self, direction, case, gpu):
        """The Explanation of a call for a GPU with these facts; None: for the CPU."""
        case = self.on(gpu, case)
        arguments = make_inputs(case, poison=False) | case.options() | self.extra
        if direction == "decode":
            arguments |= case.launch_options()
        op = "decode" if direction == "decode" else "prefill"
        with precision(case):
            return _explain.explain_on(gpu, op, (), arguments, direction == "gradients")


def _each(case, **choices):
    """The case with every combination of the choices."""
    return tuple(
        case.replace(**dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    )


def _heads(name, *pairs):
    cases = [tuple(c.replace(q_heads=n, kv_heads=k) for n, k in pairs) for c in (_PREFILL, _DECODE)]
    return Feature(name, *cases)


def _dims(name, *pairs):
    small = (
        Case(batch=1, q_len=33, q_heads=2, kv_heads=1),
        _DECODE.replace(lengths=(40,), kv_heads=1),
    )
    return Feature(
        name, *(tuple(c.replace(head_dim=h, value_dim=v) for h, v in pairs) for c in small)
    )


_PREFILL, _DECODE = Case(q_len=97), DecodeCase(lengths=(150, 40, 3))
_FULL = _PREFILL.replace(causal=False)
_BOTH = dict(causal=(True, False))
_LAYOUTS = dict(layout=("BTNH", "BNTH"))
_ALIGNMENTS = dict(alignment=("bottom_right", "top_left"))
_LEFT_WINDOWS = (0, 1, 16, 64, 1000, (5, None), (0, 0), (70, 3), (3, 70))
_RAGGED = _PREFILL.replace(batch=3, q_lengths=(97, 1, 50), kv_lengths=(70, 97, 0))
_ALIBI = _each(_PREFILL.replace(alibi=True, kv_len=130), **_BOTH, **_ALIGNMENTS)
_CACHE_8BIT = (
    *_each(_DECODE.replace(tokens=2), layout=("BTNH", "BNTH")),
    *_each(_DECODE.replace(page_size=16), scales=("head", "page")),
)

GROUPS = {
    "Masks": (
        Feature("causal", _each(_PREFILL, window=(None, (None, 7))), (_DECODE,)),
        Feature("no mask", _each(_FULL, window=(None, (None, None)))),
        Feature(
            "T != S, aligned bottom right",
            _each(_PREFILL, kv_len=(30, 200), **_BOTH),
            _each(_DECODE, tokens=(2, 5)),
        ),
        Feature(
            "T != S, aligned top left",
            _each(_PREFILL.replace(alignment="top_left"), kv_len=(30, 200), **_BOTH),
        ),
        Feature(
            "lengths of each sequence",
            _each(_RAGGED, **_BOTH),
            (_DECODE.replace(lengths=(0, 160, 7)),),
        ),
        Feature(
            "window, causal",
            _each(_PREFILL, window=_LEFT_WINDOWS),
            _each(_DECODE, window=(0, 1, 40, 1000)),
        ),
        Feature(
            "window, both sides",
            (
                *_each(_FULL, window=(*_LEFT_WINDOWS, (None, 7))),
                *_each(
                    _FULL.replace(kv_lengths=(200, 40)),
                    window=((30, 10), 64),
                    kv_len=(60, 200),
                    **_ALIGNMENTS,
                ),
                # Queries past the keys see nothing.
                _FULL.replace(kv_len=20, window=(4, 4), alignment="top_left"),
            ),
        ),
        Feature(
            "bool mask, broadcast over any of B, N, T, S",
            _each(
                _PREFILL,
                mask=("BNTS", "_NTS", "__TS", "B__S", "___S", "BN_S", "B_T_"),
                **_BOTH,
            ),
        ),
        Feature(
            "segment ids; packed documents by `segment_ids(cu_seqlens, ...)`",
            _each(_PREFILL, segments=(1, 2, 5, 60), **_BOTH),
        ),
    ),
    "Scores": (
        Feature(
            "soft cap",
            _each(_PREFILL, softcap=(0.5, 20.0, 50.0), scale=(None, 3.0)),
            _each(_DECODE, softcap=(0.5, 20.0)),
        ),
        Feature(
            "sinks",
            _each(_PREFILL.replace(sinks=True), kv_lengths=(None, (0, 60)), **_LAYOUTS),
            (_DECODE.replace(sinks=True),),
        ),
        Feature(
            "ALiBi slopes (constants)",
            _ALIBI + tuple(c.replace(kv_lengths=(130, 50), q_lengths=(60, 97)) for c in _ALIBI),
        ),
        Feature(
            "bias, broadcast over any of B, N, T",
            _each(
                _PREFILL.replace(kv_len=104),
                bias=("BNTS", "_NTS", "B_TS", "__TS", "B__S", "___S", "BN_S"),
                **_LAYOUTS,
            ),
        ),
        Feature("bias, S not a multiple of 8", _each(_PREFILL, bias=("BNTS", "BN_S"), **_LAYOUTS)),
        Feature("bias, broadcast over S", _each(_PREFILL, bias=("BNT_",), **_LAYOUTS)),
    ),
    "Shapes": (
        _heads("as many key heads as query heads", (1, 1), (5, 5)),
        _heads("grouped query heads (GQA)", (6, 3), (14, 2)),
        _heads("one key head (MQA)", (7, 1), (24, 1)),
        _dims("head dims 8 to 256 in steps of 8", *((h, None) for h in range(8, 257, 8))),
        _dims("other head dims to 256 (padded on CUDA)", (1, None), (20, None), (250, None)),
        _dims("head dims above 256", (264, None), (512, None)),
        _dims("value dim != head dim", (192, 128), (128, 64), (64, 128), (40, 8)),
        _dims("head dim 576, value dim 512 (latent attention)", (576, 512)),
        Feature(
            "layout BNTH",
            _each(_RAGGED.replace(layout="BNTH"), **_BOTH),
            (_DECODE.replace(layout="BNTH"),),
        ),
    ),
    "Dtypes": tuple(
        Feature(
            dtype,
            _each(_PREFILL.replace(dtype=dtype), **_BOTH),
            (_DECODE.replace(dtype=dtype),),
            is_dtype=True,
        )
        for dtype in ("float16", "bfloat16", "float32", "float64")
    ),
    "Results": (
        Feature("lse", (_PREFILL.replace(q_lengths=(0, 97)),), (_DECODE.replace(lengths=(0, 9)),)),
        Feature(
            "deterministic gradients",
            _each(_PREFILL, head_dim=(64, 128), **_BOTH),
            deterministic=True,
        ),
    ),
    "KV caches": (
        Feature("several new tokens", decode=_each(_DECODE, tokens=(2, 5, 17))),
        Feature(
            "values that are part of the keys",
            decode=(
                _DECODE.replace(latent=True, value_dim=64, head_dim=64),
                _DECODE.replace(latent=True, value_dim=512, head_dim=576),
            ),
        ),
        Feature("paged", decode=_each(_DECODE, page_size=(3, 16, 64), **_LAYOUTS)),
        *(
            Feature(
                f"{cache}, scales by head or page",
                decode=tuple(c.replace(cache_dtype=cache) for c in _CACHE_8BIT),
            )
            for cache in ("float8_e4m3fn", "int8")
        ),
        Feature("batch invariant", decode=(_DECODE.replace(batch_invariant=True),)),
    ),
}  # fmt: skip
FEATURES = tuple(itertools.chain(*GROUPS.values()))


# ---- the page

_HEAD = """# Features

What `jax_flashattn.explain` says of the calls that tests/test_features.py runs: every row in every
direction, on the CPU and on the GPU at hand. `python tests/features.py` writes this page.

"generic": on Hopper, the kernel of sm_80 and later. Numbers are the reasons below. "–": nothing to ask
for. Forward and gradients are those of `prefill`; gradients are to query, key, value, bias and sinks.
Features combine.
"""


def page():
    reasons = {}  # text -> number, in order of appearance

    def cite(text, reason):
        return f"{text} ({reasons.setdefault(reason, len(reasons) + 1)})"

    lines = [_HEAD]
    columns = list(itertools.product(PATHS, DIRECTIONS))
    lines.append("| | " + " | ".join(f"{path}: {d}" for path, d in columns) + " |")
    lines.append("|---" * (1 + len(columns)) + "|")
    for group, features in GROUPS.items():
        lines.append(f"| **{group}** |" + " |" * len(columns))
        for feature in features:
            cells = (_cell(feature, direction, PATHS[path], cite) for path, direction in columns)
            lines.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def _cell(feature, direction, gpu, cite):
    calls = feature.calls(direction)
    if not calls:
        missing = _arrays_that_decode_lacks(feature) if direction == "decode" else ""
        return cite("no", f"`decode` has no argument {missing}") if missing else "–"
    answers = {_answer(feature.explain(direction, case, gpu)) for case in calls}
    if len(answers) > 1:
        raise ValueError(f"{feature.name}, {direction}, calls differ: {sorted(answers)}")
    text, reason = answers.pop()
    return cite(text, reason) if reason else text


def _answer(explanation):
    """(what the cell says, the reason or "")."""
    if explanation.kernel is None:
        return "no", explanation.reason
    return ("generic", explanation.reason) if explanation.reason else ("yes", "")


def _arrays_that_decode_lacks(feature):
    """The features that are arrays, `mask` for one, mean the same to new tokens."""
    scoring = {"alibi_slopes", "bias", "mask", "query_segment_ids", "key_value_segment_ids"}
    asked = make_inputs(feature.prefill[0], poison=False) if feature.prefill else {}
    lacking = (scoring & set(asked)) - set(inspect.signature(jax_flashattn.decode).parameters)
    return ", ".join(f"`{name}`" for name in sorted(lacking))


if __name__ == "__main__":
    PAGE.write_text(page())
