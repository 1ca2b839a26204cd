// Transfers of the host backend: copies inside the host's memory, by as many threads as the kernels use.
#pragma once

#include <memory>

#include "backend/transfer.h"

namespace pkv {

Status create_host_transfer_queue(std::unique_ptr<TransferQueue> *out);

}  // namespace pkv
