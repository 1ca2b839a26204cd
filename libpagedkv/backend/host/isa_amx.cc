// The host kernels for AMX (tiles of bfloat16) beside AVX-512 F, BW, VL, DQ, VBMI and BF16.

// gcc 12 takes the undefined inputs inside its own intrinsics for mistakes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "backend/host/isa.h"
#include "backend/host/paged_address.h"
#include "backend/host/rope.h"
#include "backend/host/vector_pairs.h"

#include "backend/host/attend_math.inc.h"
#include "backend/host/attend_keys.inc.h"
#include "backend/host/attend_products.inc.h"
#include "backend/host/attend_floats.inc.h"
#include "backend/host/attend_tile.inc.h"
#include "backend/host/attend_amx.inc.h"
#include "backend/host/write_kv.inc.h"
#include "backend/host/gather_kv.inc.h"

namespace pkv {

const IsaKernels kAmxKernels = {attend_split_by_tiles, merge_tile,    finish_tile,
                                write_tokens,          gather_tokens, merge_tokens};

}  // namespace pkv
