// Groups of matrices whose size is known when this is compiled, for the smallest ones: every loop
// is unrolled, an entry is a variable, and nothing goes through scratch. The operations on an entry
// and their order are those of factor_lanes.h and substitution_lanes.h, so the bits are the same.
//
// Serves whole groups of neighbours in memory with one right-hand side; what else there is, and
// groups in which a factorization fails, are for the kernels for any n.
#pragma once

#include "ffi/cpu/engine/substitution_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// Real elements in wide registers: elsewhere they gain less, and they are slow to compile.
template <class T>
inline constexpr int kMaxFixedSize = kIsComplex<T> || kVectorBytes < 32 ? 0 : 8;

// Calls f with n as a compile-time constant if there are kernels for it. Returns whether it did.
template <class T, class F>
JAX_BATCHED_INLINE bool with_fixed_size(int64_t n, F f) {
  if constexpr (kMaxFixedSize<T> > 0) {
    if (n < 2 || n > kMaxFixedSize<T>) return false;
    with_constant<kMaxFixedSize<T>>(n, [&](auto size) JAX_BATCHED_INLINED {
      if constexpr (size >= 2) f(size);
    });
    return true;
  }
  return false;
}

// kCount entries of each matrix of a group.
template <class R, int kCount>
struct FixedEntries {
  // Columns of the squares that are transposed: by lines there must be as many entries.
  static constexpr int kPiece =
      Square<R>::kByLines && kCount >= kLanes<R> ? kLanes<R> : Square<R>::kPiece;

  typename Simd<R>::Vector entry[kCount];

  JAX_BATCHED_INLINE Simd<R> get(int e) const { return Simd<R>(entry[e]); }
  JAX_BATCHED_INLINE void set(int e, Simd<R> value) { entry[e] = value.v; }

  // From and to kLanes neighbours in memory, a piece of each at a time; the last piece is moved
  // back to end with the matrix. Fewer entries than a piece has are collected from as many
  // registers of neighbours. Calls, as they are most of the code and every operation has them.
  JAX_BATCHED_CALLED void load(const R* first) { *this = loaded(first); }
  // load() without a call, where little else is computed: then what is not used costs nothing.
  static JAX_BATCHED_INLINE FixedEntries loaded(const R* first) {
    FixedEntries entries;
    fetch_ahead(first);
    if constexpr (kCount < kPiece) {
      unrolled<kCount>([&](auto e) JAX_BATCHED_INLINED {
        entries.entry[e] = collected<FromNeighbours, e>(
            [=](int r) JAX_BATCHED_INLINED { return Simd<R>::load(first + r * kLanes<R>); });
      });
    } else {
      each_piece([&](auto at) JAX_BATCHED_INLINED {
        Square<R, kPiece> square;
        square.load_transposed([=](int l) JAX_BATCHED_INLINED { return first + l * kCount + at; });
        unrolled<kPiece>([&](auto i)
                             JAX_BATCHED_INLINED { entries.entry[at + i] = square.row[i]; });
      });
    }
    return entries;
  }
  JAX_BATCHED_CALLED void store(R* first) const {
    if constexpr (kCount < kPiece) {
      unrolled<kCount>([&](auto r) JAX_BATCHED_INLINED {
        const Simd<R> neighbours =
            collected<FromEntries, r>([&](int e) JAX_BATCHED_INLINED { return get(e); });
        neighbours.store(first + r * kLanes<R>);
      });
    } else {
      each_piece([&](auto at) JAX_BATCHED_INLINED {
        Square<R, kPiece> square;
        unrolled<kPiece>([&](auto i) JAX_BATCHED_INLINED { square.row[i] = entry[at + i]; });
        square.store_transposed([=](int l) JAX_BATCHED_INLINED { return first + l * kCount + at; });
      });
    }
  }

  // Fetches what is loaded from or stored to a little later.
  static JAX_BATCHED_INLINE void fetch_ahead(const R* first) {
    const char* begin = reinterpret_cast<const char*>(first) + 4096;
    fetch_lines(begin, begin + kCount * kVectorBytes);
  }

 private:
  // Where number `lane` of entry e is among the registers of neighbours; of register r among the
  // entries.
  struct FromNeighbours {
    static constexpr int source(int lane, int e) { return (lane * kCount + e) / kLanes<R>; }
    static constexpr int place(int lane, int e) { return (lane * kCount + e) % kLanes<R>; }
  };
  struct FromEntries {
    static constexpr int source(int lane, int r) { return (r * kLanes<R> + lane) % kCount; }
    static constexpr int place(int lane, int r) { return (r * kLanes<R> + lane) / kCount; }
  };
  // The lanes of [all before | source kSource]; of sources 0 and 1 both as they are.
  template <class From, int kWanted, int kSource>
  struct Taken {
    static constexpr int of(int lane) {
      const int source = From::source(lane, kWanted), place = From::place(lane, kWanted);
      if (source == kSource) return kLanes<R> + place;
      return kSource == 1 && source == 0 ? place : lane;
    }
  };
  template <class From, int kWanted, class Source>
  static JAX_BATCHED_INLINE typename Simd<R>::Vector collected(Source source) {
    Simd<R> result = source(0);
    unrolled<kCount - 1>([&](auto before) JAX_BATCHED_INLINED {
      result = shuffle<R, Taken<From, kWanted, before + 1>>(result, source(before + 1),
                                                            std::make_index_sequence<kLanes<R>>{});
    });
    return result.v;
  }

  template <class F>
  static JAX_BATCHED_INLINE void each_piece(F f) {
    unrolled<(kCount + kPiece - 1) / kPiece>([&](auto piece) JAX_BATCHED_INLINED {
      f(std::integral_constant<int, std::min(piece * kPiece, kCount - kPiece)>{});
    });
  }
};

// The lower triangle M(i, j) of an n x n matrix, as LowerSystem describes it: entry (i, j) of the
// matrix, with kSwapped (j, i), and with kReversed counted from the end.
template <int n, bool kSwapped, bool kReversed>
constexpr int fixed_entry(int i, int j) {
  const int entry = kSwapped ? j * n + i : i * n + j;
  return kReversed ? n * n - 1 - entry : entry;
}

// factor_group() on the lower triangle, or with kUpper on the transpose of the upper one. Returns
// info of each lane.
template <bool kUpper, int n, class R>
JAX_BATCHED_INLINE Simd<R> factor_fixed(FixedEntries<R, n * n>& a) {
  constexpr auto at = fixed_entry<n, kUpper, false>;
  const Simd<R> zero(R(0));
  Simd<R> info = zero;
  unrolled<n>([&](auto j) JAX_BATCHED_INLINED {
    unrolled<n - j>([&](auto below) JAX_BATCHED_INLINED {
      constexpr int i = j + below;
      Simd<R> sum = a.get(at(i, j));
      unrolled<j>([&](auto k) JAX_BATCHED_INLINED {
        sum = sub_mul(sum, a.get(at(j, k)), a.get(at(i, k)));
      });
      a.set(at(i, j), sum);
    });
    const Simd<R> pivot = a.get(at(j, j));
    info = first_failure(info, pivot, j + 1);
    const Simd<R> root = sqrt(pivot);
    const Simd<R> inverse = Simd<R>(R(1)) / root;
    a.set(at(j, j), root);
    unrolled<n - j - 1>([&](auto below) JAX_BATCHED_INLINED {
      constexpr int entry = at(j + 1 + below, j);
      a.set(entry, scale(a.get(entry), inverse));
    });
  });
  return info;
}

// symmetrize(): the triangle that `kUpper` names becomes the mean of both.
template <bool kUpper, int n, class R>
JAX_BATCHED_INLINE void symmetrize_fixed(FixedEntries<R, n * n>& a) {
  unrolled<n>([&](auto i) JAX_BATCHED_INLINED {
    unrolled<i>([&](auto j) JAX_BATCHED_INLINED {
      constexpr int entry = fixed_entry<n, kUpper, false>(i, j);
      constexpr int mirrored = fixed_entry<n, !kUpper, false>(i, j);
      a.set(entry, half_sum(a.get(entry), a.get(mirrored)));
    });
  });
}

// Zeros in the strict triangle that carries no data.
template <bool kUpper, int n, class R>
JAX_BATCHED_INLINE void clear_fixed(FixedEntries<R, n * n>& a) {
  unrolled<n>([&](auto i) JAX_BATCHED_INLINED {
    unrolled<i>([&](auto j) JAX_BATCHED_INLINED {
      a.set(fixed_entry<n, kUpper, false>(i, j), Simd<R>(R(0)));
    });
  });
}

// substitute_group() with one right-hand side.
template <bool kSwapped, bool kReversed, int n, class R>
JAX_BATCHED_INLINE void substitute_fixed(const FixedEntries<R, n * n>& m, bool unit,
                                         FixedEntries<R, n>& y) {
  constexpr auto at = fixed_entry<n, kSwapped, kReversed>;
  constexpr auto place = [](int i) { return kReversed ? n - 1 - i : i; };
  unrolled<n>([&](auto i) JAX_BATCHED_INLINED {
    Simd<R> sum = y.get(place(i));
    unrolled<i>([&](auto j)
                    JAX_BATCHED_INLINED { sum = sub_mul(sum, m.get(at(i, j)), y.get(place(j))); });
    if (!unit) sum = divide(sum, m.get(at(i, i)));
    y.set(place(i), sum);
  });
}

// solve_group_with_factor() with one right-hand side.
template <bool kLower, int n, class R>
JAX_BATCHED_INLINE void solve_fixed_with_factor(const FixedEntries<R, n * n>& c,
                                                FixedEntries<R, n>& y) {
  substitute_fixed<!kLower, false, n>(c, false, y);
  substitute_fixed<kLower, true, n>(c, false, y);
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
