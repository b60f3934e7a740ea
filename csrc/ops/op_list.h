// Kernel calls in a row, made once and run every step: what a CUDA graph is on a GPU.
//
// A forward pass is some hundred calls whose arguments differ from step to step only in how many
// tokens there are; making them through Python takes longer than many of them run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

namespace vllm_lite {

struct StepSize {
  int64_t num_tokens;
  int32_t num_seqs;
};

// A kernel's params are a plain struct with a function set_size(Params&, const StepSize&) that
// makes them those of a step of another size. The pointers in them must stay valid, and lead to
// room for the largest step.
class OpList {
 public:
  template <typename Params>
  void add(void (*kernel)(const Params&), const Params& params) {
    static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= kParamsBytes);
    Call call;
    call.kernel = reinterpret_cast<void (*)()>(kernel);
    call.run = [](const Call& self, const StepSize& size) {
      Params current;
      std::memcpy(&current, self.params, sizeof(Params));
      set_size(current, size);
      reinterpret_cast<void (*)(const Params&)>(self.kernel)(current);
    };
    std::memcpy(call.params, &params, sizeof(Params));
    calls_.push_back(call);
  }

  // In order. Throws what a kernel throws; the calls after it are not made.
  void run(const StepSize& size) const {
    for (const Call& call : calls_) call.run(call, size);
  }
  size_t num_calls() const { return calls_.size(); }

 private:
  static constexpr size_t kParamsBytes = 256;
  struct Call {
    void (*run)(const Call&, const StepSize&);
    void (*kernel)();
    std::byte params[kParamsBytes];
  };
  std::vector<Call> calls_;
};

}  // namespace vllm_lite
