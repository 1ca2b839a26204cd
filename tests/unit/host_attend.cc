// The fast attention kernels against the reference, and what the results may not depend on.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "host_case.h"

using namespace pkv;

namespace {

constexpr uint64_t kSeed = 20260801;

template <class T>
T pick(std::mt19937_64 &random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

CaseShape draw_shape(std::mt19937_64 &random) {
  CaseShape shape;
  shape.dtype = pick(random, {PKV_FLOAT32, PKV_FLOAT16, PKV_BFLOAT16});
  shape.kv_dtype = pick(random, {PKV_FLOAT32, PKV_FLOAT16, PKV_BFLOAT16, PKV_FLOAT8_E4M3, PKV_FLOAT8_E5M2, PKV_INT8});
  shape.order = pick(random, {PKV_TOKEN_HEAD, PKV_HEAD_TOKEN});
  if (is_quantised_dtype(shape.kv_dtype)) {
    shape.kv_scales = pick(random, {PKV_SCALES_STATIC, PKV_SCALES_PER_TOKEN_HEAD});
  }
  shape.block_size = pick(random, {1, 3, 5, 16, 32, 100});
  shape.num_kv_heads = pick(random, {1, 2, 3});
  shape.group = pick(random, {1, 2, 3, 5, 8});
  shape.head_dim = static_cast<int32_t>(8 * (1 + random() % 32));
  shape.v_head_dim = pick(random, {shape.head_dim, static_cast<int32_t>(8 * (1 + random() % 32))});
  const int num_sequences = static_cast<int>(1 + random() % 4);
  for (int i = 0; i < num_sequences; ++i) {
    const int32_t longest = random() % 12 == 0 ? 1300 : 150;
    int32_t len = static_cast<int32_t>(random() % static_cast<uint64_t>(longest));
    if (random() % 3 == 0) len = len / shape.block_size * shape.block_size + pick(random, {0, 1});
    const int32_t queries = longest > 150 ? pick(random, {0, 1, 3}) : pick(random, {0, 1, 1, 2, 7, 40, len});
    shape.seq_lens.push_back(len);
    shape.query_lens.push_back(std::min(queries, len));
  }
  shape.padding_sequences = pick(random, {0, 0, 2});
  shape.padding_tokens = pick(random, {0, 0, 3});
  shape.is_causal = random() % 4 != 0;
  shape.has_sinks = random() % 3 == 0;
  shape.has_alibi = random() % 3 == 0;
  shape.has_lse = random() % 4 != 0;
  shape.window = pick<int64_t>(random, {0, 0, 1, 5, 64, 100});
  shape.is_window_released = shape.window > 0 && random() % 2 == 0;
  shape.has_holes = random() % 5 == 0;
  shape.softcap = pick(random, {0.0f, 0.0f, 2.0f, 50.0f});
  return shape;
}

// Rounding of one result in its dtype, and of the sums before it.
float tolerance(pkv_dtype dtype) {
  return dtype == PKV_FLOAT32 ? 2e-5f : dtype == PKV_FLOAT16 ? 1.1e-3f : 8.5e-3f;
}

bool is_close(float a, float b, float relative) {
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::fabs(a - b) <= relative * (1 + std::fabs(b));  // false for NaN
}

int64_t count_differences(const std::vector<float> &a, const std::vector<float> &b, int64_t num_out, pkv_dtype dtype) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool is_out = static_cast<int64_t>(i) < num_out;
    if (!is_close(a[i], b[i], is_out ? tolerance(dtype) : 2e-5f)) ++count;
  }
  return count;
}

bool is_equal(const std::vector<float> &a, const std::vector<float> &b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace

TEST_CASE("host attend: every instruction set agrees with the reference") {
  HostSettings settings;
  const std::vector<const char *> isas = available_isas();
  MESSAGE("seed " << kSeed);
  for (uint64_t i = 0; i < 300; ++i) {
    std::mt19937_64 random(kSeed + i);
    const CaseShape shape = draw_shape(random);
    INFO("case " << i << ": " << describe(shape));
    Case step(shape, kSeed + i);
    std::vector<float> expected, results;
    REQUIRE(set_host_isa("reference") == PKV_OK);
    REQUIRE(step.run(&expected) == PKV_OK);
    REQUIRE(std::none_of(expected.begin(), expected.end(), [](float value) { return std::isnan(value); }));
    for (const char *isa : isas) {
      INFO(isa);
      REQUIRE(set_host_isa(isa) == PKV_OK);
      REQUIRE(step.run(&results) == PKV_OK);
      CHECK(count_differences(results, expected, step.out_count(), shape.dtype) == 0);
    }
  }
}

TEST_CASE("host attend: every head dim") {
  HostSettings settings;
  for (int32_t dim = 8; dim <= 256; dim += 8) {
    for (const pkv_dtype dtype : {PKV_FLOAT32, PKV_BFLOAT16, PKV_FLOAT8_E4M3}) {
      CaseShape shape;
      shape.kv_dtype = dtype;
      shape.head_dim = dim;
      shape.v_head_dim = 264 - dim;
      shape.group = 5;
      shape.seq_lens = std::vector<int32_t>{37, 65};
      shape.query_lens = std::vector<int32_t>{1, 3};
      INFO(describe(shape));
      Case step(shape, kSeed);
      std::vector<float> expected, results;
      set_host_isa("reference");
      step.run(&expected);
      for (const char *isa : available_isas()) {
        INFO(isa);
        set_host_isa(isa);
        step.run(&results);
        CHECK(count_differences(results, expected, step.out_count(), shape.dtype) == 0);
      }
    }
  }
}

TEST_CASE("host attend: every code of 8 bits in K") {
  HostSettings settings;
  for (const pkv_dtype dtype : {PKV_FLOAT8_E4M3, PKV_FLOAT8_E5M2, PKV_INT8}) {
    CaseShape shape;
    shape.dtype = PKV_BFLOAT16;
    shape.kv_dtype = dtype;
    shape.head_dim = 256;
    shape.seq_lens = shape.query_lens = {1};
    Case step(shape, kSeed);
    const PagedKv &kv = step.params.kv;
    char *row = step.pool.data() + step.params.tables.block_table[0] * kv.block_bytes + kv.k_offset;
    for (int code = 0; code < 256; ++code) {
      row[code] = static_cast<char>(code);
      if (!std::isfinite(decode_element(dtype, row, code))) row[code] = 0;
    }
    step.params.scale = 0x1p20f;  // the smallest codes count
    for (int code = 0; code < 256; ++code) {
      INFO(dtype_name(dtype) << " " << code);
      uint16_t q[256] = {};
      q[code] = 0x3f80;  // 1
      step.params.q = q;
      std::vector<float> expected, results;
      set_host_isa("reference");
      REQUIRE(step.run(&expected) == PKV_OK);
      for (const char *isa : available_isas()) {
        INFO(isa);
        set_host_isa(isa);
        REQUIRE(step.run(&results) == PKV_OK);
        CHECK(is_close(results.back(), expected.back(), 1e-6f));
      }
    }
  }
}

TEST_CASE("host attend: infinities and NaN in V reach the rows that see them, and only those") {
  HostSettings settings;
  for (const auto &[kv_dtype, codes] : std::initializer_list<std::pair<pkv_dtype, std::vector<uint16_t>>>{
           {PKV_BFLOAT16, {0x7f80, 0xff80, 0x7fc0}}, {PKV_FLOAT8_E4M3, {0x7f}}, {PKV_FLOAT8_E5M2, {0x7c, 0xfc, 0x7e}}}) {
    CaseShape shape;
    shape.dtype = PKV_BFLOAT16;
    shape.kv_dtype = kv_dtype;
    shape.group = 3;
    shape.v_head_dim = 72;
    shape.window = 50;
    shape.seq_lens = shape.query_lens = {150, 40, 9};
    Case step(shape, kSeed);
    const PagedKv &kv = step.params.kv;
    const size_t bytes = static_cast<size_t>(dtype_bytes(kv_dtype));
    size_t next = 0;
    for (const auto &[sequence, position] : std::initializer_list<std::pair<int, int>>{
             {0, 0}, {0, 63}, {0, 66}, {0, 67}, {0, 149}, {1, 31}, {1, 32}}) {
      const int64_t block =
          step.params.tables.block_table[sequence * step.params.tables.table_stride + position / kv.block_size];
      char *row = step.pool.data() + static_cast<uint64_t>(block) * kv.block_bytes + kv.v_offset +
                  static_cast<size_t>(position % kv.block_size * kv.v_token_stride) * bytes;
      const size_t element = static_cast<size_t>(position) % 72;
      std::memcpy(row + element * bytes, &codes[next++ % codes.size()], bytes);
    }
    std::vector<float> expected, results;
    set_host_isa("reference");
    REQUIRE(step.run(&expected) == PKV_OK);
    for (const char *isa : available_isas()) {
      INFO(isa << " " << dtype_name(kv_dtype));
      set_host_isa(isa);
      REQUIRE(step.run(&results) == PKV_OK);
      int64_t num_nan = 0;
      for (size_t i = 0; i < results.size(); ++i) {
        if (std::isnan(expected[i])) {
          ++num_nan;
          CHECK(std::isnan(results[i]));
        } else {
          CHECK(is_close(results[i], expected[i], 8.5e-3f));
        }
      }
      CHECK(num_nan > 0);
    }
  }
}

TEST_CASE("host attend: results do not depend on the number of threads") {
  HostSettings settings;
  CaseShape shape;
  shape.dtype = PKV_FLOAT32;
  shape.kv_dtype = PKV_BFLOAT16;
  shape.num_kv_heads = 2;
  shape.group = 4;
  shape.seq_lens = {5000, 30, 700, 0, 1};
  shape.query_lens = {1, 30, 33, 0, 1};
  Case step(shape, kSeed);
  for (const char *isa : available_isas()) {
    INFO(isa);
    set_host_isa(isa);
    std::vector<float> alone, results;
    set_host_num_threads(1);
    REQUIRE(step.run(&alone) == PKV_OK);
    for (const int32_t threads : {2, 3, 16}) {
      set_host_num_threads(threads);
      REQUIRE(step.run(&results) == PKV_OK);
      CHECK(is_equal(results, alone));
    }
  }
}

TEST_CASE("host attend: results depend neither on batch mates nor on how a prompt is cut") {
  HostSettings settings;
  for (const char *isa : available_isas()) {
    for (const auto &[dtype, kv_dtype] : std::initializer_list<std::pair<pkv_dtype, pkv_dtype>>{
             {PKV_FLOAT32, PKV_FLOAT32}, {PKV_FLOAT32, PKV_FLOAT16}, {PKV_FLOAT32, PKV_FLOAT8_E5M2},
             {PKV_BFLOAT16, PKV_BFLOAT16}, {PKV_BFLOAT16, PKV_FLOAT8_E4M3}, {PKV_BFLOAT16, PKV_INT8}}) {
      INFO(isa << " " << dtype_name(dtype) << " over " << dtype_name(kv_dtype));
      set_host_isa(isa);
      CaseShape shape;
      shape.dtype = dtype;
      shape.kv_dtype = kv_dtype;
      shape.group = 3;
      shape.head_dim = shape.v_head_dim = 72;
      shape.seq_lens = {617, 41};
      shape.query_lens = {617, 5};
      shape.window = 300;
      Case step(shape, kSeed);
      std::vector<float> whole;
      set_host_num_threads(2);
      REQUIRE(step.run(&whole) == PKV_OK);

      // The same tokens of sequence 0 alone, in chunks of uneven length.
      set_host_num_threads(3);
      const int64_t row = step.num_heads * shape.v_head_dim;
      StepTables &tables = step.params.tables;
      tables.num_sequences = 1;
      const char *q = static_cast<const char *>(step.params.q);
      int32_t begin = 0;
      for (const int32_t end : {1, 2, 33, 34, 300, 617}) {
        const int32_t seq_len = end, cu_seqlens_q[2] = {0, end - begin};
        tables.seq_lens = &seq_len;
        tables.cu_seqlens_q = cu_seqlens_q;
        tables.num_tokens = end - begin;
        step.params.q = q + begin * step.params.q_token_stride * dtype_bytes(dtype);
        std::vector<float> chunk;
        REQUIRE(step.run(&chunk) == PKV_OK);
        CHECK(std::memcmp(chunk.data(), whole.data() + begin * row, static_cast<size_t>((end - begin) * row) * 4) == 0);
        begin = end;
      }
    }
  }
}

TEST_CASE("host attend: a random step equals its sequences one by one, on any number of threads") {
  HostSettings settings;
  for (uint64_t i = 0; i < 60; ++i) {
    std::mt19937_64 random(kSeed + 1000 + i);
    CaseShape shape = draw_shape(random);
    shape.num_kv_heads = pick(random, {1, 3, 8});  // tiles of one, of all, of some heads
    shape.has_lse = true;
    INFO("case " << i << ": " << describe(shape));
    Case step(shape, kSeed + i);
    const AttendParams whole_params = step.params;
    const char *q = static_cast<const char *>(step.params.q);
    const size_t out_row = static_cast<size_t>(step.num_heads * shape.v_head_dim);
    const size_t heads = static_cast<size_t>(step.num_heads), out_count = static_cast<size_t>(step.out_count());
    for (const char *isa : available_isas()) {
      INFO(isa);
      set_host_isa(isa);
      set_host_num_threads(1);
      step.params = whole_params;
      std::vector<float> whole, results;
      REQUIRE(step.run(&whole) == PKV_OK);
      for (const int32_t threads : {2, 5}) {
        set_host_num_threads(threads);
        REQUIRE(step.run(&results) == PKV_OK);
        CHECK(is_equal(results, whole));
      }
      int32_t first = 0;
      for (size_t sequence = 0; sequence < shape.seq_lens.size(); ++sequence) {
        const int32_t count = shape.query_lens[sequence], cu_seqlens_q[2] = {0, count};
        StepTables &tables = step.params.tables;
        tables.num_sequences = 1;
        tables.num_tokens = count;
        tables.seq_lens = whole_params.tables.seq_lens + sequence;
        tables.cu_seqlens_q = cu_seqlens_q;
        tables.block_table =
            whole_params.tables.block_table + static_cast<int64_t>(sequence) * whole_params.tables.table_stride;
        step.params.q = q + first * step.params.q_token_stride * dtype_bytes(shape.dtype);
        REQUIRE(step.run(&results) == PKV_OK);
        const size_t begin = static_cast<size_t>(first), rows = static_cast<size_t>(count);
        CHECK(std::equal(results.begin(), results.begin() + static_cast<int64_t>(rows * out_row),
                         whole.begin() + static_cast<int64_t>(begin * out_row)));
        CHECK(std::equal(results.begin() + static_cast<int64_t>(out_count),
                         results.begin() + static_cast<int64_t>(out_count + rows * heads),
                         whole.begin() + static_cast<int64_t>(out_count + begin * heads)));
        first += count;
      }
    }
  }
}

TEST_CASE("host attend: a NaN reaches the rows that see it and no others") {
  HostSettings settings;
  CaseShape shape;
  shape.seq_lens = {50};
  shape.query_lens = {50};
  shape.group = 2;
  shape.head_dim = shape.v_head_dim = 16;
  std::vector<const char *> isas = available_isas();
  isas.push_back("reference");
  for (const int kind : {0, 1, 2, 3}) {
    const bool is_in_k = kind % 2 == 0;
    shape.dtype = shape.kv_dtype = kind < 2 ? PKV_FLOAT32 : PKV_BFLOAT16;
    for (const char *isa : isas) {
      INFO(isa << " " << dtype_name(shape.dtype) << (is_in_k ? " K" : " V"));
      Case step(shape, kSeed);
      const PagedKv &kv = step.params.kv;
      const int64_t block = step.params.tables.block_table[1], position = 21;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      char *row = step.pool.data() + block * static_cast<int64_t>(kv.block_bytes) +
                  static_cast<int64_t>(is_in_k ? kv.k_offset : kv.v_offset) +
                  (position - 16) * 16 * dtype_bytes(shape.kv_dtype);
      encode_element(shape.kv_dtype, row, 3, nan);
      set_host_isa(isa);
      std::vector<float> results;
      REQUIRE(step.run(&results) == PKV_OK);
      for (int64_t token = 0; token < 50; ++token) {
        INFO("token " << token);
        for (int64_t i = 0; i < 32; ++i) {
          const bool is_nan = std::isnan(results[static_cast<size_t>(token * 32 + i)]);
          CHECK(is_nan == (token >= position && (is_in_k || i % 16 == 3)));
        }
      }
    }
  }
}

TEST_CASE("host attend: known results") {
  HostSettings settings;
  std::vector<const char *> isas = available_isas();
  isas.push_back("reference");
  const float infinity = std::numeric_limits<float>::infinity();
  for (const char *isa : isas) {
    INFO(isa);
    set_host_isa(isa);
    CaseShape shape;
    shape.seq_lens = {3};
    shape.query_lens = {1};
    shape.head_dim = shape.v_head_dim = 8;
    shape.block_size = 4;
    Case step(shape, kSeed);
    float *k = reinterpret_cast<float *>(
        step.pool.data() + step.params.tables.block_table[0] * step.params.kv.block_bytes + step.params.kv.k_offset);
    float *v = k + (step.params.kv.v_offset - step.params.kv.k_offset) / 4;
    float q[8] = {2, 0, 0, 0, 0, 0, 0, 0};
    for (int i = 0; i < 24; ++i) {
      k[i] = 0;
      v[i] = static_cast<float>(i / 8);
    }
    step.params.q = q;
    step.params.scale = 0.5f;
    std::vector<float> results;

    step.run(&results);  // equal scores: the mean
    CHECK(results[0] == doctest::Approx(1.0));
    CHECK(results[8] == doctest::Approx(std::log(3.0)));

    k[16] = 3;  // scores 0, 0, 3
    step.run(&results);
    const double e3 = std::exp(3.0);
    CHECK(results[0] == doctest::Approx((1 + 2 * e3) / (2 + e3)));
    CHECK(results[8] == doctest::Approx(std::log(2 + e3)));

    step.params.softcap = 2;  // 2 tanh(1.5)
    step.run(&results);
    CHECK(results[8] == doctest::Approx(std::log(2 + std::exp(2 * std::tanh(1.5)))));
    step.params.softcap = 0;

    float sink = 1;
    step.params.sinks = &sink;
    step.run(&results);
    CHECK(results[0] == doctest::Approx((1 + 2 * e3) / (2 + e3 + std::exp(1.0))));
    CHECK(results[8] == doctest::Approx(std::log(2 + e3 + std::exp(1.0))));
    sink = 200;  // far above
    step.run(&results);
    CHECK(results[0] == doctest::Approx(0.0));
    CHECK(results[8] == doctest::Approx(200.0));
    sink = -infinity;
    step.run(&results);
    CHECK(results[8] == doctest::Approx(std::log(2 + e3)));
    step.params.sinks = nullptr;

    float slope = 0.5f;  // scores 0 - 1, 0 - 0.5, 3
    step.params.alibi_slopes = &slope;
    step.run(&results);
    CHECK(results[8] == doctest::Approx(std::log(std::exp(-1.0) + std::exp(-0.5) + e3)));
    step.params.alibi_slopes = nullptr;

    step.params.window = 2;
    step.run(&results);
    CHECK(results[8] == doctest::Approx(std::log(1 + e3)));
    step.params.window = 0;

    const int32_t hole[2] = {-1, -1};  // nothing left to attend to
    step.params.tables.block_table = hole;
    step.params.sinks = &sink;
    sink = 1;
    step.run(&results);
    CHECK(results[0] == 0.0f);
    CHECK(results[8] == -infinity);
  }
}
