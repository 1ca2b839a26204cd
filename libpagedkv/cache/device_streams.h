// Streams and events of all devices of a cache, as if they were those of one. Of several devices a stream is a set, one of
// each device, named by the address of an array that stays as long as the cache: sequences and steps remember it as they
// do a stream. An event is then one of each device. One mutating thread, the cache's.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "backend/backend.h"

namespace pkv {

class DeviceStreams {
 public:
  explicit DeviceStreams(std::vector<Backend *> devices) : devices_(std::move(devices)) {}

  bool is_single() const { return devices_.size() == 1; }
  // Takes a caller's stream: of several devices an array of theirs becomes a set. Throws std::bad_alloc.
  Status adopt(pkv_stream *stream) {
    const bool is_named = *stream == nullptr || *stream == PKV_STREAM_OF_SEQUENCE;
    return is_single() || is_named ? PKV_OK : adopt_set(stream);
  }
  // Of an adopted stream, the one of a device.
  pkv_stream of_device(pkv_stream stream, size_t index) const {
    return is_single() || stream == nullptr ? stream : static_cast<const pkv_stream *>(stream)[index];
  }

  // As of a Backend, for adopted streams.
  bool has_streams() const { return devices_[0]->has_streams(); }
  Status stream_id(pkv_stream stream, uint64_t *out) const;
  Status check_not_capturing(pkv_stream stream) const;
  Status create_event(DeviceEvent *out) const;
  void destroy_event(DeviceEvent event) const;
  Status record_event(DeviceEvent event, pkv_stream stream) const;
  Status wait_event(DeviceEvent event, pkv_stream stream) const;
  bool is_event_done(DeviceEvent event) const;
  Status wait(pkv_stream stream) const;

 private:
  // Told apart by the ids of its streams, not by their handles alone, which are used again.
  struct Set {
    std::unique_ptr<pkv_stream[]> handles;
    std::vector<uint64_t> ids;  // empty where devices have no streams
  };

  Status adopt_set(pkv_stream *stream);

  const std::vector<Backend *> devices_;
  std::vector<Set> sets_;
};

}  // namespace pkv
