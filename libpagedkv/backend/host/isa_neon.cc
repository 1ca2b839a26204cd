// The host kernels for NEON, which every AArch64 processor has.
#include "backend/host/isa.h"
#include "backend/host/paged_address.h"
#include "backend/host/rope.h"
#include "backend/host/vector_neon.h"

#include "backend/host/attend_math.inc.h"
#include "backend/host/attend_keys.inc.h"
#include "backend/host/attend_products.inc.h"
#include "backend/host/attend_floats.inc.h"
#include "backend/host/attend_tile.inc.h"
#include "backend/host/write_kv.inc.h"
#include "backend/host/gather_kv.inc.h"

namespace pkv {

const IsaKernels kNeonKernels = {attend_split, merge_tile,    finish_tile,
                                 write_tokens, gather_tokens, merge_tokens};

}  // namespace pkv
