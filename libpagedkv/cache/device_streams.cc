#include "cache/device_streams.h"

namespace pkv {

Status DeviceStreams::adopt_set(pkv_stream *stream) {
  const pkv_stream *given = static_cast<const pkv_stream *>(*stream);
  const size_t count = devices_.size();
  if (std::all_of(given, given + count, [](pkv_stream one) { return one == nullptr; })) {
    *stream = nullptr;
    return PKV_OK;
  }
  std::vector<uint64_t> ids;
  if (has_streams()) {
    ids.resize(count);
    for (size_t i = 0; i < count; ++i) PKV_TRY(devices_[i]->stream_id(given[i], &ids[i]));
  }
  for (const Set &set : sets_) {
    if (set.ids == ids && std::equal(given, given + count, set.handles.get())) {
      *stream = set.handles.get();
      return PKV_OK;
    }
  }
  Set set;
  set.handles = std::make_unique<pkv_stream[]>(count);
  std::copy_n(given, count, set.handles.get());
  set.ids = std::move(ids);
  sets_.push_back(std::move(set));
  *stream = sets_.back().handles.get();
  return PKV_OK;
}

// Of a set, its number: ids are compared with one another alone.
Status DeviceStreams::stream_id(pkv_stream stream, uint64_t *out) const {
  if (is_single()) return devices_[0]->stream_id(stream, out);
  const auto found = std::find_if(sets_.begin(), sets_.end(), [&](const Set &set) { return set.handles.get() == stream; });
  *out = stream == nullptr ? 0 : static_cast<uint64_t>(found - sets_.begin()) + 1;
  return PKV_OK;
}

Status DeviceStreams::check_not_capturing(pkv_stream stream) const {
  for (size_t i = 0; i < devices_.size(); ++i) PKV_TRY(devices_[i]->check_not_capturing(of_device(stream, i)));
  return PKV_OK;
}

Status DeviceStreams::wait(pkv_stream stream) const {
  for (size_t i = 0; i < devices_.size(); ++i) PKV_TRY(devices_[i]->wait(of_device(stream, i)));
  return PKV_OK;
}

Status DeviceStreams::create_event(DeviceEvent *out) const {
  if (is_single()) return devices_[0]->create_event(out);
  auto events = std::make_unique<DeviceEvent[]>(devices_.size());
  for (size_t i = 0; i < devices_.size(); ++i) {
    const Status status = devices_[i]->create_event(&events[i]);
    if (status == PKV_OK) continue;
    while (i-- > 0) devices_[i]->destroy_event(events[i]);
    return status;
  }
  *out = events.release();
  return PKV_OK;
}

void DeviceStreams::destroy_event(DeviceEvent event) const {
  if (is_single()) return devices_[0]->destroy_event(event);
  const std::unique_ptr<DeviceEvent[]> events(static_cast<DeviceEvent *>(event));
  if (events == nullptr) return;
  for (size_t i = 0; i < devices_.size(); ++i) devices_[i]->destroy_event(events[i]);
}

Status DeviceStreams::record_event(DeviceEvent event, pkv_stream stream) const {
  if (is_single()) return devices_[0]->record_event(event, stream);
  const DeviceEvent *events = static_cast<const DeviceEvent *>(event);
  for (size_t i = 0; i < devices_.size(); ++i) PKV_TRY(devices_[i]->record_event(events[i], of_device(stream, i)));
  return PKV_OK;
}

Status DeviceStreams::wait_event(DeviceEvent event, pkv_stream stream) const {
  if (is_single()) return devices_[0]->wait_event(event, stream);
  const DeviceEvent *events = static_cast<const DeviceEvent *>(event);
  for (size_t i = 0; i < devices_.size(); ++i) PKV_TRY(devices_[i]->wait_event(events[i], of_device(stream, i)));
  return PKV_OK;
}

bool DeviceStreams::is_event_done(DeviceEvent event) const {
  if (is_single()) return devices_[0]->is_event_done(event);
  const DeviceEvent *events = static_cast<const DeviceEvent *>(event);
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (!devices_[i]->is_event_done(events[i])) return false;
  }
  return true;
}

}  // namespace pkv
