// Storing K and V: the reference by its definition, the fast kernels to the bit like the reference.
#include <doctest/doctest.h>

#include <limits>

#include "host_case.h"

using namespace pkv;

namespace {

constexpr uint64_t kSeed = 7;
constexpr pkv_dtype kKvDtypes[] = {PKV_FLOAT32,     PKV_FLOAT16,     PKV_BFLOAT16,
                                   PKV_FLOAT8_E4M3, PKV_FLOAT8_E5M2, PKV_INT8};

CaseShape make_shape(pkv_dtype kv_dtype, pkv_kv_scales scales, pkv_kv_order order) {
  CaseShape shape;
  shape.kv_dtype = kv_dtype;
  shape.kv_scales = scales;
  shape.order = order;
  shape.block_size = 5;
  shape.num_kv_heads = 3;
  shape.head_dim = 72;
  shape.v_head_dim = 40;
  shape.seq_lens = {23, 300};
  shape.query_lens = {0, 0};
  return shape;
}

}  // namespace

TEST_CASE("host write_kv: every instruction set stores the same bits") {
  HostSettings settings;
  const std::vector<const char *> isas = available_isas();
  std::mt19937_64 random(kSeed);
  for (const pkv_dtype kv_dtype : kKvDtypes) {
    for (const pkv_kv_scales scales : {PKV_SCALES_STATIC, PKV_SCALES_PER_TOKEN_HEAD}) {
      if (scales == PKV_SCALES_PER_TOKEN_HEAD && !is_quantised_dtype(kv_dtype)) continue;
      for (const pkv_kv_order order : {PKV_TOKEN_HEAD, PKV_HEAD_TOKEN}) {
        const CaseShape shape = make_shape(kv_dtype, scales, order);
        Case step(shape, kSeed);
        for (const pkv_dtype from : {PKV_FLOAT32, PKV_FLOAT16, PKV_BFLOAT16, kv_dtype}) {
          INFO(dtype_name(from) << " to " << describe(shape));
          // Rows of ordinary numbers, with infinities, NaN, subnormals and zero rows among them.
          WriteKvParams params = step.write_params;
          const size_t count = static_cast<size_t>(params.num_tokens) * 3 * 72;
          std::vector<char> k(count * 4), v(count * 4);
          for (std::vector<char> *rows : {&k, &v}) {
            for (size_t i = 0; i < count; ++i) {
              float value = std::normal_distribution<float>()(random) * 8;
              if (random() % 50 == 0) value *= 1e-7f;
              if (random() % 200 == 0) value = std::numeric_limits<float>::infinity();
              if (random() % 200 == 0) value = -std::numeric_limits<float>::quiet_NaN();
              if (random() % 100 == 0) value = 1e-42f;
              if (i / 72 % 7 == 0) value = i / 72 % 2 == 0 ? 0 : 1e-44f;
              encode_element(from, rows->data(), static_cast<int64_t>(i), value);
            }
          }
          params.k = k.data();
          params.v = v.data();
          params.dtype = from;
          params.v_token_stride = 3 * 72;  // rows apart
          params.v_head_stride = 72;
          set_host_isa("reference");
          std::fill(step.pool.begin(), step.pool.end(), static_cast<char>(0xff));
          REQUIRE(host_backend()->write_kv(params, nullptr) == PKV_OK);
          const std::vector<char> expected = step.pool;
          for (const char *isa : isas) {
            INFO(isa);
            set_host_isa(isa);
            std::fill(step.pool.begin(), step.pool.end(), static_cast<char>(0xff));
            REQUIRE(host_backend()->write_kv(params, nullptr) == PKV_OK);
            CHECK(std::memcmp(step.pool.data(), expected.data(), expected.size()) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("host write_kv: what is stored, times its scale, is the row") {
  HostSettings settings;
  for (const pkv_dtype kv_dtype : kKvDtypes) {
    for (const pkv_kv_scales scales : {PKV_SCALES_STATIC, PKV_SCALES_PER_TOKEN_HEAD}) {
      if (scales == PKV_SCALES_PER_TOKEN_HEAD && !is_quantised_dtype(kv_dtype)) continue;
      CaseShape shape = make_shape(kv_dtype, scales, PKV_HEAD_TOKEN);
      Case step(shape, kSeed);
      set_host_isa("reference");
      host_backend()->write_kv(step.write_params, nullptr);
      const PagedKv &kv = step.params.kv;
      const float *k = static_cast<const float *>(step.write_params.k);
      const float relative = kv_dtype == PKV_FLOAT32    ? 0.0f
                             : kv_dtype == PKV_FLOAT16  ? 0x1p-11f
                             : kv_dtype == PKV_BFLOAT16 ? 0x1p-8f
                             : kv_dtype == PKV_INT8     ? 0.0f
                             : kv_dtype == PKV_FLOAT8_E4M3 ? 0x1p-4f
                                                           : 0x1p-3f;
      for (int64_t token = 0; token + 1 < step.write_params.num_tokens; ++token) {
        const int64_t slot = step.write_params.slot_mapping[token];
        for (int64_t head = 0; head < 3; ++head) {
          const char *block = step.pool.data() + slot / 5 * static_cast<int64_t>(kv.block_bytes);
          const int64_t bytes = dtype_bytes(kv_dtype);
          const char *row = block + kv.k_offset + (slot % 5 * kv.k_token_stride + head * kv.k_head_stride) * bytes;
          float scale = 0, largest = 0;
          if (scales == PKV_SCALES_STATIC) {
            scale = kv.k_scale[head];
          } else {
            std::memcpy(&scale, block + kv.k_scale_offset + (slot % 5 + head * 5) * 4, 4);
          }
          const float *source = k + (token * 3 + head) * 72;
          for (int d = 0; d < 72; ++d) largest = std::max(largest, std::fabs(source[d]));
          if (scales == PKV_SCALES_PER_TOKEN_HEAD) CHECK(scale == largest / largest_quantised(kv_dtype));
          const float clip = is_quantised_dtype(kv_dtype) ? largest_quantised(kv_dtype) * scale : largest;
          const float absolute = kv_dtype == PKV_INT8 ? scale * 0.5001f : scale * 0x1p-10f;
          int bad = 0;
          for (int d = 0; d < 72; ++d) {
            const float wanted = std::max(-clip, std::min(clip, source[d]));
            const float stored = decode_element(kv_dtype, row, d) * scale;
            if (!(std::fabs(stored - wanted) <= relative * 1.001f * std::fabs(wanted) + absolute)) ++bad;
          }
          CHECK(bad == 0);
        }
      }
    }
  }
}

TEST_CASE("host write_kv: the number of threads changes nothing, and unwritten slots stay") {
  HostSettings settings;
  CaseShape shape = make_shape(PKV_FLOAT8_E4M3, PKV_SCALES_PER_TOKEN_HEAD, PKV_TOKEN_HEAD);
  shape.seq_lens = {3001};
  shape.query_lens = {0};
  Case step(shape, kSeed);
  const std::vector<char> before = step.pool;
  set_host_num_threads(5);
  std::fill(step.pool.begin(), step.pool.end(), static_cast<char>(0xff));
  REQUIRE(host_backend()->write_kv(step.write_params, nullptr) == PKV_OK);
  CHECK(step.pool == before);
}

TEST_CASE("host write_kv: every instruction set rotates to the same bits") {
  HostSettings settings;
  const std::vector<const char *> isas = available_isas();
  std::mt19937_64 random(kSeed);
  for (const pkv_dtype kv_dtype : kKvDtypes) {
    for (const pkv_kv_scales scales : {PKV_SCALES_STATIC, PKV_SCALES_PER_TOKEN_HEAD}) {
      if (scales == PKV_SCALES_PER_TOKEN_HEAD && !is_quantised_dtype(kv_dtype)) continue;
      const CaseShape shape = make_shape(kv_dtype, scales, PKV_TOKEN_HEAD);
      Case step(shape, kSeed);
      WriteKvParams params = step.write_params;
      std::vector<int64_t> positions(static_cast<size_t>(params.num_tokens));
      for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int64_t>(i * i * 7 % 100000);
      std::vector<float> table(100000 * 72);
      for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i % 1013) / 500 - 1;
      params.positions = positions.data();
      for (const pkv_dtype from : {PKV_FLOAT32, PKV_BFLOAT16}) {
        std::vector<char> rows(positions.size() * 3 * 72 * 4);
        for (int64_t i = 0; i < params.num_tokens * 3 * 72; ++i) {
          encode_element(from, rows.data(), i, std::normal_distribution<float>()(random));
        }
        params.k = params.v = rows.data();
        params.k_token_stride = params.v_token_stride = 3 * 72;
        params.k_head_stride = params.v_head_stride = 72;
        params.dtype = from;
        for (const int32_t rotary_dim : {72, 70, 2}) {
          for (const bool is_interleaved : {false, true}) {
            for (const float *cos_sin :
                 {static_cast<const float *>(nullptr), static_cast<const float *>(table.data())}) {
              params.rope = {rotary_dim, is_interleaved, 10000.0, cos_sin, 72};
              INFO(dtype_name(from) << " to " << describe(shape) << ", rotary_dim " << rotary_dim);
              set_host_isa("reference");
              std::fill(step.pool.begin(), step.pool.end(), static_cast<char>(0xff));
              REQUIRE(host_backend()->write_kv(params, nullptr) == PKV_OK);
              const std::vector<char> expected = step.pool;
              for (const char *isa : isas) {
                INFO(isa);
                set_host_isa(isa);
                std::fill(step.pool.begin(), step.pool.end(), static_cast<char>(0xff));
                REQUIRE(host_backend()->write_kv(params, nullptr) == PKV_OK);
                CHECK(std::memcmp(step.pool.data(), expected.data(), expected.size()) == 0);
              }
            }
          }
        }
      }
    }
  }
}
