#include "cache/shard.h"

#include <cstring>

#include "base/dtype.h"

namespace pkv {

Status plan_shards(const Layout &whole, pkv_shard kind, int32_t num_devices, std::vector<ShardPlan> *out) {
  const int32_t num_layers = whole.num_layers(), num_kv_heads = whole.num_kv_heads();
  out->clear();
  out->resize(static_cast<size_t>(num_devices));
  if (kind == PKV_SHARD_SEQUENCES) {
    for (ShardPlan &plan : *out) plan.layout = whole;
    return PKV_OK;
  }
  if (kind == PKV_SHARD_NONE) {
    if (num_devices > 1) {
      return fail(PKV_INVALID_ARGUMENT, "num_devices is %d, but shard does not say what each of them holds", num_devices);
    }
    (*out)[0].layout = whole;
    return PKV_OK;
  }
  if (kind == PKV_SHARD_HEADS && num_kv_heads % num_devices != 0) {
    return fail(PKV_INVALID_ARGUMENT, "num_kv_heads is %d, which %d devices cannot share equally", num_kv_heads,
                num_devices);
  }
  if (kind == PKV_SHARD_LAYERS && num_layers < num_devices) {
    return fail(PKV_INVALID_ARGUMENT, "num_layers is %d, fewer than the %d devices", num_layers, num_devices);
  }
  int32_t next_layer = 0;
  for (int32_t i = 0; i < num_devices; ++i) {
    ShardPlan &plan = (*out)[static_cast<size_t>(i)];
    if (kind == PKV_SHARD_HEADS) {
      plan.first_kv_head = i * (num_kv_heads / num_devices);
      PKV_TRY(whole.cut(num_layers, num_kv_heads / num_devices, &plan.layout));
    } else {
      plan.first_layer = next_layer;
      const int32_t count = num_layers / num_devices + (i < num_layers % num_devices);
      PKV_TRY(whole.cut(count, num_kv_heads, &plan.layout));
      next_layer += count;
    }
  }
  return PKV_OK;
}

Status Shard::create(Backend *backend, const ShardPlan &plan, const PoolOptions &pool, std::unique_ptr<Shard> *out) {
  auto shard = std::make_unique<Shard>();
  shard->backend = backend;
  shard->plan = plan;
  PoolOptions options = pool;
  options.block_bytes = plan.layout.block_bytes();
  PKV_TRY(Pool::create(backend, options, &shard->pool));
  const std::vector<float> ones(
      2 * static_cast<size_t>(plan.layout.num_layers()) * static_cast<size_t>(plan.layout.num_kv_heads()), 1.0f);
  PKV_TRY(shard->scales.allocate(backend, ones.size() * sizeof(float)));
  PKV_TRY(backend->upload(shard->scales.as<float>(), ones.data(), ones.size() * sizeof(float)));
  *out = std::move(shard);
  return PKV_OK;
}

PagedKv Shard::describe_kv(int32_t layer, int64_t num_blocks) const {
  PagedKv kv = plan.layout.describe_kv(layer - plan.first_layer);
  kv.base = pool->base();
  kv.num_blocks = num_blocks;
  kv.k_scale = scales.as<float>() + static_cast<int64_t>(layer - plan.first_layer) * 2 * kv.num_kv_heads;
  kv.v_scale = kv.k_scale + kv.num_kv_heads;
  return kv;
}

namespace {

// A plane of a block: where the row of (token, head) starts, in bytes.
struct PlaneView {
  uint64_t offset, token_stride, head_stride;
};

// Calls copy(offset in the whole block, offset in the part, bytes) for the rows of (token, head) of the part, for runs of
// them where they lie side by side on both sides.
template <class Copy>
void visit_rows(const Layout &whole, const ShardPlan &plan, Copy copy) {
  const uint64_t num_heads = static_cast<uint64_t>(plan.layout.num_kv_heads());
  const uint64_t block_size = static_cast<uint64_t>(plan.layout.block_size());
  const auto visit_plane = [&](const PlaneView &from, const PlaneView &to, uint64_t bytes) {
    // The inner of the two loops is the one whose rows are next to each other.
    const bool has_inner_heads = from.token_stride >= from.head_stride;
    const uint64_t inner_count = has_inner_heads ? num_heads : block_size;
    const uint64_t outer_count = has_inner_heads ? block_size : num_heads;
    const auto inner = [&](const PlaneView &view) { return has_inner_heads ? view.head_stride : view.token_stride; };
    const auto outer = [&](const PlaneView &view) { return has_inner_heads ? view.token_stride : view.head_stride; };
    const uint64_t first = from.offset + static_cast<uint64_t>(plan.first_kv_head) * from.head_stride;
    const bool is_run = inner(from) == bytes && inner(to) == bytes;
    const uint64_t run = is_run ? inner_count * bytes : bytes;
    if (is_run && outer(from) == run && outer(to) == run) return copy(first, to.offset, outer_count * run);
    for (uint64_t i = 0; i < outer_count; ++i) {
      for (uint64_t j = 0; j < (is_run ? 1 : inner_count); ++j) {
        copy(first + i * outer(from) + j * inner(from), to.offset + i * outer(to) + j * inner(to), run);
      }
    }
  };
  for (int32_t layer = 0; layer < plan.layout.num_layers(); ++layer) {
    const PagedKv from = whole.describe_kv(plan.first_layer + layer), to = plan.layout.describe_kv(layer);
    const uint64_t item = static_cast<uint64_t>(dtype_bytes(to.dtype));
    const auto view = [](uint64_t offset, int64_t token_stride, int64_t head_stride, uint64_t bytes) {
      return PlaneView{offset, static_cast<uint64_t>(token_stride) * bytes, static_cast<uint64_t>(head_stride) * bytes};
    };
    visit_plane(view(from.k_offset, from.k_token_stride, from.k_head_stride, item),
                view(to.k_offset, to.k_token_stride, to.k_head_stride, item),
                static_cast<uint64_t>(to.head_dim) * item);
    visit_plane(view(from.v_offset, from.v_token_stride, from.v_head_stride, item),
                view(to.v_offset, to.v_token_stride, to.v_head_stride, item),
                static_cast<uint64_t>(to.v_head_dim) * item);
    if (to.kv_scales != PKV_SCALES_PER_TOKEN_HEAD) continue;
    const uint64_t from_offsets[] = {from.k_scale_offset, from.v_scale_offset};
    const uint64_t to_offsets[] = {to.k_scale_offset, to.v_scale_offset};
    for (int i = 0; i < 2; ++i) {
      visit_plane(view(from_offsets[i], from.scale_token_stride, from.scale_head_stride, sizeof(float)),
                  view(to_offsets[i], to.scale_token_stride, to.scale_head_stride, sizeof(float)), sizeof(float));
    }
  }
}

}  // namespace

void cut_block(const Layout &whole, const ShardPlan &plan, const char *block, char *part) {
  visit_rows(whole, plan, [&](uint64_t from, uint64_t to, uint64_t bytes) { std::memcpy(part + to, block + from, bytes); });
}

void join_block(const Layout &whole, const ShardPlan &plan, const char *part, char *block) {
  visit_rows(whole, plan, [&](uint64_t from, uint64_t to, uint64_t bytes) { std::memcpy(block + from, part + to, bytes); });
}

}  // namespace pkv
