// The module `_cpu`: the custom calls for XLA's CPU backend.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "../bindings.h"
#include "../ffi.h"
#include "../make_params.h"
#include "attention.h"

namespace flashattn {
namespace {

// Runs task(i) for i in [0, n) on XLA's pool and on the calling thread, which takes tasks until
// none is left and then waits for those in flight. It never waits for a task nobody has begun, so
// it cannot deadlock even when the caller itself occupies the pool's only thread.
void parallel_for(ffi::ThreadPool& pool, int64_t n, const std::function<void(int64_t)>& task) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto shared = std::make_shared<Shared>();
  // A helper that starts late finds no task left and touches nothing of the caller's frame.
  auto work = [shared, n, &task] {
    int64_t finished = 0;
    for (int64_t i; (i = shared->next.fetch_add(1)) < n; ++finished) task(i);
    if (finished > 0 && shared->done.fetch_add(finished) + finished == n) {
      std::lock_guard<std::mutex> lock(shared->mutex);
      shared->all_done.notify_all();
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done.load() == n; });
}

template <class Attrs, class Make, class Run>
ffi::Error handle(const char* op, ffi::ThreadPool pool, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, const ffi::Dictionary& dictionary,
                  const std::vector<BufferName>& operands, const std::vector<BufferName>& results,
                  Make&& make_params, Run&& run) {
  auto attrs = decode_attrs<Attrs>(op, dictionary);
  if (!attrs.has_value()) return attrs.error();
  auto call = bind_call(op, *attrs, args, rets, operands, results);
  if (!call.has_value()) return call.error();
  auto params = make_params(*attrs, *call);
  if (!params.has_value()) return params.error();
  run(*params,
      [&](int64_t n, const std::function<void(int64_t)>& task) { parallel_for(pool, n, task); });
  return ffi::Error::Success();
}

ffi::Error prefill(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attrs) {
  return handle<PrefillAttrs>("prefill", pool, args, rets, attrs, kPrefillOperands, kPrefillResults,
                              make_prefill_params, cpu::prefill);
}
ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attrs) {
  return handle<BackwardAttrs>("backward", pool, args, rets, attrs, kBackwardOperands,
                               kBackwardResults, make_backward_params, cpu::backward);
}
ffi::Error decode(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attrs) {
  return handle<DecodeAttrs>("decode", pool, args, rets, attrs, kDecodeOperands, kDecodeResults,
                             make_decode_params, cpu::decode);
}

auto binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(PrefillHandler, prefill, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardHandler, backward, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeHandler, decode, binding());

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("targets", [] {
    nb::dict targets;
    targets["prefill"] = handler_capsule(PrefillHandler);
    targets["backward"] = handler_capsule(BackwardHandler);
    targets["decode"] = handler_capsule(DecodeHandler);
    return targets;
  });
  m.def("signature", signature);
  m.def("ffi_api_version", ffi_api_version);
  m.def("instruction_sets", cpu::instruction_sets);
  m.def("instruction_set", cpu::instruction_set);
  m.def("set_instruction_set", [](const std::string& name) {  // for tests: every set on one machine
    if (!cpu::set_instruction_set(name)) throw nb::value_error("no such instruction set here");
  });
}

}  // namespace flashattn
