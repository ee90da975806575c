// SPDX-License-Identifier: MIT
// Persistent thread pool and per-thread scratch. No thread is created per call; the calling thread works too.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gdn::cpu {

// Non-owning callable reference (no allocation, unlike std::function).
class WorkRef {
 public:
  template <class F>
  WorkRef(F& f)  // NOLINT(google-explicit-constructor)
      : object_(&f), call_([](void* o, int64_t item, int32_t worker) { (*static_cast<F*>(o))(item, worker); }) {}
  void operator()(int64_t item, int32_t worker) const { call_(object_, item, worker); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int32_t);
};

// Runs work(item, worker) for item in [0, num_items), dynamically scheduled in chunks of `grain` items. worker is in
// [0, threads). Nested and concurrent calls are allowed (a call that finds the pool busy runs on its own thread).
// threads = 0: the default.
void parallel_for(int64_t num_items, int32_t threads, WorkRef work, int64_t grain = 1);

// How many workers parallel_for would use for `threads` as asked (0: default), at least 1.
int32_t effective_threads(int32_t threads);
void set_default_threads(int32_t n);  // 0: environment / hardware

// This thread's scratch: 64-byte aligned, at least `bytes`, contents undefined, valid until this thread's next call of
// scratch(). nullptr when memory is short. Grows only.
void* scratch(size_t bytes);
void release_scratch();  // frees idle pool threads' scratch and the caller's

}  // namespace gdn::cpu
