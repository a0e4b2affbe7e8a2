"""The one list of operands and results with their axes; batching, sharding and shapes all read it.

Letters: b batch, t query length, s key length, n query heads, k key/value heads, h head dim of query
and key, v head dim of value, p pages, m pages a sequence. "bnts" operands broadcast: any of their axes
may be 1.

Inside the primitives every operand but a paged cache starts with a batch axis, whose size divides the
batch of the call: entry i of the call reads entry i % size. So vmap leaves unmapped operands as they
are: one key for many queries is stored, and read, once.
"""

_BTNH = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskv",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "alibi_slopes": "bn",
    "bias": "bnts",
    "mask": "bnts",
    "query_segment_ids": "bt",
    "key_value_segment_ids": "bs",
    "sinks": "bn",
    "out": "btnv",
    "lse": "btn",
    "dout": "btnv",
    "dlse": "btn",
    "dquery": "btnh",
    "dkey": "bskh",
    "dvalue": "bskv",
    "dsinks": "bn",
    "dbias": "bnts",
    "key_cache": "bskh",
    "value_cache": "bskv",
    "seq_lens": "b",
    "page_table": "bm",
}
_PAGED = {"key_cache": "pskh", "value_cache": "pskv", "key_scale": "pk", "value_scale": "pk"}

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
"""The operands of prefill that have gradients."""

LAYOUTS = ("BTNH", "BNTH")


def axes(name: str, layout: str, paged: bool = False) -> str:
    """The axes of an operand or result in a layout: axes("key", "BNTH") == "bksh".

    A tangent has the axes of its primal: "tangent:key".
    """
    name = name.removeprefix("tangent:")
    letters = _PAGED[name] if name in _PAGED and (paged or name not in _BTNH) else _BTNH[name]
    heads = {"bt": "n", "bs": "k", "ps": "k"}.get(letters[:2])
    if layout == "BNTH" and heads and len(letters) > 2 and letters[2] == heads:
        letters = letters[0] + letters[2] + letters[1] + letters[3:]
    return letters


def sizes(names, shapes, layout: str, paged: bool = False) -> dict[str, int]:
    """Letter -> size over all operands; b is the batch of the call, the largest of the operands'."""
    found: dict[str, int] = {}
    for name, shape in zip(names, shapes, strict=True):
        letters = axes(name, layout, paged)
        if letters == "bnts":
            letters, shape = "b", shape[:1]
        for letter, size in zip(letters, shape, strict=True):
            if letter == "b":
                size = _larger(size, found.get("b", 1))
            found[letter] = size
    return found


def _larger(a, b):
    """Of two batches, where one divides the other: 1 is not compared, which symbolic sizes cannot be."""
    if 1 in (a, b):
        return b if a == 1 else a
    return 0 if 0 in (a, b) else max(a, b)
