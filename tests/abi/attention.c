/* write_kv, attend and merge_states on small cases, against a direct computation. */
#include <math.h>

#include "fixture.h"

enum { NUM_HEADS = 4, V_HEAD_DIM = 16, MOST_TOKENS = 24 };

/* Any numbers, the same in every run. */
static float next_number(void) {
  static uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / (float)(1 << 24) * 2 - 1;
}

static pkv_tensor make_tensor(float *data, int32_t ndim, int64_t first, int64_t second, int64_t third) {
  pkv_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = ndim;
  tensor.shape[0] = first;
  tensor.shape[1] = second;
  tensor.shape[2] = third;
  return tensor;
}

/* All K and V of one sequence, in the order of its tokens. */
typedef struct {
  float k[MOST_TOKENS][NUM_KV_HEADS][HEAD_DIM];
  float v[MOST_TOKENS][NUM_KV_HEADS][V_HEAD_DIM];
} history;

static int is_near(double actual, double expected) { return fabs(actual - expected) <= 1e-5 + 1e-5 * fabs(expected); }

/* One query over tokens first to last - 1. Returns the log-sum-exp; out: [V_HEAD_DIM]. */
static double attend_directly(const history *past, int64_t first, int64_t last, const float *query, int head,
                              double scale, double *out) {
  const int kv_head = head / (NUM_HEADS / NUM_KV_HEADS);
  double sum = 0, largest = -INFINITY, scores[MOST_TOKENS];
  for (int i = 0; i < V_HEAD_DIM; ++i) out[i] = 0;
  for (int64_t t = first; t < last; ++t) {
    scores[t] = 0;
    for (int i = 0; i < HEAD_DIM; ++i) scores[t] += (double)query[i] * past->k[t][kv_head][i];
    scores[t] *= scale;
    if (scores[t] > largest) largest = scores[t];
  }
  for (int64_t t = first; t < last; ++t) {
    const double weight = exp(scores[t] - largest);
    sum += weight;
    for (int i = 0; i < V_HEAD_DIM; ++i) out[i] += weight * past->v[t][kv_head][i];
  }
  for (int i = 0; i < V_HEAD_DIM && last > first; ++i) out[i] /= sum;
  return last > first ? largest + log(sum) : -INFINITY;
}

static pkv_cache *make_cache_in_order(pkv_kv_order order) {
  pkv_layer_group group = make_group();
  group.v_head_dim = V_HEAD_DIM;
  group.order = order;
  const pkv_layout layout = make_layout(&group);
  const pkv_cache_options options = make_cache_options(&layout, 12);
  pkv_cache *cache = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  /* Slots that are not written never reach a result. */
  const pkv_cache_stats stats = get_cache_stats(cache);
  memset(stats.base, 0xff, (size_t)(stats.block_bytes * (uint64_t)stats.num_blocks));
  return cache;
}

/* Steps of two sequences, a prefill and decodes in one batch, in both layers. */
static void test_steps(pkv_kv_order order) {
  pkv_cache *cache = make_cache_in_order(order);
  pkv_batch *batch = make_batch(cache, 0);
  const pkv_sequence sequences[] = {open_sequence(cache, NULL, 0), open_sequence(cache, NULL, 0)};
  static history past[NUM_LAYERS][2];
  static float k[MOST_TOKENS * NUM_KV_HEADS * HEAD_DIM], v[MOST_TOKENS * NUM_KV_HEADS * V_HEAD_DIM];
  static float q[MOST_TOKENS * NUM_HEADS * HEAD_DIM], out[MOST_TOKENS * NUM_HEADS * V_HEAD_DIM];
  static float lse[MOST_TOKENS * NUM_HEADS];
  int64_t lengths[2] = {0, 0};
  const int64_t steps[][2] = {{5, 0}, {1, 9}, {1, 1}, {0, 2}, {6, 1}};
  for (int64_t step = 0; step < COUNT(steps); ++step) {
    const int64_t num_tokens = steps[step][0] + steps[step][1], window = step == 2 ? 4 : 0;
    pkv_prepare_options options = make_prepare_options();
    options.pad_tokens = num_tokens + 1;
    options.pad_sequences = 3;
    REQUIRE_OK(pkv_batch_prepare(batch, sequences, steps[step], 2, NULL, 0, &options));
    for (int32_t layer = 0; layer < NUM_LAYERS; ++layer) {
      for (int64_t i = 0; i < COUNT(k); ++i) k[i] = next_number();
      for (int64_t i = 0; i < COUNT(v); ++i) v[i] = next_number();
      for (int64_t i = 0; i < COUNT(q); ++i) q[i] = 3 * next_number();
      for (int64_t i = 0; i < COUNT(out); ++i) out[i] = NAN;
      int64_t row = 0;
      for (int s = 0; s < 2; ++s) {
        for (int64_t t = lengths[s]; t < lengths[s] + steps[step][s]; ++t, ++row) {
          memcpy(past[layer][s].k[t], k + row * NUM_KV_HEADS * HEAD_DIM, sizeof past[layer][s].k[t]);
          memcpy(past[layer][s].v[t], v + row * NUM_KV_HEADS * V_HEAD_DIM, sizeof past[layer][s].v[t]);
        }
      }
      const pkv_tensor k_rows = make_tensor(k, 3, num_tokens + 1, NUM_KV_HEADS, HEAD_DIM);
      const pkv_tensor v_rows = make_tensor(v, 3, num_tokens + 1, NUM_KV_HEADS, V_HEAD_DIM);
      const pkv_tensor q_rows = make_tensor(q, 3, num_tokens + 1, NUM_HEADS, HEAD_DIM);
      const pkv_tensor out_rows = make_tensor(out, 3, num_tokens + 1, NUM_HEADS, V_HEAD_DIM);
      const pkv_tensor logs = make_tensor(lse, 2, num_tokens + 1, NUM_HEADS, 0);
      pkv_attend_options attend_options;
      memset(&attend_options, 0, sizeof attend_options);
      attend_options.struct_size = sizeof attend_options;
      attend_options.scale = step == 1 ? 0.25f : 0.0f;
      attend_options.window = window;
      attend_options.lse = &logs;
      REQUIRE_OK(pkv_write_kv(cache, layer, batch, &k_rows, &v_rows, NULL));
      REQUIRE_OK(pkv_attend(cache, layer, batch, &q_rows, &out_rows, &attend_options));
      const double scale = step == 1 ? 0.25 : 1 / sqrt(HEAD_DIM);
      row = 0;
      for (int s = 0; s < 2; ++s) {
        for (int64_t t = lengths[s]; t < lengths[s] + steps[step][s]; ++t, ++row) {
          for (int head = 0; head < NUM_HEADS; ++head) {
            double expected[V_HEAD_DIM];
            const int64_t first = window > 0 && t + 1 > window ? t + 1 - window : 0;
            const float *query = q + (row * NUM_HEADS + head) * HEAD_DIM;
            const double log_sum = attend_directly(&past[layer][s], first, t + 1, query, head, scale, expected);
            CHECK(is_near(lse[row * NUM_HEADS + head], log_sum));
            for (int i = 0; i < V_HEAD_DIM; ++i) {
              CHECK(is_near(out[(row * NUM_HEADS + head) * V_HEAD_DIM + i], expected[i]));
            }
          }
        }
      }
      /* The padding token attends to nothing. */
      for (int i = 0; i < NUM_HEADS * V_HEAD_DIM; ++i) CHECK(out[row * NUM_HEADS * V_HEAD_DIM + i] == 0);
      CHECK(isinf(lse[row * NUM_HEADS]) && lse[row * NUM_HEADS] < 0);
    }
    for (int s = 0; s < 2; ++s) lengths[s] += steps[step][s];
  }

  /* The layout says where a row stands. */
  pkv_layer_group group = make_group();
  group.v_head_dim = V_HEAD_DIM;
  group.order = order;
  const pkv_layout layout = make_layout(&group);
  pkv_layer_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK_OK(pkv_layout_layer(&layout, 1, &info));
  pkv_array blocks;
  CHECK_OK(pkv_sequence_blocks(cache, sequences[1], &blocks));
  for (int64_t t = 0; t < lengths[1]; ++t) {
    void *block = NULL;
    CHECK_OK(pkv_cache_block_ptr(cache, ((const int32_t *)blocks.data)[t / BLOCK_SIZE], &block));
    for (int head = 0; head < NUM_KV_HEADS; ++head) {
      const int64_t k_offset = t % BLOCK_SIZE * info.k_token_stride + head * info.k_head_stride;
      const int64_t v_offset = t % BLOCK_SIZE * info.v_token_stride + head * info.v_head_stride;
      CHECK(memcmp((float *)((char *)block + info.k_offset) + k_offset, past[1][1].k[t][head], HEAD_DIM * 4) == 0);
      CHECK(memcmp((float *)((char *)block + info.v_offset) + v_offset, past[1][1].v[t][head], V_HEAD_DIM * 4) == 0);
    }
  }
  pkv_array_release(&blocks);
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

/* Attention over a whole sequence is that over its two halves, merged; strides and aliasing included. */
static void test_merge_states(void) {
  static history past;
  float q[NUM_HEADS][HEAD_DIM];
  /* [head][token][dim]: strided tensors of one token, and a second one that attends to nothing on one side. */
  float out_a[NUM_HEADS][2][V_HEAD_DIM], out_b[2][NUM_HEADS][V_HEAD_DIM], lse_a[2][NUM_HEADS], lse_b[2][NUM_HEADS];
  double whole[2][NUM_HEADS][V_HEAD_DIM], log_sums[2][NUM_HEADS], part[V_HEAD_DIM];
  for (int t = 0; t < MOST_TOKENS; ++t) {
    for (int h = 0; h < NUM_KV_HEADS; ++h) {
      for (int i = 0; i < HEAD_DIM; ++i) past.k[t][h][i] = 4 * next_number();
      for (int i = 0; i < V_HEAD_DIM; ++i) past.v[t][h][i] = next_number();
    }
  }
  for (int head = 0; head < NUM_HEADS; ++head) {
    for (int i = 0; i < HEAD_DIM; ++i) q[head][i] = 4 * next_number();
    for (int token = 0; token < 2; ++token) {
      const int64_t middle = token == 0 ? 15 : 0;
      lse_a[token][head] = (float)attend_directly(&past, 0, middle, q[head], head, 1, part);
      for (int i = 0; i < V_HEAD_DIM; ++i) out_a[head][token][i] = (float)part[i];
      lse_b[token][head] = (float)attend_directly(&past, middle, MOST_TOKENS, q[head], head, 1, part);
      for (int i = 0; i < V_HEAD_DIM; ++i) out_b[token][head][i] = (float)part[i];
      log_sums[token][head] = attend_directly(&past, 0, MOST_TOKENS, q[head], head, 1, whole[token][head]);
    }
  }
  pkv_tensor a = make_tensor(out_a[0][0], 3, 2, NUM_HEADS, V_HEAD_DIM);
  a.strides[0] = V_HEAD_DIM;
  a.strides[1] = 2 * V_HEAD_DIM;
  a.strides[2] = 1;
  const pkv_tensor b = make_tensor(out_b[0][0], 3, 2, NUM_HEADS, V_HEAD_DIM);
  const pkv_tensor a_logs = make_tensor(lse_a[0], 2, 2, NUM_HEADS, 0);
  const pkv_tensor b_logs = make_tensor(lse_b[0], 2, 2, NUM_HEADS, 0);
  float separate[2][NUM_HEADS][V_HEAD_DIM];
  const pkv_tensor out = make_tensor(separate[0][0], 3, 2, NUM_HEADS, V_HEAD_DIM);
  CHECK_OK(pkv_merge_states("host", &a, &a_logs, &b, &b_logs, &out, NULL, NULL));
  CHECK_OK(pkv_merge_states("host", &a, &a_logs, &b, &b_logs, &b, &b_logs, NULL));  /* in place */
  for (int token = 0; token < 2; ++token) {
    for (int head = 0; head < NUM_HEADS; ++head) {
      CHECK(is_near(lse_b[token][head], log_sums[token][head]));
      for (int i = 0; i < V_HEAD_DIM; ++i) {
        CHECK(is_near(separate[token][head][i], whole[token][head][i]));
        CHECK(separate[token][head][i] == out_b[token][head][i]);
      }
    }
  }
  /* Nothing and nothing is nothing. */
  for (int i = 0; i < NUM_HEADS; ++i) lse_a[0][i] = lse_a[1][i] = lse_b[0][i] = lse_b[1][i] = -INFINITY;
  CHECK_OK(pkv_merge_states("host", &a, &a_logs, &b, &b_logs, &out, &b_logs, NULL));
  CHECK(separate[1][2][3] == 0 && isinf(lse_b[1][2]) && lse_b[1][2] < 0);
  /* No tokens: nothing is touched, and there need be no data. */
  const pkv_tensor none = make_tensor(NULL, 3, 0, NUM_HEADS, V_HEAD_DIM);
  const pkv_tensor no_logs = make_tensor(NULL, 2, 0, NUM_HEADS, 0);
  CHECK_OK(pkv_merge_states("host", &none, &no_logs, &none, &no_logs, &none, &no_logs, NULL));
}

int main(void) {
  test_steps(PKV_TOKEN_HEAD);
  test_steps(PKV_HEAD_TOKEN);
  test_merge_states();
  return finish_checks();
}
