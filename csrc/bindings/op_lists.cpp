// Lists of calls, for Python: CPU only.
#include "bindings/op_lists.h"

#include <torch/csrc/stable/library.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "bindings/op_args.h"

namespace vllm_lite {

OpList*& recording_list() {
  thread_local OpList* list = nullptr;
  return list;
}

namespace {

// Handles rather than pointers: a wrong one is an error, not a crash.
std::mutex lists_mutex;
std::unordered_map<int64_t, std::shared_ptr<OpList>> lists;
int64_t last_handle = 0;

std::shared_ptr<OpList> find_list(int64_t handle) {
  const std::lock_guard lock(lists_mutex);
  const auto found = lists.find(handle);
  VL_CHECK(found != lists.end(), "op list " + std::to_string(handle) + " does not exist");
  return found->second;
}

int64_t op_list_new() {
  const std::lock_guard lock(lists_mutex);
  lists[++last_handle] = std::make_shared<OpList>();
  return last_handle;
}
void op_list_delete(int64_t handle) {
  const std::lock_guard lock(lists_mutex);
  lists.erase(handle);
}
void op_list_begin(int64_t handle) {
  VL_CHECK(recording_list() == nullptr, "this thread is recording an op list already");
  recording_list() = find_list(handle).get();
}
void op_list_end() { recording_list() = nullptr; }
void op_list_run(int64_t handle, int64_t num_tokens, int64_t num_seqs) {
  VL_CHECK(num_tokens >= 0 && num_seqs >= 0 && num_seqs <= INT32_MAX,
           "op_list_run: num_tokens and num_seqs must not be negative");
  find_list(handle)->run({num_tokens, static_cast<int32_t>(num_seqs)});
}

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_lite, m) {
  m.def("op_list_new() -> int");
  m.def("op_list_delete(int list) -> ()");
  m.def("op_list_begin(int list) -> ()");
  m.def("op_list_end() -> ()");
  m.def("op_list_run(int list, int num_tokens, int num_seqs) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CompositeExplicitAutograd, m) {
  m.impl("op_list_new", TORCH_BOX(&op_list_new));
  m.impl("op_list_delete", TORCH_BOX(&op_list_delete));
  m.impl("op_list_begin", TORCH_BOX(&op_list_begin));
  m.impl("op_list_end", TORCH_BOX(&op_list_end));
  m.impl("op_list_run", TORCH_BOX(&op_list_run));
}

}  // namespace
}  // namespace vllm_lite
