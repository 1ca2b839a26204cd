// pagedkv.h stands alone as C++17 without extensions and without a warning.
#include "pagedkv/pagedkv.h"

#include <cstring>
#include <type_traits>

// C linkage and plain structs: what a C++ client relies on.
static_assert(std::is_standard_layout<pkv_tensor>::value && std::is_trivially_copyable<pkv_tensor>::value, "");
static_assert(std::is_same<decltype(&pkv_pool_destroy), void (*)(pkv_pool *)>::value, "");

int main() {
  pkv_cache_options options = {};
  options.struct_size = sizeof options;
  return options.num_blocks == 0 && options.eviction == PKV_EVICTION_LRU ? 0 : 1;
}
