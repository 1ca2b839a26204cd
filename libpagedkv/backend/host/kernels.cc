#include "backend/host/kernels.h"

#include <cstring>

#include "backend/host/host.h"
#include "backend/host/reference.h"

namespace pkv {
namespace {

constexpr HostKernels kReference = {"reference", reference_write_kv, reference_attend, reference_merge_states};

}  // namespace

const HostKernels &host_kernels() { return kReference; }

Status set_host_isa(const char *isa) {
  if (std::strcmp(isa, "auto") == 0 || std::strcmp(isa, "reference") == 0) return PKV_OK;
  return fail(PKV_UNSUPPORTED, "instruction set \"%.32s\" is not built in", isa);
}

const char *host_isa() { return host_kernels().name; }

}  // namespace pkv
