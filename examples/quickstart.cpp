// Two answers to one prompt, in C++: a fork shares the prompt's blocks, and only what is written into is copied.
//
//   c++ -std=c++17 quickstart.cpp $(pkg-config --cflags --libs pagedkv) -o quickstart && ./quickstart
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include <pagedkv/pagedkv.hpp>

namespace {

constexpr int kNumLayers = 2, kNumHeads = 8, kNumKvHeads = 2, kHeadDim = 64, kBlockSize = 16;

// Stands for a model: some value for each token, head and element.
std::vector<float> make_rows(const std::vector<int64_t> &tokens, int num_heads) {
  std::vector<float> rows;
  for (int64_t token : tokens) {
    for (int i = 0; i < num_heads * kHeadDim; ++i) rows.push_back(std::sin(static_cast<float>(token * 31 + i)));
  }
  return rows;
}

// One step through all layers: K and V of the new tokens are stored, and the tokens attend to all before them.
// Returns the outputs, [num_tokens, kNumHeads, kHeadDim].
std::vector<float> run_layers(pagedkv::Cache &cache, const pagedkv::Batch &batch, const std::vector<int64_t> &tokens) {
  const int64_t num_tokens = static_cast<int64_t>(tokens.size());
  std::vector<float> kv = make_rows(tokens, kNumKvHeads), q = make_rows(tokens, kNumHeads), out(q.size());
  const pkv_tensor kv_rows = pagedkv::make_tensor(kv.data(), {num_tokens, kNumKvHeads, kHeadDim});
  const pkv_tensor q_rows = pagedkv::make_tensor(q.data(), {num_tokens, kNumHeads, kHeadDim});
  const pkv_tensor out_rows = pagedkv::make_tensor(out.data(), {num_tokens, kNumHeads, kHeadDim});
  for (int layer = 0; layer < kNumLayers; ++layer) {
    cache.write_kv(layer, batch, kv_rows, kv_rows);
    cache.attend(layer, batch, q_rows, out_rows);
  }
  return out;
}

void run() {
  const pagedkv::Layout layout(kNumLayers, kNumKvHeads, kHeadDim, PKV_FLOAT32, kBlockSize);
  pagedkv::Cache cache(layout, 64, "host");
  pagedkv::Batch batch(cache, 8, 256);
  std::printf("a block of %d tokens takes %d bytes\n", kBlockSize, static_cast<int>(layout.block_bytes()));

  std::vector<int64_t> prompt(100);
  std::iota(prompt.begin(), prompt.end(), 1000);
  pagedkv::Sequence first = cache.open(prompt);
  batch.prepare({first}, {100}, prompt);
  run_layers(cache, batch, prompt);

  // Both go on with a token of their own, in one step.
  pagedkv::Sequence second = first.fork();
  const std::vector<int64_t> answers = {7, 8};
  batch.prepare({first, second}, {1, 1}, answers);
  const std::vector<float> out = run_layers(cache, batch, answers);
  std::printf("outputs: %.4f and %.4f\n", out[0], out[kNumHeads * kHeadDim]);

  const pkv_cache_stats stats = cache.stats();
  std::printf("%d and %d tokens in %d blocks, %d of them copied\n", static_cast<int>(first.length()),
              static_cast<int>(second.length()), static_cast<int>(stats.held_blocks), static_cast<int>(stats.copies));

  // A failure says what was wrong, and changes nothing.
  try {
    batch.prepare({first, second}, {1, 1000});
  } catch (const pagedkv::Error &error) {
    std::printf("refused: %s\n", error.what());
  }
}

}  // namespace

int main() {
  try {
    run();
  } catch (const pagedkv::Error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
