"""What every operation shares as a JAX primitive; the only module that touches JAX's internals.

An `Operation` is two primitives. The outer one is what jaxprs show; it has the rules for shapes,
batching and partitioning, and lowers to the inner one, which lowers to the custom call of its platform.
Everything is derived from the axes of the operands (see _axes.py).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax._src import dispatch  # isort: skip  # prim_requires_devices_during_lowering has no public name

from jax_flashattn import _axes


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call; hashable, one parameter of every primitive."""

    layout: str = "BTNH"
    scale: float = 1.0
    softcap: float = 0.0
    window_left: int = 2**31 - 1
    window_right: int = 2**31 - 1
    bottom_right: bool = True
    deterministic: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    paged: bool = False
    lse: bool = True  # of prefill: whether it is a result
    value_dim: int = 0  # of values that lie in the keys; else that of their operand

    def axes(self, name: str) -> str:
        return _axes.axes(name, self.layout, self.paged)

    def sizes(self, names, arrays) -> dict[str, int]:
        found = _axes.sizes(names, [x.shape for x in arrays], self.layout, self.paged)
        return found | {"v": self.value_dim} if self.value_dim else found


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """A primitive over named operands.

    results(names, arrays, options) -> {name: dtype} says what it returns; shapes follow from the axes.
    emit(platform, operands, results, options) computes them on a platform, in the order of the results.
    """

    name: str
    results: Callable
    emit: Callable
    summed_heads: tuple[
        str, ...
    ] = ()  # results that sum over query heads, which must then stay whole

    def __post_init__(self):
        outer, inner = Primitive(f"flash_{self.name}"), Primitive(f"flash_{self.name}_local")
        object.__setattr__(self, "primitive", outer)
        for p in (outer, inner):
            p.multiple_results = True
            p.def_abstract_eval(self._abstract_eval)
            p.def_impl(functools.partial(_run_eagerly, p))
        for platform in ("cpu", "cuda"):
            rule = mlir.lower_fun(functools.partial(self._emit, platform), multiple_results=True)
            mlir.register_lowering(inner, rule, platform=platform)
        object.__setattr__(self, "_inner", inner)
        mlir.register_lowering(outer, mlir.lower_fun(self._partitioned, multiple_results=True))
        dispatch.prim_requires_devices_during_lowering.add(outer)
        batching.primitive_batchers[outer] = self._batch

    def __call__(self, operands: dict, options: Options) -> list:
        """Binds the primitive; under explicit sharding, on each device's part."""
        names, arrays = tuple(operands), _vary_alike(tuple(operands.values()))
        mesh = jax.typeof(arrays[0]).sharding.mesh
        if not mesh.empty and mesh.explicit_axes:
            return self._explicit(mesh, names, arrays, options)
        context = jax.sharding.get_abstract_mesh()
        # XLA cannot partition a custom call inside a region that is manual over some axes only.
        manual = 0 < len(context.manual_axes) < len(context.axis_names)
        return self.primitive.bind(*arrays, names=names, options=options, partition=not manual)

    # ---- shapes

    def _abstract_eval(self, *avals, names, options, partition):
        size = options.sizes(names, avals)
        like = avals[0]
        outs = []
        for name, dtype in self.results(names, avals, options).items():
            shape = tuple(size[letter] for letter in options.axes(name))
            sharding = like.sharding.update(spec=P(*(None,) * len(shape)))
            outs.append(like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding))
        return outs

    def _emit(self, platform, *operands, names, options, partition):
        size = options.sizes(names, operands)
        results = {
            name: jax.ShapeDtypeStruct(tuple(size[x] for x in options.axes(name)), dtype)
            for name, dtype in self.results(names, operands, options).items()
        }
        return self.emit(platform, dict(zip(names, operands, strict=True)), results, options)

    # ---- vmap: the mapped axis becomes the major part of the batch

    def _batch(self, operands, dims, *, names, options, partition):
        mapped = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        unbatched = [
            jax.ShapeDtypeStruct(
                x.shape[:d] + x.shape[d + 1 :] if d is not None else x.shape, x.dtype
            )
            for x, d in zip(operands, dims, strict=True)
        ]
        batch = options.sizes(names, unbatched)["b"]
        operands = dict(zip(names, operands, strict=True))
        dims = dict(zip(names, dims, strict=True))
        if not options.paged and any(dims.get(x) is not None for x in ("key_scale", "value_scale")):
            _make_a_page_of_each_sequence(operands, dims, batch)
            options = dataclasses.replace(options, paged=True)
        if options.paged:
            _give_each_cache_its_pages(operands, dims, mapped)
        folded = [
            x if dims[name] is None else _fold(x, dims[name], batch, options.axes(name)[0] == "p")
            for name, x in operands.items()
        ]
        outs = self.primitive.bind(
            *_vary_alike(folded), names=tuple(operands), options=options, partition=partition
        )
        return [x.reshape(mapped, batch, *x.shape[1:]) for x in outs], [0] * len(outs)

    # ---- sharding over batch and heads

    def _partitioned(self, *operands, names, options, partition):
        local = functools.partial(
            self._inner.bind, names=names, options=options, partition=partition
        )
        if not partition:
            return local(*operands)

        def infer(mesh, args, results):
            kept = self._kept_axes(mesh, names, args, [x.sharding for x in args], options)
            outs = self.results(names, args, options)
            return tuple(NamedSharding(mesh, spec(kept, options.axes(name))) for name in outs)

        def part(mesh, args, results):
            kept = self._kept_axes(mesh, names, args, [x.sharding for x in args], options)
            size = options.sizes(names, args)
            ins = tuple(
                NamedSharding(mesh, spec(kept, options.axes(name), x.shape, size))
                for name, x in zip(names, args, strict=True)
            )
            return mesh, lambda *xs: tuple(local(*xs)), infer(mesh, args, results), ins

        function = custom_partitioning(lambda *xs: tuple(local(*xs)))
        function.def_partition(
            partition=part,
            infer_sharding_from_operands=infer,
            sharding_rule=self._sharding_rule(names, operands, options),
        )
        return list(function(*operands))

    def _sharding_rule(self, names, operands, options) -> SdyShardingRule:
        """b and the heads are factors that may be sharded; every other one is replicated.

        Query heads are a factor of their own unless each has a key head of its own: tied to the key
        heads as (key head, group), a mesh axis with more devices than key heads would be cut into
        parts, which JAX's shardings cannot say. `_kept_axes` brings the two together.
        """
        size = options.sizes(names, operands)
        query_heads = "k" if size["n"] == size["k"] else "n"
        fresh = iter(range(10**6))
        seen: dict[str, None] = {}  # in order of first appearance, as the rule demands

        def factors(name, shape):
            mapping = []
            for letter, extent in zip(options.axes(name), shape, strict=True):
                if letter == "p" or extent != size[letter]:
                    letter = f"x{next(fresh)}"  # pages, or a broadcast axis
                elif letter == "n":
                    letter = query_heads
                seen.setdefault(letter)
                mapping.append(letter)
            return ArrayMapping(*mapping)

        ins = tuple(factors(n, x.shape) for n, x in zip(names, operands, strict=True))
        outs = tuple(
            factors(name, tuple(size[x] for x in options.axes(name)))
            for name in self.results(names, operands, options)
        )
        return SdyShardingRule(
            ins, outs, need_replication_factors=tuple(f for f in seen if f not in ("b", "k", "n"))
        )

    def _kept_axes(self, mesh, names, args, shardings, options) -> dict:
        """Letter -> mesh axes that stay sharded: of b and of the heads as the query has them."""
        size = options.sizes(names, args)
        query = dict(zip(options.axes(names[0]), _padded_spec(shardings[0], 4), strict=True))
        b, n = query["b"], query["n"]
        batches = {
            x.shape[0] for name, x in zip(names, args, strict=True) if options.axes(name)[0] == "b"
        }
        if len(batches - {1}) > 1:
            b = None  # an operand that repeats over the batch: which entries a device needs is not a slice
        parts = _extent(mesh, n)
        if size["k"] % parts == 0:
            k = n
        elif size["k"] == 1 and not self.summed_heads:
            k = None
        else:
            k = n = None  # a device would need key heads that it has only a part of
        return {"b": b, "n": n, "k": k}

    def _explicit(self, mesh, names, arrays, options):
        shardings = [jax.typeof(x).sharding for x in arrays]
        kept = self._kept_axes(mesh, names, arrays, shardings, options)
        size = options.sizes(names, arrays)
        specs = tuple(
            spec(kept, options.axes(name), x.shape, size)
            for name, x in zip(names, arrays, strict=True)
        )
        arrays = [
            jax.sharding.reshard(x, NamedSharding(mesh, s))
            for x, s in zip(arrays, specs, strict=True)
        ]
        outs = tuple(spec(kept, options.axes(n)) for n in self.results(names, arrays, options))
        local = functools.partial(
            self.primitive.bind, names=names, options=options, partition=False
        )
        on_each = jax.shard_map(
            lambda *xs: tuple(local(*xs)), mesh=mesh, in_specs=specs, out_specs=outs
        )
        return list(on_each(*arrays))


def _varying(x) -> frozenset:
    """The mesh axes of shard_map along which x differs between devices."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):  # the name since jax 0.10
        return kind.manual_axis_type.varying
    return kind.vma


def _vary_alike(arrays):
    """Inside shard_map, operands that are the same on every device join those that are not."""
    varying = [_varying(x) for x in arrays]
    everywhere = frozenset().union(*varying)
    cast = getattr(jax.lax, "pcast", None)

    def vary(x, axes):
        if not axes:
            return x
        return cast(x, axes, to="varying") if cast else jax.lax.pvary(x, axes)

    return tuple(vary(x, tuple(everywhere - v)) for x, v in zip(arrays, varying, strict=True))


def spec(kept: dict, letters: str, shape=None, size=None) -> P:
    """The PartitionSpec of an operand; axes that broadcast (smaller than the call's) stay whole."""
    whole = [shape is not None and shape[i] != size.get(x) for i, x in enumerate(letters)]
    return P(*(None if w else kept.get(x) for x, w in zip(letters, whole, strict=True)))


def _padded_spec(sharding, rank: int) -> tuple:
    partition = tuple(getattr(sharding, "spec", ()))
    return partition + (None,) * (rank - len(partition))


def _extent(mesh, axis) -> int:
    names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    extent = 1
    for name in names:
        extent *= mesh.shape[name]
    return extent


@functools.lru_cache(maxsize=1024)
def _jitted(primitive, params):
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def _run_eagerly(primitive, *operands, **params):
    with jax.disable_jit(False):  # under jax.disable_jit, jit would bind the primitive here again
        return _jitted(primitive, tuple(params.items()))(*operands)


def _fold(x, dim: int, batch: int, pages: bool):
    """Moves the mapped axis in front of the batch (or of the pages) and makes one axis of the two."""
    x = jnp.moveaxis(x, dim, 0)
    if not pages and x.shape[1] != batch:
        # An operand that already repeats over the batch now differs between mapped entries: entry
        # (i, j) must read (i, j % size), which one modulus cannot say, so it is written out.
        repeats = batch // x.shape[1]
        x = jnp.tile(x, (1, repeats) + (1,) * (x.ndim - 2))
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _make_a_page_of_each_sequence(operands: dict, dims: dict, batch: int) -> None:
    """A contiguous cache has one scale a head for all sequences; a paged one can have one a page."""
    for name in [x for x in ("key_cache", "value_cache") if x in operands]:
        x, axis = operands[name], 1 if dims[name] == 0 else 0
        times = [1] * x.ndim
        times[axis] = batch // x.shape[axis]
        operands[name] = jnp.tile(x, times)
    operands["page_table"] = jnp.arange(batch, dtype=jnp.int32)[:, None]
    dims["page_table"] = None


def _give_each_cache_its_pages(operands: dict, dims: dict, mapped: int) -> None:
    """Paged caches that are mapped become one pool; the page tables then point into their own part."""
    caches = [x for x in ("key_cache", "value_cache", "key_scale", "value_scale") if x in operands]
    if all(dims[x] is None for x in caches):
        return
    for name in caches:
        if dims[name] is None:
            operands[name] = jnp.broadcast_to(operands[name], (mapped, *operands[name].shape))
        else:
            operands[name] = jnp.moveaxis(operands[name], dims[name], 0)
        dims[name] = 0
    pages = operands["key_cache"].shape[1]
    for name in ("key_scale", "value_scale"):  # one scale a head becomes one a page and head
        if name in operands and operands[name].shape[1] != pages:
            shape = (mapped, pages, operands[name].shape[2])
            operands[name] = jnp.broadcast_to(operands[name], shape)
    table = operands["page_table"]
    if dims["page_table"] is None:
        table = jnp.broadcast_to(table, (mapped, *table.shape))
    else:
        table = jnp.moveaxis(table, dims["page_table"], 0)
    first = (jnp.arange(mapped, dtype=table.dtype) * pages)[:, None, None]
    operands["page_table"] = jnp.where((table >= 0) & (table < pages), table + first, -1)
    dims["page_table"] = 0
