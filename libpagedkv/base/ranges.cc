#include "base/ranges.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <forward_list>
#include <mutex>

namespace pkv {
namespace internal {

std::atomic<const RangeCallbacks *> range_callbacks{nullptr};

}  // namespace internal
namespace {

std::mutex mutex;

// Every pair that was ever set, each once: open ranges refer to them. Never destroyed.
std::forward_list<RangeCallbacks> &known_callbacks() {
  static auto *const callbacks = new std::forward_list<RangeCallbacks>;
  return *callbacks;
}

// The binary interface between NVTX 3 and a tool (nvtxDetail/nvtxTypes.h of the toolkit has it in full): the tool asks
// by number for tables of the program, among them one that gives the slots of a module's functions, and fills those
// that it wants to be called by.
constexpr uint32_t kTableOfCallbacks = 1, kTableOfVersion = 3;
constexpr uint32_t kNvtxVersion = 3;
constexpr int kCoreModule = 1;
constexpr int kPushSlot = 9, kPopSlot = 11;  // RangePushA and RangePop among the functions of the core module
constexpr unsigned int kNumCoreSlots = 16;   // slot 0 is none; one more ends the table

using NvtxFunction = void (*)();
using NvtxPush = int (*)(const char *message);
using NvtxPop = int (*)();

struct NvtxCallbackTable {
  size_t struct_size;
  int (*get_module_functions)(int module, NvtxFunction ***out_slots, unsigned int *out_count);
};
struct NvtxVersionTable {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved;
  void (*set_tool_version)(uint32_t version);
};

NvtxFunction functions[kNumCoreSlots] = {};
NvtxFunction *slots[kNumCoreSlots + 1] = {};

struct NvtxTool {
  NvtxPush push;
  NvtxPop pop;
};

extern "C" {

static int get_module_functions(int module, NvtxFunction ***out_slots, unsigned int *out_count) {
  if (module != kCoreModule) return 0;
  for (unsigned int i = 1; i < kNumCoreSlots; ++i) slots[i] = &functions[i];
  if (out_slots != nullptr) *out_slots = slots;
  if (out_count != nullptr) *out_count = kNumCoreSlots;
  return 1;
}

static void ignore_tool_version(uint32_t) {}

static const void *get_nvtx_table(uint32_t id) {
  static const NvtxCallbackTable callbacks = {sizeof callbacks, get_module_functions};
  static const NvtxVersionTable version = {sizeof version, kNvtxVersion, 0, ignore_tool_version};
  if (id == kTableOfCallbacks) return &callbacks;
  return id == kTableOfVersion ? static_cast<const void *>(&version) : nullptr;
}

static void push_nvtx(const char *name, void *tool) { static_cast<const NvtxTool *>(tool)->push(name); }
static void pop_nvtx(void *tool) { static_cast<const NvtxTool *>(tool)->pop(); }

}  // extern "C"

// As with known_callbacks. mutex is held.
NvtxTool *keep_tool(NvtxPush push, NvtxPop pop) {
  static auto *const tools = new std::forward_list<NvtxTool>;
  for (NvtxTool &tool : *tools) {
    if (tool.push == push && tool.pop == pop) return &tool;
  }
  tools->push_front({push, pop});
  return &tools->front();
}

template <class Function>
Function find_symbol(void *library, const char *name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

void set_range_callbacks(pkv_range_push_callback push, pkv_range_pop_callback pop, void *user_data) {
  std::lock_guard<std::mutex> lock(mutex);
  const RangeCallbacks *found = nullptr;
  if (push != nullptr) {
    for (const RangeCallbacks &known : known_callbacks()) {
      if (known.push == push && known.pop == pop && known.user_data == user_data) found = &known;
    }
    if (found == nullptr) {
      known_callbacks().push_front({push, pop, user_data});
      found = &known_callbacks().front();
    }
  }
  internal::range_callbacks.store(found, std::memory_order_release);
}

Status enable_nvtx(const char *path) {
  NvtxTool *tool = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char *reason = dlerror();
      return fail(PKV_UNSUPPORTED, "%s", reason == nullptr ? path : reason);
    }
    using Initialize = int (*)(const void *(*get_table)(uint32_t id));
    NvtxPush push = find_symbol<NvtxPush>(library, "nvtxRangePushA");
    NvtxPop pop = find_symbol<NvtxPop>(library, "nvtxRangePop");
    if (const auto initialize = find_symbol<Initialize>(library, "InitializeInjectionNvtx2")) {
      if (initialize(get_nvtx_table) == 0) return fail(PKV_UNSUPPORTED, "%s: the profiler takes no NVTX ranges now", path);
      push = reinterpret_cast<NvtxPush>(functions[kPushSlot]);
      pop = reinterpret_cast<NvtxPop>(functions[kPopSlot]);
    }
    if (push == nullptr || pop == nullptr) {
      dlclose(library);
      return fail(PKV_UNSUPPORTED, "%s: takes no NVTX ranges (neither InitializeInjectionNvtx2 nor nvtxRangePushA)", path);
    }
    tool = keep_tool(push, pop);
  }
  set_range_callbacks(push_nvtx, pop_nvtx, tool);
  return PKV_OK;
}

}  // namespace pkv
