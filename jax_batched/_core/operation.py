"""The one factory of JAX primitives.

An operation is described by the ranks of its operands, written as in NumPy's generalised ufuncs:
``"(n,n),(n,k)->(n,k),()"``. From that follow the shape rule, batching, sharding and varying axes:

* All dimensions before the core ones are batch dimensions. Operands have equally many of them; each
  is the result's size or 1. A size of 1 is broadcast inside the kernel, never copied.
* A core dimension that only one operand has (``k`` above: right-hand sides) is made of independent
  columns. A batch dimension that only that operand has is folded into it: one factor, more columns.
* Of a call with `where`, that mask is one more operand, the last, of core ``()``. Entries where it
  is False are not computed: zeros, and -1 for an integer of each matrix, its `info`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_batched import _checks, _ffi
from jax_batched._core import _jax, mask, partition, sharding
from jax_batched._core._jax import ad, batching, mlir
from jax_batched._core.signature import (
    Signature,
    at_least,
    broadcast_batch,
    fold,
    insert_broadcast,
    unfold,
)

Array = jax.Array
Params = dict[str, Any]


class Call(NamedTuple):
    """What decides which path serves: a call as it is lowered for a platform with kernels.

    Attributes:
      operation: its name.
      platform: "cpu" or "cuda".
      dtype: of the data.
      sizes: of the core dimensions by name; symbolic in an exported program.
      batch: how many matrices a device has, at most; symbolic likewise.
      devices: of the program, over which arrays may be spread.
      params: the operation's own parameters.
      for_export: whether the program is lowered to be exported.
    """

    operation: str
    platform: _ffi.Platform
    dtype: Any
    sizes: dict[str, Any]
    batch: Any
    devices: int
    params: Params
    for_export: bool


@dataclasses.dataclass(frozen=True)
class Path:
    """One way to compute an operation. The first one of an operation that serves a call is taken.

    Attributes:
      name: what `force_kernel` takes to have this path alone.
      compute: the operation made of others; None: a call of this library's kernels.
      serves: whether it serves a call.
      broadcasts: whether `compute` takes operands whose batch dimensions only broadcast.
      automatic_sharding: whether `compute` leaves an explicit mesh to the partitioner.
    """

    name: str
    compute: Callable[..., Sequence[Array]] | None
    serves: Callable[[Call], bool]
    broadcasts: bool = False
    automatic_sharding: bool = False


def _has_kernels(call: Call) -> bool:
    """Whether kernels serve a call's platform, dtype and sizes."""
    n = call.sizes.get("n")
    return (
        isinstance(n, int)
        and n <= _ffi.max_n(call.platform, call.operation, call.dtype)
        and all(at_least(1, size) for size in call.sizes.values())
        and _ffi.has_kernels(call.platform, for_export=call.for_export)
    )


def _is_one_kernel(call: Call) -> bool:
    n, nrhs = call.sizes["n"], call.sizes.get("k", 1)
    return _ffi.is_one_kernel(call.platform, call.operation, call.dtype, n, nrhs)


def kernel(serves: Callable[[Call], bool] = lambda call: True) -> Path:
    """One native kernel, where there is one and the given limits allow it."""
    return Path(
        "kernel", None, lambda call: _has_kernels(call) and _is_one_kernel(call) and serves(call)
    )


def takes_rows(call: Call) -> bool:
    """Whether the rows of m x n matrices, too, are no more than kernels serve."""
    m = call.sizes["m"]
    return isinstance(m, int) and _ffi.is_one_kernel(call.platform, call.operation, call.dtype, m)


def composed(
    compute: Callable[..., Sequence[Array]],
    serves: Callable[[Call], bool] = lambda call: True,
    *,
    automatic_sharding: bool = False,
    like: Callable[[Call], Call] = lambda call: call,
) -> Path:
    """Made of operations that have kernels, in the range of its own and where it serves.

    With `like`, in the range of the call that this makes of one.
    """
    return Path(
        "composed",
        compute,
        lambda call: _has_kernels(like(call)) and serves(call),
        broadcasts=True,
        automatic_sharding=automatic_sharding,
    )


def beyond(compute: Callable[..., Sequence[Array]] | None, serves: Callable[[Call], bool]) -> Path:
    """Where it serves, beyond the range in which one kernel always does.

    Made of operations that have kernels or, without `compute`, a kernel that has no limit.
    """

    def serves_beyond(call: Call) -> bool:
        return (
            all(isinstance(size, int) and size > 0 for size in call.sizes.values())
            and serves(call)
            and _ffi.has_kernels(call.platform, for_export=call.for_export)
        )

    name = "kernel" if compute is None else "beyond"
    return Path(name, compute, serves_beyond, broadcasts=True, automatic_sharding=True)


def lax(compute: Callable[..., Sequence[Array]], *, broadcasts: bool = False) -> Path:
    """Plain `lax`, which serves whatever is left."""
    return Path("lax", compute, lambda call: True, broadcasts)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What an operation is, besides its name.

    Attributes:
      signature: core dimensions as text, given the parameters.
      paths: ways to compute it, in order of preference; the last one is `lax`, which alone serves
        platforms without kernels.
      sizes: core dimensions of the results that no operand has, given the parameters and the sizes
        of those that operands have.
      jvp: ``jvp(params, primals, tangents) -> (results, tangents)``; a None tangent is zero.
        Without a rule JAX refuses to differentiate.
      transpose: ``transpose(params, primals, cotangents) -> cotangents`` of the operands that are
        None among the primals, in their order; a None cotangent is zero, on both sides.
      linear: places of the operands in which the operation is linear, those that `transpose` takes
        together; counted from the end if negative.
      data: place of the operand whose dtype is the operation's.
      result_dtypes: dtype of each result, None is the data's; or a function of the parameters and
        the data's dtype.
      stored: float16 and bfloat16 are accepted as storage: what no kernel takes as it is is
        computed in float32 and rounded once.
      columns: whether a core dimension that only one operand has is made of independent columns.
      overwritten: place of the operand whose memory the first result may take, from the end.
      hidden: given the parameters, how many of the last results are workspace that callers do not
        see. A path other than a kernel may leave them out.
    """

    signature: Callable[[Params], str]
    paths: tuple[Path, ...]
    sizes: Callable[[Params, dict[str, Any]], dict[str, Any]] = lambda params, sizes: {}
    jvp: (
        Callable[[Params, tuple[Any, ...], tuple[Any, ...]], tuple[Sequence[Any], Sequence[Any]]]
        | None
    ) = None
    transpose: Callable[[Params, tuple[Any, ...], tuple[Any, ...]], Sequence[Any]] | None = None
    linear: tuple[int, ...] = (-1,)
    data: int = 0
    result_dtypes: tuple[Any, ...] | Callable[[Params, Any], tuple[Any, ...]] = (None,)
    stored: bool = False
    columns: bool = True
    overwritten: int = -1
    hidden: Callable[[Params], int] = lambda params: 0

    def lax(self, *operands: Array, **params: Any) -> Sequence[Array]:
        """The last path."""
        compute = self.paths[-1].compute
        assert compute is not None
        return compute(*operands, **params)


class Operation:
    """A JAX primitive with all its rules. Calling it binds the primitive."""

    def __init__(self, name: str, rules: Rules):
        self.name = name
        self.rules = rules
        self.primitive = _jax.Primitive(f"jax_batched_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(functools.partial(_jax.xla.apply_primitive, self.primitive))
        self.primitive.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[self.primitive] = self._batch
        if rules.jvp is not None:
            ad.primitive_jvps[self.primitive] = self._jvp
        if rules.transpose is not None:
            ad.primitive_transposes[self.primitive] = self._transpose
        mlir.register_lowering(self.primitive, functools.partial(self._lower, None))
        for platform in _ffi.PLATFORMS:
            rule = functools.partial(self._lower, platform)
            mlir.register_lowering(self.primitive, rule, platform=platform)

    def signature(self, params: Params) -> Signature:
        """Core dimensions of this operation under these parameters, of a mask too."""
        signature = Signature.parse(self.rules.signature(_own(params)), self.rules.columns)
        if not params["masked"]:
            return signature
        return dataclasses.replace(signature, operands=(*signature.operands, ()))

    def __call__(
        self,
        *operands: Array,
        where: Array | None = None,
        overwrite: bool = False,
        **params: Any,
    ) -> list[Array]:
        """Binds the primitive to operands whose batch dimensions broadcast as NumPy's do.

        With `where` only entries of the batch where it is True are computed. With `overwrite` the
        first result takes the memory of an operand, most often the last, if it has its shape;
        where that is still needed, XLA makes a copy. A kernel reads what it overwrites first.
        """
        outer = mask.current() if where is None else None
        choices = {"kernel": _ffi.forced_kernel(), "overwrite": overwrite}
        params = {**params, **choices, "masked": where is not None or outer is not None}
        cores = self.signature(params).operands
        if outer is not None:
            where = mask.of_batch(outer, _batch_shape(operands, cores))
        if where is not None:
            operands = (*operands, where)
        rank = max(x.ndim - len(core) for x, core in zip(operands, cores, strict=True))
        aligned = [
            x if x.ndim == rank + len(core) else x[(None,) * (rank + len(core) - x.ndim)]
            for x, core in zip(operands, cores, strict=True)
        ]
        results = self._bind(aligned, params)
        return results[: len(results) - self.rules.hidden(_own(params))]

    def _bind(self, operands: Sequence[Array], params: Params) -> list[Array]:
        """Binds operands of equal batch rank; folds the batch dimensions that are columns.

        A dimension that only the mask has is none of the primitive's: one result serves it.
        """
        signature = self.signature(params)
        data, where = _split(operands, params)
        if where is not None:
            batch = _batch_shape(data, signature.operands)
            if any(one == 1 != many for one, many in zip(batch, where.shape, strict=True)):
                results = self._bind([*data, mask.of_batch(where, batch)], params)
                full = jnp.broadcast_shapes(batch, where.shape)
                spread = [jnp.broadcast_to(x, (*full, *x.shape[len(full) :])) for x in results]
                return self._cleared(spread, where, signature)
        foldable = self._foldable_batch_dims(signature, operands)
        if not foldable:
            if where is not None:  # in full, as batches that are spread over devices need it
                operands = [*data, jnp.broadcast_to(where, batch)]
            return list(self.primitive.bind(*_jax.align_varying_axes(operands), **params))
        assert signature.columns is not None
        owner, column = signature.columns
        sizes = [operands[owner].shape[d] for d in foldable]
        folded = [
            fold(x, foldable, core.index(column) - len(core))
            if column in core
            else jax.lax.squeeze(x, foldable)
            for x, core in zip(operands, signature.operands, strict=True)
        ]
        results = self.primitive.bind(*_jax.align_varying_axes(folded), **params)
        return [
            unfold(x, foldable, sizes, core.index(column) - len(core))
            if column in core
            else insert_broadcast(x, foldable, sizes)
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
        spec = _jax.spec_of(jax.typeof(operands[owner]))
        if spec[batch_rank + core.index(column)] is not None:
            return []
        return [
            d
            for d in range(batch_rank)
            if operands[owner].shape[d] != 1
            and at_least(1, operands[owner].shape[d])
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

    def _sizes(self, avals: Sequence[Any], params: Params) -> dict[str, Any]:
        """Sizes of the core dimensions of operands and results."""
        sizes: dict[str, Any] = {}
        for aval, core in zip(avals, self.signature(params).operands, strict=True):
            for dim, size in zip(core, aval.shape[aval.ndim - len(core) :], strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"{self.name}: dimension {dim} is both {sizes[dim]} and {size} in operands "
                        f"of shapes {[a.shape for a in avals]}"
                    )
        return {**sizes, **self.rules.sizes(_own(params), sizes)}

    def _abstract_eval(self, *avals: Any, **params: Any) -> list[Any]:
        signature = self.signature(params)
        sizes = self._sizes(avals, params)
        cores = zip(avals, signature.operands, strict=True)
        batch = broadcast_batch(self.name, [a.shape[: a.ndim - len(core)] for a, core in cores])
        spec, core_spec = sharding.result_spec(self.name, avals, signature, batch)
        data = avals[self.rules.data]
        return [
            data.update(
                shape=(*batch, *(sizes[d] for d in core)),
                dtype=dtype,
                weak_type=False,
                sharding=_jax.with_spec(data.sharding, (*spec, *map(core_spec.get, core))),
            )
            for core, dtype in zip(
                signature.results, self._result_dtypes(params, data.dtype), strict=True
            )
        ]

    def _result_dtypes(self, params: Params, data: Any) -> list[Any]:
        dtypes = self.rules.result_dtypes
        if callable(dtypes):
            dtypes = dtypes(_own(params), data)
        return [data if dtype is None else jnp.dtype(dtype) for dtype in dtypes]

    # Derivatives. The rules in Rules see None where JAX has symbolic zeros.

    def _jvp(
        self, primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any
    ) -> tuple[list[Any], list[Any]]:
        assert self.rules.jvp is not None
        given = tuple(None if isinstance(t, ad.Zero) else t for t in tangents)
        dtype = primals[self.rules.data].dtype
        if self._is_stored(dtype):
            primals, given = _in_float32(primals), _in_float32(given)
        data, where = _split(primals, params)
        given, _ = _split(given, params)
        signature = self.signature(params)
        if where is not None:  # whatever a rule makes of the entries that are not computed
            given = tuple(_kept(given, where, signature.operands))
        with mask.only(where):
            results, derivatives = self.rules.jvp(_own(params), data, given)
        if where is not None:
            results = self._cleared(results, where, signature)
            derivatives = _kept(derivatives, where, signature.results)
        if self._is_stored(dtype):
            dtypes = self._result_dtypes(params, dtype)
            results, derivatives = _cast(results, dtypes), _cast(derivatives, dtypes)
        hidden = self.rules.hidden(_own(params))
        if hidden:  # nobody reads these
            types = jax.eval_shape(functools.partial(self.primitive.bind, **params), *primals)
            results = [*results, *(jnp.zeros(x.shape, x.dtype) for x in types[len(results) :])]
            derivatives = [*derivatives, *[None] * hidden]
        return list(results), [
            ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t
            for x, t in zip(results, derivatives, strict=True)
        ]

    def _transpose(self, cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        assert self.rules.transpose is not None
        operands, where = _split(operands, params)
        sought = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
        linear = sorted(range(len(operands))[i] for i in self.rules.linear)
        if not set(sought) <= set(linear):
            raise NotImplementedError(
                f"{self.name} is linear only in its operands {linear} (from 0), not in {sought}"
            )
        primals = tuple(None if i in sought else x for i, x in enumerate(operands))
        given = tuple(None if isinstance(ct, ad.Zero) else ct for ct in cotangents)
        given = given[: len(given) - self.rules.hidden(_own(params))]
        with mask.only(where):
            found = self.rules.transpose(_own(params), primals, given)
        results: list[Any] = [None] * (len(operands) + (where is not None))
        for i, ct in zip(sought, found, strict=True):
            aval = operands[i].aval
            if ct is None:
                results[i] = ad.Zero(aval)
                continue
            summed = [d for d in range(aval.ndim) if aval.shape[d] == 1 and ct.shape[d] != 1]
            results[i] = jnp.sum(ct, axis=tuple(summed), keepdims=True) if summed else ct
        return results

    # Lowering.

    def path(self, platform: _ffi.Platform | None, ctx: Any, params: Params) -> Path:
        """The path of the call that is lowered in this context."""
        dtype = ctx.avals_in[self.rules.data].dtype
        paths = self.rules.paths
        named = [path for path in paths if path.name == params["kernel"] != "kernel"]
        if platform is None:
            serving = paths[-1:]
        else:
            sizes = self._sizes(ctx.avals_in, params)
            for_export = _jax.is_for_export(ctx)
            rank = ctx.avals_out[0].ndim - len(self.signature(params).results[0])
            batch = math.prod(ctx.avals_out[0].shape[:rank])
            devices = _jax.devices_of_program(ctx)
            batch, own = -(-batch // devices), _own(params)
            call = Call(self.name, platform, dtype, sizes, batch, devices, own, for_export)
            serving = tuple(path for path in paths if path.serves(call))
        path = ([path for path in named if path in serving] or named or serving)[0]
        if path.compute is not None and self._is_stored(dtype):
            return self._widened
        return path

    def _is_stored(self, dtype: Any) -> bool:
        return self.rules.stored and _checks.is_stored(dtype)

    @property
    def _widened(self) -> Path:
        """float16 and bfloat16 in float32: the operation itself, rounded once."""

        def compute(*operands: Array, **params: Any) -> Sequence[Array]:
            dtypes = self._result_dtypes(params, operands[self.rules.data].dtype)
            return _cast(self(*_in_float32(operands), **params), dtypes)

        return Path("composed", compute, lambda call: True, broadcasts=True)

    def _lower(
        self, platform: _ffi.Platform | None, ctx: Any, *operands: Any, **params: Any
    ) -> Any:
        path = self.path(platform, ctx, params)
        if path.compute is None:
            assert platform is not None
            return self._lower_to_kernel(platform, ctx, *operands, **params)
        signature = self.signature(params)
        compute = functools.partial(path.compute, **_own(params))

        def made_of_others(*arrays: Array) -> Sequence[Array]:
            data, where = _split(arrays, params)
            if 0 in ctx.avals_out[0].shape:
                results: Any = [jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out]
            else:
                results = computed(data, where)
                workspace = ctx.avals_out[len(results) :]
                results = [*results, *(jnp.zeros(aval.shape, aval.dtype) for aval in workspace)]
            return results if where is None else self._cleared(results, where, signature)

        def computed(data: Sequence[Array], where: Array | None) -> Sequence[Array]:
            if not path.broadcasts:
                batch = ctx.avals_out[0].shape[: ctx.avals_out[0].ndim - len(signature.results[0])]
                data = [
                    jnp.broadcast_to(x, (*batch, *x.shape[x.ndim - len(core) :]))
                    for x, core in zip(data, signature.operands, strict=False)
                ]
            # What is made of kernels chooses them itself, unless one of them is forced by name.
            forced = "" if params["kernel"] in ("composed", "beyond") else params["kernel"]
            with _ffi.force_kernel(forced), mask.only(where):
                return compute(*data)

        if path.name == "lax" and platform == "cpu" and _jax.LAPACK_BATCHES_BLOCK:
            partitioning = sharding.partitioning_context(platform, ctx)
            if partitioning is not None:  # a loop: split before it is one
                return self._lower_partitioned(partitioning, *operands, **params)
        if path.name == "lax" or path.automatic_sharding:
            made_of_others = _jax.with_automatic_sharding(made_of_others, ctx.avals_out)
        return mlir.lower_fun(made_of_others, multiple_results=True)(ctx, *operands)

    def _lower_to_kernel(
        self, platform: _ffi.Platform, ctx: Any, *operands: Any, **params: Any
    ) -> Any:
        signature = self.signature(params)
        if signature.columns is not None:
            partitioning = sharding.partitioning_context(platform, ctx)
            if partitioning is not None:
                return self._lower_partitioned(partitioning, *operands, **params)
        lower = jax.ffi.ffi_lowering(
            _ffi.target_name(self.name),
            operand_output_aliases=self._aliases(ctx, params),
            extra_attributes=sharding.batch_attributes(ctx, signature),
        )
        return lower(ctx, *operands, kernel=params["kernel"], **_own(params))

    @staticmethod
    def _cleared(results: Sequence[Array], where: Array, signature: Signature) -> list[Array]:
        """The results with zeros in the entries that are not computed, and -1 for `info`."""
        return [
            mask.kept(x, where, len(core), -1 if x.dtype == jnp.int32 and not core else 0)
            for x, core in zip(results, signature.results, strict=False)
        ]

    def _aliases(self, ctx: Any, params: Params) -> dict[int, int]:
        """The operand that the first result takes the memory of, if any."""
        data, _ = _split(ctx.avals_in, params)
        place = len(data) + self.rules.overwritten
        operand, result = data[place], ctx.avals_out[0]
        fits = operand.shape == result.shape and operand.dtype == result.dtype
        return {place: 0} if params["overwrite"] and fits else {}

    def _lower_partitioned(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        """The call as one that the partitioner splits along batch dimensions and columns."""
        signature = self.signature(params)
        column = None if signature.columns is None else signature.columns[1]
        avals = [*ctx.avals_in, *ctx.avals_out]
        cores = [*signature.operands, *signature.results]
        batch = avals[-1].shape[: avals[-1].ndim - len(cores[-1])]
        roles = [
            partition.roles(batch, aval.shape, core, column)
            for aval, core in zip(avals, cores, strict=True)
        ]
        call = partition.partitioned(
            functools.partial(self.primitive.bind, **params),
            roles[: len(operands)],
            roles[len(operands) :],
        )
        return mlir.lower_fun(call)(ctx, *operands)


def _own(params: Params) -> Params:
    """The operation's own parameters: its rules know nothing of a kernel, memory or a mask."""
    return {k: v for k, v in params.items() if k not in ("kernel", "overwrite", "masked")}


def _batch_shape(operands: Sequence[Array], cores: Sequence[Any]) -> tuple[Any, ...]:
    """The batch dimensions of all operands together, without a mask's."""
    pairs = zip(operands, cores, strict=False)
    return jnp.broadcast_shapes(*(x.shape[: x.ndim - len(core)] for x, core in pairs))


def _split(operands: Sequence[Any], params: Params) -> tuple[tuple[Any, ...], Any]:
    """The operation's own operands, and the mask."""
    return (tuple(operands[:-1]), operands[-1]) if params["masked"] else (tuple(operands), None)


def _kept(arrays: Sequence[Any], where: Array, cores: Sequence[Any]) -> list[Any]:
    """Zeros in the entries that are not computed."""
    return [
        x if x is None else mask.kept(x, where, len(core))
        for x, core in zip(arrays, cores, strict=False)
    ]


def _in_float32(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        x.astype(jnp.float32) if x is not None and _checks.is_stored(x.dtype) else x for x in arrays
    )


def _cast(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [x if x is None else x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
