// Included by isa_*.cc behind the vectors: the functions of softmax, and loops over rows of stored elements.
namespace pkv {
namespace {

#if defined(__clang__)
#define PKV_UNROLL _Pragma("unroll")
#else
#define PKV_UNROLL _Pragma("GCC unroll 16")
#endif

constexpr float kInfinity = __builtin_inff();

// e^x to about 1e-7 for x up to 88; 0 below -87. NaN stays.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, in two steps so that r keeps its bits; then e^r = 1 + r + r^2 p(r), where p is
// the interpolation of (e^r - 1 - r) / r^2 at five Chebyshev nodes.
PKV_INLINE Vec exponential(Vec x) {
  const Vec limit = broadcast(-87.0f);
  const Vec bounded = larger(limit, x);
  const Vec n = round_to_whole(bounded * broadcast(1.44269504f));
  Vec r = multiply_add(n, broadcast(-0.693359375f), bounded);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(0x1.6d1606p-10f);
  p = multiply_add(p, r, broadcast(0x1.12106cp-7f));
  p = multiply_add(p, r, broadcast(0x1.555516p-5f));
  p = multiply_add(p, r, broadcast(0x1.5554d8p-3f));
  p = multiply_add(p, r, broadcast(0.5f));
  const Vec power = multiply_add(r * r, p, r) + broadcast(1.0f);
  return select_below(x, limit, broadcast(0.0f), scale_by_power(power, n));
}

PKV_INLINE float exponential_of(float x) {
  float lanes[kWidth];
  store(lanes, exponential(broadcast(x)));
  return lanes[0];
}

// tanh by its exponential, and near 0, where that would cancel, by its series.
PKV_INLINE Vec hyperbolic_tangent(Vec x) {
  const Vec y = smaller(broadcast(10.0f), larger(broadcast(-10.0f), x));
  const Vec e = exponential(y + y);
  const Vec large = (e - broadcast(1.0f)) / (e + broadcast(1.0f));
  const Vec square = y * y;
  Vec series = broadcast(62.0f / 2835.0f);
  series = multiply_add(series, square, broadcast(-17.0f / 315.0f));
  series = multiply_add(series, square, broadcast(2.0f / 15.0f));
  series = multiply_add(series, square, broadcast(-1.0f / 3.0f));
  const Vec small = multiply_add(series * square, y, y);
  return select_below(larger(y, -y), broadcast(0.3f), small, large);
}

PKV_INLINE int64_t round_up_16(int64_t dim) { return (dim + 15) & ~static_cast<int64_t>(15); }

// Decodes a row of `dim` elements; `out` has dim rounded up to 16, the rest becomes 0.
template <class T>
inline void decode_row(const char *row, int64_t dim, float *out) {
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) store(out + d, T::load(row + d * T::kBytes));
  if constexpr (kWidth == 16) {
    if (d < dim) store(out + d, T::load_half(row + d * T::kBytes));
  } else {
    for (; d < round_up_16(dim); d += kWidth) store(out + d, broadcast(0.0f));
  }
}

// Stores a row of `dim` elements times `factor`.
template <class T>
inline void encode_row(const float *row, float factor, int64_t dim, char *out) {
  const Vec factors = broadcast(factor);
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) T::store(out + d * T::kBytes, load(row + d) * factors);
  if constexpr (kWidth == 16) {
    if (d < dim) T::store_half(out + d * T::kBytes, load(row + d) * factors);
  }
}

// Calls f(T()) with the element type of a float dtype.
template <class F>
inline void with_float_type(pkv_dtype dtype, F f) {
  switch (dtype) {
    case PKV_FLOAT16: f(Float16()); break;
    case PKV_BFLOAT16: f(Bfloat16()); break;
    default: f(Float32()); break;
  }
}

// The same for all dtypes of stored K and V.
template <class F>
inline void with_kv_type(pkv_dtype dtype, F f) {
  switch (dtype) {
    case PKV_FLOAT8_E4M3: f(E4m3()); break;
    case PKV_FLOAT8_E5M2: f(E5m2()); break;
    case PKV_INT8: f(Int8()); break;
    default: with_float_type(dtype, f); break;
  }
}

}  // namespace
}  // namespace pkv
