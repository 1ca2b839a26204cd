// Speed of the host kernels, for each instruction set: decode as bytes of K and V read per second, prefill as
// floating-point operations per second, write_kv as bytes stored per second. Built with the tests:
//
//   cmake -B build -DPAGEDKV_TESTS=ON && cmake --build build --target benchmark_host_kernels
//   build/benchmark_host_kernels [threads] [seconds per measurement] [words that rows must contain]...
//
// One thread is timed by its processor time, which a busy machine does not stretch; more by the clock.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <vector>

#include "../tests/unit/host_case.h"

using namespace pkv;

namespace {

double seconds_per_measurement = 0.2;
std::vector<std::string> wanted_words;

double now() {
  timespec time;
  clock_gettime(host_num_threads() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Times {
  double fastest, median;  // seconds
};

Times measure(const std::function<void()> &call) {
  std::vector<double> times;
  call();
  for (const double start = now(); times.size() < 3 || now() - start < seconds_per_measurement;) {
    const double begin = now();
    call();
    times.push_back(now() - begin);
  }
  std::sort(times.begin(), times.end());
  return {times[0], times[times.size() / 2]};
}

CaseShape make_shape(pkv_dtype kv_dtype, int32_t group, int32_t dim, int32_t batch, int32_t seq_len, int32_t queries) {
  CaseShape shape;
  shape.dtype = PKV_BFLOAT16;
  shape.kv_dtype = kv_dtype;
  shape.num_kv_heads = 8;
  shape.group = group;
  shape.head_dim = shape.v_head_dim = dim;
  shape.has_lse = false;
  if (is_quantised_dtype(kv_dtype)) shape.kv_scales = PKV_SCALES_PER_TOKEN_HEAD;
  shape.seq_lens.assign(static_cast<size_t>(batch), seq_len);
  shape.query_lens.assign(static_cast<size_t>(batch), queries);
  return shape;
}

void print_row(const char *what, const CaseShape &shape, const char *isa, double amount, const char *unit,
               Times times) {
  std::printf("%-8s %-12s group %-2d dim %-3d %3d x %5d/%-5d %-9s %10.1f us  %8.2f %s (median %.2f)\n", what,
              dtype_name(shape.kv_dtype), shape.group, shape.head_dim, static_cast<int>(shape.seq_lens.size()),
              shape.query_lens[0], shape.seq_lens[0], isa, times.fastest * 1e6, amount / times.fastest * 1e-9, unit,
              amount / times.median * 1e-9);
  std::fflush(stdout);
}

void run(const char *what, const CaseShape &shape, const std::vector<const char *> &isas) {
  const std::string text = std::string(what) + " " + describe(shape);
  for (const std::string &word : wanted_words) {
    if (text.find(word) == std::string::npos) return;
  }
  Case step(shape, 1);
  const double rows = static_cast<double>(shape.num_kv_heads) * shape.head_dim * 2;
  double keys = 0, pairs = 0;
  for (size_t i = 0; i < shape.seq_lens.size(); ++i) {
    keys += shape.seq_lens[i];
    pairs += static_cast<double>(shape.query_lens[i]) * (shape.seq_lens[i] - (shape.query_lens[i] - 1) / 2.0);
  }
  std::vector<float> results;
  for (const char *isa : isas) {
    set_host_isa(isa);
    const bool is_write = what[0] == 'w', is_prefill = what[0] == 'p';
    const Times times = measure([&] {
      if (is_write) {
        host_backend()->write_kv(step.write_params, nullptr);
      } else {
        host_backend()->attend(step.params, nullptr);
      }
    });
    if (is_prefill) {
      print_row(what, shape, isa, 2 * pairs * rows * shape.group, "GFLOP/s", times);
    } else {
      print_row(what, shape, isa, keys * rows * dtype_bytes(shape.kv_dtype), "GB/s", times);
    }
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc > 1) set_host_num_threads(std::atoi(argv[1]));
  if (argc > 2) seconds_per_measurement = std::atof(argv[2]);
  for (int i = 3; i < argc; ++i) wanted_words.push_back(argv[i]);
  DeviceInfo info = {};
  host_backend()->query(&info);
  std::printf("%s, %d threads\n", info.name, host_num_threads());
  const std::vector<const char *> isas = available_isas();
  std::vector<const char *> all = isas;
  all.insert(all.begin(), "reference");

  run("decode", make_shape(PKV_BFLOAT16, 4, 128, 1, 1024, 1), all);
  run("prefill", make_shape(PKV_BFLOAT16, 4, 128, 1, 128, 128), all);
  for (const pkv_dtype dtype : {PKV_FLOAT32, PKV_BFLOAT16, PKV_FLOAT16, PKV_FLOAT8_E4M3, PKV_INT8}) {
    run("decode", make_shape(dtype, 1, 128, 4, 4096, 1), isas);
    run("decode", make_shape(dtype, 4, 128, 4, 4096, 1), isas);
    run("decode", make_shape(dtype, 8, 128, 4, 4096, 1), isas);
    run("prefill", make_shape(dtype, 4, 128, 1, 1024, 1024), isas);
    run("write", make_shape(dtype, 1, 128, 1, 2048, 1), isas);
  }
  run("decode", make_shape(PKV_BFLOAT16, 4, 64, 4, 4096, 1), isas);
  run("decode", make_shape(PKV_BFLOAT16, 4, 256, 4, 4096, 1), isas);
  run("prefill", make_shape(PKV_BFLOAT16, 4, 64, 1, 1024, 1024), isas);
  run("prefill", make_shape(PKV_BFLOAT16, 4, 256, 1, 1024, 1024), isas);
  return 0;
}
