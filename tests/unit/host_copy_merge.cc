// Block copies that behave as simultaneous, and merging of attention states.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "host_case.h"

using namespace pkv;

namespace {

constexpr uint64_t kSeed = 99;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Blocks {
  std::vector<char> bytes;
  uint64_t block_bytes;

  Blocks(int64_t count, uint64_t block_bytes_)
      : bytes(static_cast<size_t>(count) * block_bytes_), block_bytes(block_bytes_) {
    std::mt19937_64 random(kSeed);
    for (char &byte : bytes) byte = static_cast<char>(random());
  }

  // Copies, and compares with copies from an untouched picture.
  bool copy(const std::vector<int32_t> &sources, const std::vector<int32_t> &destinations) {
    const std::vector<char> before = bytes;
    std::vector<char> expected = bytes;
    for (size_t i = 0; i < sources.size(); ++i) {
      std::memcpy(expected.data() + static_cast<uint64_t>(destinations[i]) * block_bytes,
                  before.data() + static_cast<uint64_t>(sources[i]) * block_bytes, block_bytes);
    }
    CopyBlocksParams params = {};
    params.base = bytes.data();
    params.block_bytes = block_bytes;
    params.sources = sources.data();
    params.destinations = destinations.data();
    params.count = static_cast<int64_t>(sources.size());
    return host_backend()->copy_blocks(params, nullptr) == PKV_OK && bytes == expected;
  }
};

}  // namespace

TEST_CASE("host copy_blocks: chains, cycles, and blocks that go to several places") {
  for (const uint64_t block_bytes : {uint64_t{256}, uint64_t{700 * 1024}}) {
    Blocks blocks(8, block_bytes);
    CHECK(blocks.copy({}, {}));
    CHECK(blocks.copy({3}, {3}));
    CHECK(blocks.copy({0}, {1}));
    CHECK(blocks.copy({0, 0, 0}, {1, 2, 3}));
    CHECK(blocks.copy({0, 1, 2, 3}, {1, 2, 3, 4}));
    CHECK(blocks.copy({3, 2, 1, 0}, {4, 3, 2, 1}));
    CHECK(blocks.copy({0, 1}, {1, 0}));
    CHECK(blocks.copy({0, 1, 2, 2, 1}, {1, 2, 0, 5, 6}));
    CHECK(blocks.copy({0, 1, 2, 3, 4, 4}, {1, 0, 3, 4, 2, 4}));
  }
}

TEST_CASE("host copy_blocks: any mapping") {
  std::mt19937_64 random(kSeed);
  MESSAGE("seed " << kSeed);
  Blocks blocks(40, 512);
  for (int round = 0; round < 500; ++round) {
    std::vector<int32_t> destinations(40), sources;
    for (int32_t i = 0; i < 40; ++i) destinations[static_cast<size_t>(i)] = i;
    std::shuffle(destinations.begin(), destinations.end(), random);
    destinations.resize(random() % 41);
    const bool is_permutation = round % 3 == 0;
    if (is_permutation) {
      sources = destinations;
      std::shuffle(sources.begin(), sources.end(), random);
    } else {
      for (size_t i = 0; i < destinations.size(); ++i) sources.push_back(static_cast<int32_t>(random() % 40));
    }
    REQUIRE(blocks.copy(sources, destinations));
  }
}

namespace {

struct Merge {
  int64_t tokens = 5, heads = 3, dim = 24;
  pkv_dtype dtype = PKV_FLOAT32;
  std::vector<char> a, b, out;
  std::vector<float> lse_a, lse_b, lse;

  explicit Merge(pkv_dtype dtype_) : dtype(dtype_) {
    std::mt19937_64 random(kSeed);
    const size_t bytes = static_cast<size_t>(tokens * heads * dim * dtype_bytes(dtype));
    a.resize(bytes);
    b.resize(bytes);
    out.resize(bytes);
    for (int64_t i = 0; i < tokens * heads * dim; ++i) {
      encode_element(dtype, a.data(), i, std::normal_distribution<float>()(random));
      encode_element(dtype, b.data(), i, std::normal_distribution<float>()(random));
    }
    for (int64_t i = 0; i < tokens * heads; ++i) {
      lse_a.push_back(std::normal_distribution<float>()(random) * 3);
      lse_b.push_back(std::normal_distribution<float>()(random) * 3);
    }
    lse.resize(lse_a.size());
  }

  MergeStatesParams params() {
    MergeStatesParams p = {};
    p.num_tokens = tokens;
    p.num_heads = static_cast<int32_t>(heads);
    p.head_dim = static_cast<int32_t>(dim);
    p.dtype = dtype;
    p.out_a = a.data();
    p.out_b = b.data();
    p.out = out.data();
    p.lse_a = lse_a.data();
    p.lse_b = lse_b.data();
    p.lse = lse.data();
    for (int64_t *strides : {p.out_a_strides, p.out_b_strides, p.out_strides}) {
      strides[0] = heads * dim;
      strides[1] = dim;
    }
    for (int64_t *strides : {p.lse_a_strides, p.lse_b_strides, p.lse_strides}) {
      strides[0] = heads;
      strides[1] = 1;
    }
    return p;
  }
};

std::vector<const char *> all_isas() {
  std::vector<const char *> isas = available_isas();
  isas.push_back("reference");
  return isas;
}

}  // namespace

TEST_CASE("host merge_states: weighted by the exponentials, in every dtype") {
  HostSettings settings;
  for (const char *isa : all_isas()) {
    for (const pkv_dtype dtype : {PKV_FLOAT32, PKV_FLOAT16, PKV_BFLOAT16}) {
      INFO(isa << " " << dtype_name(dtype));
      set_host_isa(isa);
      Merge merge(dtype);
      REQUIRE(host_backend()->merge_states(merge.params(), nullptr) == PKV_OK);
      const double tolerance = dtype == PKV_FLOAT32 ? 1e-6 : dtype == PKV_FLOAT16 ? 1e-3 : 8e-3;
      for (int64_t row = 0; row < merge.tokens * merge.heads; ++row) {
        const size_t i = static_cast<size_t>(row);
        const double sum = std::exp(double{merge.lse_a[i]}) + std::exp(double{merge.lse_b[i]});
        CHECK(merge.lse[i] == doctest::Approx(std::log(sum)).epsilon(1e-6));
        for (int64_t d = row * merge.dim; d < (row + 1) * merge.dim; ++d) {
          const double wanted = (std::exp(double{merge.lse_a[i]}) * decode_element(dtype, merge.a.data(), d) +
                                 std::exp(double{merge.lse_b[i]}) * decode_element(dtype, merge.b.data(), d)) / sum;
          CHECK(std::fabs(decode_element(dtype, merge.out.data(), d) - wanted) <= tolerance * (1 + std::fabs(wanted)));
        }
      }
    }
  }
}

TEST_CASE("host merge_states: an empty side changes nothing, whatever its row holds") {
  HostSettings settings;
  for (const char *isa : all_isas()) {
    INFO(isa);
    set_host_isa(isa);
    Merge merge(PKV_FLOAT32);
    std::fill(merge.b.begin(), merge.b.end(), static_cast<char>(0xff));
    std::fill(merge.lse_b.begin(), merge.lse_b.end(), -kInfinity);
    REQUIRE(host_backend()->merge_states(merge.params(), nullptr) == PKV_OK);
    CHECK(merge.out == merge.a);
    CHECK(merge.lse == merge.lse_a);

    MergeStatesParams swapped = merge.params();
    std::swap(swapped.out_a, swapped.out_b);
    std::swap(swapped.lse_a, swapped.lse_b);
    std::fill(merge.out.begin(), merge.out.end(), char{1});
    swapped.lse = nullptr;
    REQUIRE(host_backend()->merge_states(swapped, nullptr) == PKV_OK);
    CHECK(merge.out == merge.a);

    std::fill(merge.a.begin(), merge.a.end(), static_cast<char>(0xff));
    std::fill(merge.lse_a.begin(), merge.lse_a.end(), -kInfinity);
    REQUIRE(host_backend()->merge_states(merge.params(), nullptr) == PKV_OK);
    CHECK(std::all_of(merge.out.begin(), merge.out.end(), [](char byte) { return byte == 0; }));
    CHECK(std::all_of(merge.lse.begin(), merge.lse.end(), [](float value) { return value == -kInfinity; }));
  }
}

TEST_CASE("host merge_states: in place of either input") {
  HostSettings settings;
  for (const char *isa : all_isas()) {
    INFO(isa);
    set_host_isa(isa);
    for (const bool is_first : {true, false}) {
      Merge apart(PKV_BFLOAT16), in_place(PKV_BFLOAT16);
      REQUIRE(host_backend()->merge_states(apart.params(), nullptr) == PKV_OK);
      MergeStatesParams params = in_place.params();
      params.out = is_first ? in_place.a.data() : in_place.b.data();
      params.lse = is_first ? in_place.lse_a.data() : in_place.lse_b.data();
      REQUIRE(host_backend()->merge_states(params, nullptr) == PKV_OK);
      CHECK((is_first ? in_place.a : in_place.b) == apart.out);
      CHECK((is_first ? in_place.lse_a : in_place.lse_b) == apart.lse);
    }
  }
}

TEST_CASE("host merge_states: two halves of a sequence make the whole") {
  HostSettings settings;
  for (const char *isa : all_isas()) {
    INFO(isa);
    set_host_isa(isa);
    CaseShape shape;
    shape.seq_lens = {160};
    shape.query_lens = {3};
    shape.group = 2;
    shape.head_dim = shape.v_head_dim = 32;
    shape.is_causal = false;
    Case step(shape, kSeed);
    std::vector<float> whole, first, second;
    REQUIRE(step.run(&whole) == PKV_OK);
    // The second half is the same block table from its middle on.
    const int32_t half = 80;
    step.params.tables.seq_lens = &half;
    REQUIRE(step.run(&first) == PKV_OK);
    step.params.tables.block_table += half / shape.block_size;
    REQUIRE(step.run(&second) == PKV_OK);
    const int64_t num_out = step.out_count();
    Merge merge(PKV_FLOAT32);
    merge.tokens = 3;
    merge.heads = 2;
    merge.dim = 32;
    merge.lse.resize(6);
    merge.out.resize(static_cast<size_t>(num_out) * 4);
    MergeStatesParams params = merge.params();
    params.out_a = first.data();
    params.out_b = second.data();
    params.lse_a = first.data() + num_out;
    params.lse_b = second.data() + num_out;
    REQUIRE(host_backend()->merge_states(params, nullptr) == PKV_OK);
    for (int64_t i = 0; i < num_out; ++i) {
      CHECK(decode_element(PKV_FLOAT32, merge.out.data(), i) ==
            doctest::Approx(whole[static_cast<size_t>(i)]).epsilon(1e-4).scale(1));
    }
    for (size_t i = 0; i < 6; ++i)
      CHECK(merge.lse[i] == doctest::Approx(whole[static_cast<size_t>(num_out) + i]).epsilon(1e-5));
  }
}
