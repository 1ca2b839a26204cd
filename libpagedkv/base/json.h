// Writes one JSON value into a string. The caller keeps the structure right; commas and escapes are done here.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <string>

namespace pkv {

class JsonWriter {
 public:
  explicit JsonWriter(std::string *out) : out_(out) {}

  JsonWriter &begin_object() { return open('{'); }
  JsonWriter &end_object() { return close('}'); }
  JsonWriter &begin_array() { return open('['); }
  JsonWriter &end_array() { return close(']'); }

  JsonWriter &key(const char *name) {
    separate();
    append_string(name);
    out_->push_back(':');
    needs_comma_ = false;
    return *this;
  }

  JsonWriter &value(int64_t number) { return append_format("%" PRId64, number); }
  JsonWriter &value(uint64_t number) { return append_format("%" PRIu64, number); }
  JsonWriter &value(bool flag) { return append(flag ? "true" : "false"); }
  JsonWriter &value(const char *text) {
    separate();
    append_string(text);
    needs_comma_ = true;
    return *this;
  }
  JsonWriter &null() { return append("null"); }

 private:
  void separate() {
    if (needs_comma_) out_->push_back(',');
  }

  JsonWriter &open(char bracket) {
    separate();
    out_->push_back(bracket);
    needs_comma_ = false;
    return *this;
  }

  JsonWriter &close(char bracket) {
    out_->push_back(bracket);
    needs_comma_ = true;
    return *this;
  }

  JsonWriter &append(const char *text) {
    separate();
    out_->append(text);
    needs_comma_ = true;
    return *this;
  }

  template <class T>
  JsonWriter &append_format(const char *format, T number) {
    char text[32];
    std::snprintf(text, sizeof text, format, number);
    return append(text);
  }

  void append_string(const char *text) {
    out_->push_back('"');
    for (const char *c = text; *c != '\0'; ++c) {
      const unsigned char code = static_cast<unsigned char>(*c);
      if (code == '"' || code == '\\') {
        out_->push_back('\\');
        out_->push_back(*c);
      } else if (code < 0x20) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\u%04x", code);
        out_->append(escape);
      } else {
        out_->push_back(*c);
      }
    }
    out_->push_back('"');
  }

  std::string *out_;
  bool needs_comma_ = false;
};

}  // namespace pkv
