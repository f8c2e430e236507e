"""From times to the kernel of each size."""

from collections.abc import Iterator, Mapping, Sequence

from jax_batched import _ffi
from jax_batched._tuned import Kind, ranges
from jax_batched._tuning.calls import candidates

NOISE = 1.02  # a kernel replaces another if it is faster than this many times


def pick(times: Mapping[str, float], preferred: Sequence[str]) -> str:
    """The fastest kernel, or the first of the preferred ones that is as fast within the noise."""
    best = min(times.values())
    for kernel in preferred:
        if times.get(kernel, float("inf")) <= NOISE * best:
            return kernel
    return min(times, key=lambda kernel: times[kernel])


def spread(kind: Kind, winners: Mapping[int, str], tiers: Sequence[_ffi.Tier]) -> dict[int, str]:
    """The kernel of each n: a size that was not measured takes that of the next one above.

    Kernels work in tiles, so a size costs about what the next full tile does.
    """
    kernels = {}
    below = None
    for n, kernel in sorted(winners.items()):
        for size in range(n if below is None else below + 1, n + 1):
            if kernel in candidates(kind, size, tiers):
                kernels[size] = kernel
        below = n
    return kernels


def changes(
    new: Mapping[int, str], old: Mapping[int, str], times: Mapping[int, Mapping[str, float]]
) -> Iterator[str]:
    """A line for each range of sizes that gets another kernel, with the gain where measured."""
    pairs = {n: f"{old[n] or 'none'} -> {new[n]}" for n in new if new[n] != old[n]}
    for low, high, pair in ranges(pairs):
        gains = [
            times[n][old[n]] / times[n][new[n]]
            for n in range(low, high + 1)
            if n in times and old[n] in times[n]
        ]
        sizes = f"n = {low}" if low == high else f"n = {low}..{high}"
        gain = f", {min(gains):.2f} to {max(gains):.2f} times as fast" if gains else ""
        yield f"{sizes}: {pair}{gain}"
