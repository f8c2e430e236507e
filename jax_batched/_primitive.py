"""The one factory of JAX primitives.

An operation is described by the ranks of its operands, written as in NumPy's generalised ufuncs:
``"(n,n),(n,k)->(n,k),()"``. From that follow the shape rule, batching, sharding and varying axes:

* All dimensions before the core ones are batch dimensions. Operands have equally many of them; each
  is the result's size or 1. A size of 1 is broadcast inside the kernel, never copied.
* A core dimension that only one operand has (``k`` above: right-hand sides) is made of independent
  columns. A batch dimension that only that operand has is folded into it: one factor, more columns.

This is the only file that touches JAX's extension points.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_batched import _ffi, _partition

Array = jax.Array
Params = dict[str, Any]
CoreDims = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Signature:
    """Core dimensions of operands and results."""

    operands: tuple[CoreDims, ...]
    results: tuple[CoreDims, ...]

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> "Signature":
        """Reads ``"(n,n),(n,k)->(n,k),()"``."""

        def side(part: str) -> tuple[CoreDims, ...]:
            groups = part.strip()[1:-1].split("),(")
            return tuple(tuple(d for d in group.split(",") if d) for group in groups)

        operands, results = text.split("->")
        return cls(side(operands), side(results))

    @property
    def columns(self) -> tuple[int, str] | None:
        """The operand with a core dimension of its own, and that dimension's name."""
        for i, dims in enumerate(self.operands):
            others = {d for j, o in enumerate(self.operands) if j != i for d in o}
            own = [d for d in dims if d not in others]
            if own and len(self.operands) > 1:
                return i, own[0]
        return None


@dataclasses.dataclass(frozen=True)
class Rules:
    """What an operation is, besides its shapes.

    Attributes:
      signature: core dimensions as text, given the parameters.
      lax: the operation in plain `lax`, for platforms and sizes without a kernel; operands have
        equal batch dimensions. An operation that has no kernel at all may be made of others here.
      broadcasts: whether `lax` takes operands whose batch dimensions only broadcast, as they come.
      jvp: ``jvp(params, primals, tangents) -> (results, tangents)``; a None tangent is zero.
        Without a rule JAX refuses to differentiate.
      transpose: ``transpose(params, primals, cotangents) -> cotangent`` of the operand that is None
        among the primals; a None cotangent is zero.
      fused: whether one kernel serves (platform, *operands); else ``composed`` is lowered.
      composed: the operation made of other operations of this library.
      result_dtypes: dtype of each result, None is the first operand's; or a function of the
        parameters and that operand's dtype.
    """

    signature: Callable[[Params], str]
    lax: Callable[..., Sequence[Array]]
    broadcasts: bool = False
    jvp: (
        Callable[[Params, tuple[Any, ...], tuple[Any, ...]], tuple[Sequence[Any], Sequence[Any]]]
        | None
    ) = None
    transpose: Callable[[Params, tuple[Any, ...], tuple[Any, ...]], Any] | None = None
    fused: Callable[..., bool] = lambda platform, *avals: True
    composed: Callable[..., Sequence[Array]] | None = None
    result_dtypes: tuple[Any, ...] | Callable[[Params, Any], tuple[Any, ...]] = (None,)


class Operation:
    """A JAX primitive with all its rules. Calling it binds the primitive."""

    def __init__(self, name: str, rules: Rules):
        self.name = name
        self.rules = rules
        self.primitive = Primitive(f"jax_batched_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(functools.partial(xla.apply_primitive, self.primitive))
        self.primitive.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[self.primitive] = self._batch
        if rules.jvp is not None:
            ad.primitive_jvps[self.primitive] = self._jvp
        if rules.transpose is not None:
            ad.primitive_transposes[self.primitive] = self._transpose
        mlir.register_lowering(self.primitive, self._lower_to_lax)
        for platform in _ffi.PLATFORMS:
            rule = functools.partial(self._lower_to_kernel, platform)
            mlir.register_lowering(self.primitive, rule, platform=platform)

    def signature(self, params: Params) -> Signature:
        """Core dimensions of this operation under these parameters."""
        return Signature.parse(self.rules.signature(params))

    def __call__(self, *operands: Array, **params: Any) -> list[Array]:
        """Binds the primitive to operands whose batch dimensions broadcast as NumPy's do."""
        signature = self.signature(params)
        rank = max(x.ndim - len(core) for x, core in zip(operands, signature.operands, strict=True))
        aligned = [
            x if x.ndim == rank + len(core) else x[(None,) * (rank + len(core) - x.ndim)]
            for x, core in zip(operands, signature.operands, strict=True)
        ]
        return self._bind(aligned, {**params, "kernel": _ffi.forced_kernel()})

    def _bind(self, operands: Sequence[Array], params: Params) -> list[Array]:
        """Binds operands of equal batch rank; folds the batch dimensions that are columns."""
        signature = self.signature(params)
        foldable = self._foldable_batch_dims(signature, operands)
        if not foldable:
            return list(self.primitive.bind(*_align_varying_axes(operands), **params))
        assert signature.columns is not None
        owner, column = signature.columns
        sizes = [operands[owner].shape[d] for d in foldable]
        folded = [
            _fold(x, foldable, core.index(column) - len(core))
            if column in core
            else jax.lax.squeeze(x, foldable)
            for x, core in zip(operands, signature.operands, strict=True)
        ]
        results = self.primitive.bind(*_align_varying_axes(folded), **params)
        return [
            _unfold(x, foldable, sizes, core.index(column) - len(core))
            if column in core
            else _insert_broadcast(x, foldable, sizes)
            for x, core in zip(results, signature.results, strict=True)
        ]

    @staticmethod
    def _foldable_batch_dims(signature: Signature, operands: Sequence[Array]) -> list[int]:
        """Batch dimensions that only the operand with columns has, and that are not sharded."""
        if signature.columns is None:
            return []
        owner, column = signature.columns
        core = signature.operands[owner]
        batch_rank = operands[owner].ndim - len(core)
        spec = _partition_spec(operands[owner])
        if spec[batch_rank + core.index(column)] is not None:
            return []
        return [
            d
            for d in range(batch_rank)
            if operands[owner].shape[d] != 1
            and _at_least(1, operands[owner].shape[d])
            and spec[d] is None
            and all(x.shape[d] == 1 for i, x in enumerate(operands) if i != owner)
        ]

    def _batch(
        self, operands: Sequence[Array], dims: Sequence[Any], **params: Any
    ) -> tuple[list[Array], list[int]]:
        aligned = [
            jax.lax.expand_dims(x, [0]) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        results = self._bind(aligned, params)
        return results, [0] * len(results)

    # Shapes.

    def _abstract_eval(self, *avals: Any, **params: Any) -> list[Any]:
        signature = self.signature(params)
        sizes: dict[str, Any] = {}
        batches = []
        for aval, core in zip(avals, signature.operands, strict=True):
            split = aval.ndim - len(core)
            batches.append(aval.shape[:split])
            for dim, size in zip(core, aval.shape[split:], strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"{self.name}: dimension {dim} is both {sizes[dim]} and {size} in operands "
                        f"of shapes {[a.shape for a in avals]}"
                    )
        batch = _broadcast_batch(self.name, batches)
        spec, core_spec = _result_spec(self.name, avals, signature, batch)
        dtypes = self.rules.result_dtypes
        if callable(dtypes):
            dtypes = dtypes(params, avals[0].dtype)
        results = []
        for core, dtype in zip(signature.results, dtypes, strict=True):
            shape = (*batch, *(sizes[d] for d in core))
            sharding = _with_spec(avals[0].sharding, (*spec, *map(core_spec.get, core)))
            results.append(
                avals[0].update(
                    shape=shape,
                    dtype=avals[0].dtype if dtype is None else jnp.dtype(dtype),
                    weak_type=False,
                    sharding=sharding,
                )
            )
        return results

    # Derivatives. The rules in Rules see None where JAX has symbolic zeros.

    def _jvp(
        self, primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any
    ) -> tuple[list[Any], list[Any]]:
        assert self.rules.jvp is not None
        public = _without_kernel(params)
        given = tuple(None if isinstance(t, ad.Zero) else t for t in tangents)
        results, derivatives = self.rules.jvp(public, primals, given)
        return list(results), [
            ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t
            for x, t in zip(results, derivatives, strict=True)
        ]

    def _transpose(self, cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        assert self.rules.transpose is not None
        linear = [ad.is_undefined_primal(x) for x in operands]
        if linear != [False] * (len(operands) - 1) + [True]:
            raise NotImplementedError(f"{self.name} is linear only in its last operand")
        aval = operands[-1].aval
        public = _without_kernel(params)
        given = tuple(None if isinstance(ct, ad.Zero) else ct for ct in cotangents)
        result = self.rules.transpose(public, (*operands[:-1], None), given)
        if result is None:
            return [*[None] * (len(operands) - 1), ad.Zero(aval)]
        broadcast = [d for d in range(aval.ndim) if aval.shape[d] == 1 and result.shape[d] != 1]
        if broadcast:
            result = jnp.sum(result, axis=tuple(broadcast), keepdims=True)
        return [*[None] * (len(operands) - 1), result]

    # Lowering.

    def has_kernel(self, platform: _ffi.Platform, ctx: Any, params: Params) -> bool:
        """Whether the call that is lowered in this context becomes kernels of this library."""
        avals = ctx.avals_in
        core_sizes = [
            size
            for aval, core in zip(avals, self.signature(params).operands, strict=True)
            for size in aval.shape[aval.ndim - len(core) :]
        ]
        n = avals[0].shape[-1]
        for_export = ctx.module_context.lowering_parameters.for_export
        return (
            isinstance(n, int)
            and n <= _ffi.max_n(self.name, avals[0].dtype)
            and all(_at_least(1, size) for size in core_sizes)
            and _ffi.has_kernels(platform, for_export=for_export)
        )

    def _lower_to_lax(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        public = _without_kernel(params)
        signature = self.signature(params)

        def in_lax(*arrays: Array) -> Sequence[Array]:
            if 0 in ctx.avals_out[0].shape:
                return [jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out]
            if self.rules.broadcasts:
                return self.rules.lax(*arrays, **public)
            batch = ctx.avals_out[0].shape[: ctx.avals_out[0].ndim - len(signature.results[0])]
            full = [
                jnp.broadcast_to(x, (*batch, *x.shape[x.ndim - len(core) :]))
                for x, core in zip(arrays, signature.operands, strict=True)
            ]
            return self.rules.lax(*full, **public)

        return mlir.lower_fun(_with_automatic_sharding(in_lax, ctx))(ctx, *operands)

    def _lower_to_kernel(
        self, platform: _ffi.Platform, ctx: Any, *operands: Any, **params: Any
    ) -> Any:
        if not self.has_kernel(platform, ctx, params):
            return self._lower_to_lax(ctx, *operands, **params)
        if not self.rules.fused(platform, *ctx.avals_in):
            assert self.rules.composed is not None
            public = _without_kernel(params)
            composed = functools.partial(self.rules.composed, **public)
            return mlir.lower_fun(composed, multiple_results=True)(ctx, *operands)
        partitioning = _partitioning_context(platform, ctx, self.signature(params))
        if partitioning is not None:
            return self._lower_partitioned(partitioning, *operands, **params)
        lower = jax.ffi.ffi_lowering(
            _ffi.target_name(self.name),
            extra_attributes=_sharding_attributes(ctx, self.signature(params)),
        )
        return lower(ctx, *operands, **params)

    def _lower_partitioned(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        """The call as one that the partitioner splits along batch dimensions and columns."""
        signature = self.signature(params)
        assert signature.columns is not None
        _, column = signature.columns
        avals = [*ctx.avals_in, *ctx.avals_out]
        cores = [*signature.operands, *signature.results]
        batch = avals[-1].shape[: avals[-1].ndim - len(cores[-1])]
        roles = [
            _partition.roles(batch, aval.shape, core, column)
            for aval, core in zip(avals, cores, strict=True)
        ]
        call = _partition.partitioned(
            functools.partial(self.primitive.bind, **params),
            roles[: len(operands)],
            roles[len(operands) :],
        )
        return mlir.lower_fun(call)(ctx, *operands)


def _without_kernel(params: Params) -> Params:
    """The operation's own parameters: its rules know nothing of the choice of a kernel."""
    return {k: v for k, v in params.items() if k != "kernel"}


def _at_least(least: int, size: Any) -> bool:
    """Whether a size, which may be symbolic in an exported program, is known to be as large."""
    try:
        return bool(size >= least)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def _fold(x: Array, dims: Sequence[int], column: int) -> Array:
    """Moves batch dimensions into the core dimension `column` (counted from the end)."""
    target = x.ndim + column
    moved = jnp.moveaxis(x, dims, range(target - len(dims), target))
    first = target - len(dims)
    shape = (*moved.shape[:first], math.prod(moved.shape[first : target + 1]))
    return moved.reshape(*shape, *moved.shape[target + 1 :])


def _unfold(x: Array, dims: Sequence[int], sizes: Sequence[int], column: int) -> Array:
    """Inverse of `_fold`."""
    position = x.ndim + column
    rest = x.shape[position] // math.prod(sizes)
    split = x.reshape(*x.shape[:position], *sizes, rest, *x.shape[position + 1 :])
    return jnp.moveaxis(split, range(position, position + len(dims)), dims)


def _insert_broadcast(x: Array, dims: Sequence[int], sizes: Sequence[int]) -> Array:
    expanded = jax.lax.expand_dims(x, dims)
    shape = list(expanded.shape)
    for d, size in zip(dims, sizes, strict=True):
        shape[d] = size
    return jnp.broadcast_to(expanded, shape)


def _broadcast_batch(name: str, batches: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    batch = list(batches[0])
    for other in batches[1:]:
        for d, size in enumerate(other):
            if batch[d] == 1:
                batch[d] = size
            elif size != 1 and size != batch[d]:
                raise ValueError(f"{name}: batch shapes {list(batches)} do not broadcast")
    return tuple(batch)


# Sharding.


def _partition_spec(x: Any) -> tuple[Any, ...]:
    """Explicit sharding of each dimension of x; None where there is none."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return (*spec, *[None] * (x.ndim - len(spec)))


def _result_spec(
    name: str, avals: Sequence[Any], signature: Signature, batch: tuple[Any, ...]
) -> tuple[list[Any], dict[str, Any]]:
    """Explicit sharding of the batch dimensions of the results, and of their columns by name."""
    column = None if signature.columns is None else signature.columns[1]
    spec: list[Any] = [None] * len(batch)
    core_spec: dict[str, Any] = {}
    for aval, core in zip(avals, signature.operands, strict=True):
        own = (*aval.sharding.spec, *[None] * (aval.ndim - len(aval.sharding.spec)))
        for dim, axis in zip(core, own[aval.ndim - len(core) :], strict=True):
            if axis is None:
                continue
            if dim != column:
                but = "" if column not in core else ", but for its columns,"
                raise ValueError(
                    f"{name}: an operand of shape {aval.shape} is sharded as {aval.sharding.spec}; "
                    f"its last {len(core)} dimensions{but} must not be sharded "
                    "(use jax.sharding.reshard)"
                )
            core_spec[dim] = axis
        for d, axis in enumerate(own[: len(batch)]):
            if axis is None:
                continue
            if spec[d] is not None and spec[d] != axis:
                raise ValueError(
                    f"{name}: batch dimension {d} is sharded over {spec[d]} in one operand and "
                    f"over {axis} in another"
                )
            spec[d] = axis
    used = [axis for axes in (*spec, *core_spec.values()) for axis in _mesh_axes(axes)]
    twice = sorted({str(axis) for axis in used if used.count(axis) > 1})
    if twice:
        raise ValueError(
            f"{name}: operands sharded as {[aval.sharding.spec for aval in avals]} would shard two "
            f"dimensions of the result over {', '.join(twice)}"
        )
    return spec, core_spec


def _mesh_axes(axes: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def _with_spec(sharding: Any, spec: tuple[Any, ...]) -> Any:
    return sharding.update(spec=jax.sharding.PartitionSpec(*spec))


def _align_varying_axes(operands: Sequence[Array]) -> list[Array]:
    """Inside shard_map: makes all operands vary over the union of their manual axes."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, varying, strict=True)
    ]


def _with_automatic_sharding(
    f: Callable[..., Sequence[Array]], ctx: Any
) -> Callable[..., Sequence[Array]]:
    """f with explicit mesh axes made automatic: JAX's own routines refuse some of them."""
    shardings = tuple(aval.sharding for aval in ctx.avals_out)
    if not shardings[0].mesh.explicit_axes:
        return f
    wrapped = jax.sharding.auto_axes(lambda *xs: tuple(f(*xs)), out_sharding=shardings)
    return wrapped  # type: ignore[no-any-return, unused-ignore]


def _partitioning_context(platform: _ffi.Platform, ctx: Any, signature: Signature) -> Any:
    """The context in which a call is lowered as one that is split along columns too; else None.

    Where there is only one device, or each has its own program (inside shard_map and inside such a
    split call), nothing is left to split. An exported program cannot hold the split, which is a
    function of this process.
    """
    module = ctx.module_context
    axes = module.axis_context
    if (
        signature.columns is None
        or not isinstance(axes, mlir.ShardingContext)
        or axes.num_devices == 1
        or module.lowering_parameters.for_export
        or not getattr(jax.config, "jax_use_shardy_partitioner", True)
    ):
        return None
    # custom_partitioning asks for devices to number the parts by; any will do.
    devices = axes.device_assignment or _ffi.devices(platform)[: axes.num_devices]
    if len(devices) != axes.num_devices:
        return None
    axes = dataclasses.replace(axes, device_assignment=devices)
    return ctx.replace(module_context=module.replace(axis_context=axes))


def _sharding_attributes(ctx: Any, signature: Signature) -> dict[str, Any]:
    """Attributes that keep a batch-sharded call local to each device.

    Only the leading dimensions that all operands share in full can be sharded without a gather.
    """
    avals = [*ctx.avals_in, *ctx.avals_out]
    cores = [*signature.operands, *signature.results]
    batch_rank = avals[-1].ndim - len(cores[-1])
    batch = avals[-1].shape[:batch_rank]
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return {}
    shared = 0
    while shared < batch_rank and all(a.shape[shared] == batch[shared] for a in avals):
        shared += 1
    if shared == 0:
        return {}
    names = iter(_factor_names())
    sizes: dict[str, int] = {}

    def new_factor(size: int) -> str:
        name = next(names)
        sizes[name] = size
        return name

    leading = [new_factor(size) for size in batch[:shared]]
    tensors = [
        f"[{', '.join([*leading, *(new_factor(size) for size in aval.shape[shared:])])}]"
        for aval in avals
    ]
    split = len(ctx.avals_in)
    rule = (
        f"#sdy.op_sharding_rule<({', '.join(tensors[:split])})->({', '.join(tensors[split:])}) "
        f"{{{', '.join(f'{name}={size}' for name, size in sizes.items())}}}, custom>"
    )
    return {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(shared)}),
        "sdy.sharding_rule": mlir.ir.Attribute.parse(rule),
    }


def _factor_names() -> Iterator[str]:
    """Factor names as Shardy spells them: i to z, then z_1, z_2, ..."""
    yield from "ijklmnopqrstuvwxyz"
    count = 1
    while True:
        yield f"z_{count}"
        count += 1


# JAX's own primitives.


def override_lowering(
    primitive: Any, operation: Operation, adapt: Callable[[Params], Params]
) -> Callable[[], None]:
    """Lowers one of JAX's primitives to an operation wherever that has a kernel.

    Args:
      primitive: JAX's; its operands are the operation's and its results the operation's first ones.
      operation: what it becomes.
      adapt: the operation's parameters, given the primitive's.

    Returns:
      A function that restores the former lowering.
    """
    former = {platform: _lowerings(platform).get(primitive) for platform in _ffi.PLATFORMS}

    def lower(platform: _ffi.Platform, ctx: Any, *operands: Any, **params: Any) -> Any:
        ours = adapt(params)
        if not operation.has_kernel(platform, ctx, ours):
            rule = (former[platform] or _lowerings(None)[primitive]).rule
            return rule(ctx, *operands, **params)
        call = mlir.lower_fun(lambda *xs: operation(*xs, **ours)[: len(ctx.avals_out)])
        return call(ctx, *operands)

    def undo() -> None:
        for platform, entry in former.items():
            if entry is None:
                del _lowerings(platform)[primitive]
            else:
                _lowerings(platform)[primitive] = entry

    for platform in _ffi.PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    return undo


def _lowerings(platform: _ffi.Platform | None) -> dict[Any, Any]:
    """JAX's table of lowering rules of a platform; None: those of every other platform."""
    if platform is None:
        return mlir._lowerings  # type: ignore[no-any-return, unused-ignore]
    return mlir._platform_specific_lowerings[platform]  # type: ignore[no-any-return, unused-ignore]
