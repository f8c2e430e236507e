"""Operations on batches whose matrices differ in size, as primitives of their own.

Such a primitive has one operand more, the last: the number of rows of each matrix. Its kernel, on
the CPU, computes each matrix at its own size. Elsewhere, and in derivatives, matrices are continued
by the identity (`Sizes`) and the operation itself is called.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched import _ffi
from jax_batched._core import Operation, Params, Path, Rules, _jax, kernel, lax
from jax_batched._core.signature import Signature
from jax_batched._sizes import Sizes

Array = jax.Array


Continue = Callable[[Sizes, Array, Params], Array]
Finish = Callable[[Sizes, Sequence[Array]], Sequence[Array]]


def sized(
    operation: Operation,
    signature: str | None = None,
    *,
    continued: Continue = lambda sizes, a, params: sizes.continued(a),
    finish: Finish = lambda sizes, results: results,
) -> Callable[..., Sequence[Array]]:
    """``call(sizes, *operands, **params)``: the operation, with sizes of square matrices if there
    are some.

    `signature` is the operation's for square matrices, if it takes others. There n is what has a
    size: matrices (n,n) are `continued`, right-hand sides and results are zero beyond it. `finish`
    corrects results for which that is not enough.
    """
    own = operation.rules.signature if signature is None else lambda params: signature
    primitive = _primitive(operation, own, continued, finish)

    def call(sizes: Sizes, *operands: Array, **params: Any) -> Sequence[Array]:
        if not sizes:
            return operation(*operands, **params)
        # In full, and spread as matrices are: so a batch of several devices stays where it is.
        batch = jnp.broadcast_shapes(operands[0].shape[:-2], sizes.given.shape)
        each = jnp.broadcast_to(sizes.given, batch)
        for x in operands[:1] if operands[0].shape[:-2] == batch else operands[1:]:
            each = _jax.sharded_like(each, x) if x.shape[:-2] == batch else each
        return primitive(*operands, each, **params)

    return call


def _primitive(
    operation: Operation, of_square: Callable[[Params], str], continued: Continue, finish: Finish
) -> Operation:
    rules = operation.rules

    def signature(params: Params) -> str:
        operands, results = of_square(params).split("->")
        return f"{operands},()->{results}"

    def compute(*operands: Array, **params: Any) -> Sequence[Array]:
        *data, each = operands
        cores = Signature.parse(signature(params))
        n = data[0].shape[-1]
        sizes = Sizes(operation.name, each, n, each.shape)
        data = [
            continued(sizes, x, params)
            if core == ("n", "n")
            else sizes.spoilt(_within(sizes, x, core))
            for x, core in zip(data, cores.operands, strict=False)
        ]
        results = finish(sizes, operation(*data, **params))
        return [
            _within(sizes, x, core) if jnp.issubdtype(x.dtype, jnp.inexact) else x
            for x, core in zip(results, cores.results, strict=False)
        ]

    def jvp(
        params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        moving = [i for i, tangent in enumerate(tangents[:-1]) if tangent is not None]

        def of_moving(*values: Array) -> Sequence[Array]:
            operands = list(primals)
            for i, value in zip(moving, values, strict=True):
                operands[i] = value
            return compute(*operands, **params)

        results, derivatives = jax.jvp(
            of_moving, [primals[i] for i in moving], [tangents[i] for i in moving]
        )
        return results, [None if x.dtype == jax.dtypes.float0 else x for x in derivatives]

    def transpose(
        params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
    ) -> Sequence[Any]:
        """Of right-hand sides, which are as the first result."""
        *fixed, _, each = primals
        ct = cotangents[0]
        if ct is None:
            return [None]
        solve = functools.partial(compute, *fixed, **params)
        of_b = jax.linear_transpose(lambda b: solve(b, each)[0], jax.typeof(ct))
        return list(of_b(ct))

    return Operation(
        operation.name + _ffi.SIZED_SUFFIX,
        Rules(
            signature=signature,
            paths=(
                kernel(),
                Path("composed", compute, lambda call: True, broadcasts=True),
                lax(compute, broadcasts=True),
            ),
            jvp=jvp,
            transpose=None if rules.transpose is None else transpose,
            linear=(-2,),
            hidden=rules.hidden,
            result_dtypes=rules.result_dtypes,
            stored=rules.stored,
            columns=rules.columns,
            overwritten=-2,
        ),
    )


def _within(sizes: Sizes, x: Array, core: tuple[str, ...]) -> Array:
    """Zeros beyond a size along the dimensions that have one; NaN where a number is of a wrong
    size."""
    if not core:
        return sizes.spoilt(x, 0)
    if len(core) == 1:
        return sizes.within(x[..., None], -2)[..., 0]
    return sizes.within(x, *(i - 2 for i, dim in enumerate(core) if dim == "n"))
