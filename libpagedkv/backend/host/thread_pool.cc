#include "backend/host/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "backend/host/host.h"
#include "backend/host/machine.h"

namespace pkv {
namespace {

constexpr int32_t kMaxThreads = 1024;

std::atomic<int32_t> requested_threads{0};  // 0: one per processor

struct Job {
  void (*task)(void *context, int64_t index, int32_t worker);
  void *context;
  int64_t num_tasks;
  std::atomic<int64_t> next{0};

  void work(int32_t worker) {
    for (;;) {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= num_tasks) return;
      task(context, index, worker);
    }
  }
};

// Threads hold `mutex_` to look for a job and to report that they have left it; a job lives in its caller's frame, so
// the caller waits until nobody is inside.
class ThreadPool {
 public:
  // Ends the threads; jobs are done by their callers alone from now on.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
    }
    wake_.notify_all();
    for (int32_t i = 0; i < num_started_; ++i) threads_[i].join();
    num_started_ = 0;
  }

  // False if another job is running.
  bool run(Job *job, int32_t num_threads) {
    if (!caller_.try_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start_threads(num_threads - 1);
      job_ = job;
      num_wanted_ = num_threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    job->work(0);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      job_ = nullptr;
      left_.wait(lock, [this] { return num_inside_ == 0; });
    }
    caller_.unlock();
    return true;
  }

  void lock_for_fork() {
    caller_.lock();
    mutex_.lock();
  }
  void unlock_after_fork() {
    mutex_.unlock();
    caller_.unlock();
  }

 private:
  void start_threads(int32_t count) {
    if (is_stopping_) return;
    try {
      for (; num_started_ < count; ++num_started_) {
        threads_[num_started_] = std::thread([this, index = num_started_] { serve(index); });
      }
    } catch (const std::system_error &) {
      // The system gives no more threads: go on with those there are.
    }
  }

  void serve(int32_t index) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return is_stopping_ || (job_ != nullptr && generation_ != seen); });
      if (is_stopping_) return;
      seen = generation_;
      if (index >= num_wanted_) continue;
      Job *job = job_;
      ++num_inside_;
      lock.unlock();
      job->work(index + 1);
      lock.lock();
      if (--num_inside_ == 0) left_.notify_one();
    }
  }

  std::mutex caller_;  // held for the length of a job
  std::mutex mutex_;   // guards what follows
  std::condition_variable wake_, left_;
  Job *job_ = nullptr;
  uint64_t generation_ = 0;
  int32_t num_wanted_ = 0;  // threads that should join the job, the caller not counted
  int32_t num_inside_ = 0;
  int32_t num_started_ = 0;
  bool is_stopping_ = false;
  std::thread threads_[kMaxThreads];
};

ThreadPool *pool();

void prepare_fork() { pool()->lock_for_fork(); }
void finish_fork_in_parent() { pool()->unlock_after_fork(); }
// Only the forking thread lives on in the child: what the pool remembers of the others must go, without a wait.
void finish_fork_in_child() { new (pool()) ThreadPool; }

// Stopped at exit but never destroyed: threads that outlive main may still call.
ThreadPool *pool() {
  alignas(ThreadPool) static unsigned char storage[sizeof(ThreadPool)];
  struct Owner {
    Owner() {
      new (storage) ThreadPool;
      pthread_atfork(prepare_fork, finish_fork_in_parent, finish_fork_in_child);
    }
    ~Owner() { std::launder(reinterpret_cast<ThreadPool *>(storage))->stop(); }
  };
  static Owner owner;
  return std::launder(reinterpret_cast<ThreadPool *>(storage));
}

}  // namespace

void run_parallel(int64_t num_tasks, int32_t num_threads, void (*task)(void *context, int64_t index, int32_t worker),
                  void *context) {
  Job job;
  job.task = task;
  job.context = context;
  job.num_tasks = num_tasks;
  if (num_threads > kMaxThreads) num_threads = kMaxThreads;
  if (num_threads > num_tasks) num_threads = static_cast<int32_t>(num_tasks);
  if (num_threads > 1 && pool()->run(&job, num_threads)) return;
  job.work(0);
}

Status set_host_num_threads(int32_t num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    return fail(PKV_INVALID_ARGUMENT, "num_threads is %d, not 0 to %d", num_threads, kMaxThreads);
  }
  requested_threads.store(num_threads, std::memory_order_relaxed);
  return PKV_OK;
}

int32_t host_num_threads() {
  const int32_t requested = requested_threads.load(std::memory_order_relaxed);
  if (requested > 0) return requested;
  static const int32_t automatic = [] {
    const int32_t count = count_processors();
    return count < kMaxThreads ? count : kMaxThreads;
  }();
  return automatic;
}

}  // namespace pkv
