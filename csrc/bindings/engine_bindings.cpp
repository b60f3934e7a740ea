// The engine core for Python: module vllm_lite._core. No torch here.
//
// Bulk data crosses as bytes: prompts in, plans out, results in, outputs out; nothing per token or
// per block becomes a Python object. python/vllm_lite/_core.pyi says the same to type checkers.
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "bindings/text_bindings.h"
#include "core/check.h"
#include "engine/engine_core.h"
#include "ipc/shm_ring.h"

namespace py = pybind11;

namespace vllm_lite {
namespace {

template <typename T>
std::vector<T> vector_from_bytes(const py::bytes& data) {
  const std::string_view view = data;
  VL_CHECK(view.size() % sizeof(T) == 0, "a byte buffer does not hold whole elements");
  std::vector<T> values(view.size() / sizeof(T));
  std::memcpy(values.data(), view.data(), view.size());
  return values;
}

TokenTable make_token_table(const std::string& bytes, const py::bytes& offsets,
                            const py::bytes& kinds, const std::string& decoding) {
  VL_CHECK(decoding == "byte_level" || decoding == "byte_fallback",
           "decoding must be byte_level or byte_fallback, got " + decoding);
  return TokenTable(
      bytes, vector_from_bytes<uint32_t>(offsets), vector_from_bytes<TokenKind>(kinds),
      decoding == "byte_level" ? TextDecoding::kByteLevel : TextDecoding::kByteFallback);
}

SchedulingPolicy policy_from_name(const std::string& name) {
  VL_CHECK(name == "fcfs" || name == "priority",
           "scheduling_policy must be fcfs or priority, got " + name);
  return name == "fcfs" ? SchedulingPolicy::kFirstCome : SchedulingPolicy::kPriority;
}

Pooling pooling_from_name(const std::string& name) {
  if (name.empty()) return Pooling::kNone;
  VL_CHECK(name == "LAST" || name == "MEAN", "pooling must be LAST, MEAN or empty, got " + name);
  return name == "LAST" ? Pooling::kLast : Pooling::kMean;
}

EarlyStopping early_stopping_from_name(const std::string& name) {
  VL_CHECK(name == "no" || name == "yes" || name == "never",
           "early_stopping must be no, yes or never, got " + name);
  return name == "no"    ? EarlyStopping::kNo
         : name == "yes" ? EarlyStopping::kYes
                         : EarlyStopping::kNever;
}

// What is not whole words is no words: finish_step says what is wrong with them.
std::span<const int32_t> words_of(const py::bytes& data) {
  const std::string_view view = data;
  if (view.size() % sizeof(int32_t) != 0) return {};
  // A bytes object's data is aligned for any scalar.
  return {reinterpret_cast<const int32_t*>(view.data()), view.size() / sizeof(int32_t)};
}

void bind_engine_core(py::module_& m) {
  py::class_<EngineStats>(m, "EngineStats")
      .def_readonly("num_running", &EngineStats::num_running)
      .def_readonly("num_waiting", &EngineStats::num_waiting)
      .def_readonly("kv_used_blocks", &EngineStats::kv_used_blocks)
      .def_readonly("kv_total_blocks", &EngineStats::kv_total_blocks)
      .def_readonly("prefix_queries", &EngineStats::prefix_queries)
      .def_readonly("prefix_hits", &EngineStats::prefix_hits)
      .def_readonly("num_preemptions", &EngineStats::num_preemptions)
      .def_readonly("num_steps", &EngineStats::num_steps)
      .def_readonly("num_drafts", &EngineStats::num_drafts)
      .def_readonly("num_draft_tokens", &EngineStats::num_draft_tokens)
      .def_readonly("num_accepted_tokens", &EngineStats::num_accepted_tokens);

  py::class_<EngineCore>(m, "EngineCore")
      .def(py::init([](int32_t max_num_seqs, int32_t max_num_batched_tokens, int32_t max_model_len,
                       int32_t max_num_waiting, int32_t max_chunk_tokens, const std::string& policy,
                       int32_t num_blocks, int32_t block_size, bool enable_prefix_caching,
                       int32_t sliding_window, int32_t num_clients, bool async_scheduling,
                       int32_t num_speculative_tokens, int32_t prompt_lookup_min,
                       int32_t prompt_lookup_max, int32_t max_num_logits, TokenTable& tokens) {
             EngineCoreConfig config;
             config.scheduler.max_num_seqs = max_num_seqs;
             config.scheduler.max_num_batched_tokens = max_num_batched_tokens;
             config.scheduler.max_model_len = max_model_len;
             config.scheduler.max_num_waiting = max_num_waiting;
             config.scheduler.max_chunk_tokens = max_chunk_tokens;
             config.scheduler.policy = policy_from_name(policy);
             config.scheduler.num_speculative_tokens = num_speculative_tokens;
             config.scheduler.max_num_logits = max_num_logits;
             config.ngram = {prompt_lookup_min, prompt_lookup_max};
             config.cache.num_blocks = num_blocks;
             config.cache.block_size = block_size;
             config.cache.enable_prefix_caching = enable_prefix_caching;
             config.cache.sliding_window = sliding_window;
             config.num_clients = num_clients;
             config.async_scheduling = async_scheduling;
             return std::make_unique<EngineCore>(config, tokens);
           }),
           py::kw_only(), py::arg("max_num_seqs"), py::arg("max_num_batched_tokens"),
           py::arg("max_model_len"), py::arg("max_num_waiting"), py::arg("max_chunk_tokens"),
           py::arg("policy"), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("enable_prefix_caching"), py::arg("sliding_window"), py::arg("num_clients"),
           py::arg("async_scheduling"), py::arg("num_speculative_tokens"),
           py::arg("prompt_lookup_min"), py::arg("prompt_lookup_max"), py::arg("max_num_logits"),
           py::arg("tokens"))
      .def(
          "submit",
          [](EngineCore& core, uint64_t key, const py::bytes& prompt, int32_t n, int32_t priority,
             int32_t max_tokens, int32_t min_tokens, const py::bytes& salt, float temperature,
             float top_p, float min_p, int32_t top_k, float repetition_penalty,
             float presence_penalty, float frequency_penalty, int32_t num_logprobs, uint64_t seed,
             std::vector<TokenId> bias_ids, std::vector<float> bias_values,
             std::vector<TokenId> allowed_ids, std::vector<TokenId> stop_ids,
             std::vector<TokenId> eos_ids, std::vector<std::string> stops, bool include_stop,
             bool skip_special_tokens, const py::bytes& constraint, int32_t num_prompt_logprobs,
             int32_t prompt_logprobs_start, const std::string& pooling, int32_t beam_width,
             double length_penalty, const std::string& early_stopping) {
            RequestInput input;
            input.key = key;
            input.prompt = vector_from_bytes<TokenId>(prompt);
            input.num_samples = n;
            input.priority = priority;
            input.max_tokens = max_tokens;
            input.min_tokens = min_tokens;
            const std::string_view salt_bytes = salt;
            VL_CHECK(salt_bytes.empty() || salt_bytes.size() == sizeof(CacheSalt),
                     "salt must have 0 or 16 bytes");
            if (!salt_bytes.empty()) std::memcpy(&input.salt, salt_bytes.data(), sizeof(CacheSalt));
            RowSampling& row = input.sampling.row;
            row.temperature = temperature;
            row.top_p = top_p;
            row.min_p = min_p;
            row.top_k = top_k;
            row.repetition_penalty = repetition_penalty;
            row.presence_penalty = presence_penalty;
            row.frequency_penalty = frequency_penalty;
            row.num_logprobs = num_logprobs;
            row.seed_low = static_cast<uint32_t>(seed);
            row.seed_high = static_cast<uint32_t>(seed >> 32);
            input.sampling.bias_ids = std::move(bias_ids);
            input.sampling.bias_values = std::move(bias_values);
            input.sampling.allowed_ids = std::move(allowed_ids);
            input.sampling.stop_ids = std::move(stop_ids);
            input.eos_ids = std::move(eos_ids);
            input.stops = std::move(stops);
            input.include_stop_in_output = include_stop;
            input.skip_special_tokens = skip_special_tokens;
            input.sampling.constraint = constraint;
            input.num_prompt_logprobs = num_prompt_logprobs;
            input.prompt_logprobs_start = prompt_logprobs_start;
            input.pooling = pooling_from_name(pooling);
            input.beam_search = {.width = beam_width,
                                 .length_penalty = length_penalty,
                                 .early_stopping = early_stopping_from_name(early_stopping)};
            core.submit(std::move(input));
          },
          py::kw_only(), py::arg("key"), py::arg("prompt"), py::arg("n"), py::arg("priority"),
          py::arg("max_tokens"), py::arg("min_tokens"), py::arg("salt"), py::arg("temperature"),
          py::arg("top_p"), py::arg("min_p"), py::arg("top_k"), py::arg("repetition_penalty"),
          py::arg("presence_penalty"), py::arg("frequency_penalty"), py::arg("num_logprobs"),
          py::arg("seed"), py::arg("bias_ids"), py::arg("bias_values"), py::arg("allowed_ids"),
          py::arg("stop_ids"), py::arg("eos_ids"), py::arg("stops"), py::arg("include_stop"),
          py::arg("skip_special_tokens"), py::arg("constraint"), py::arg("num_prompt_logprobs"),
          py::arg("prompt_logprobs_start"), py::arg("pooling"), py::arg("beam_width"),
          py::arg("length_penalty"), py::arg("early_stopping"))
      .def("abort", &EngineCore::abort, py::arg("key"),
           "Ends a request without a further answer; unknown and finished keys are ignored.")
      .def(
          "begin_step",
          [](EngineCore& core) -> py::object {
            const std::span<const int32_t> words = core.begin_step();
            if (words.empty()) return py::none();
            return py::memoryview::from_memory(words.data(),
                                               static_cast<py::ssize_t>(words.size_bytes()));
          },
          py::keep_alive<0, 1>(),
          "A read-only view of the plan's words, good until the next begin_step; finish_step or "
          "fail_step must follow. None: nothing to do before the result of the step in flight.")
      .def(
          "finish_step",
          [](EngineCore& core, const py::bytes& result) { core.finish_step(words_of(result)); },
          py::arg("result"),
          "Takes in the StepResult's bytes of the oldest plan. Raises InternalError if they are no "
          "result of its step, which has then failed.")
      .def(
          "fail_step",
          [](EngineCore& core, const py::str& message) {
            // An exception's text may hold lone surrogates; the step must fail all the same.
            core.fail_step(py::bytes(message.attr("encode")("utf-8", "replace")));
          },
          py::arg("message"),
          "All that is in flight failed as a whole: its requests end with this error.")
      .def("has_work", &EngineCore::has_work,
           "Some request is not finished, or the inbox is not empty.")
      .def(
          "take_outputs",
          [](EngineCore& core, uint16_t client) -> py::object {
            std::optional<std::string> message = core.take_outputs(client);
            if (!message) return py::none();
            return py::bytes(*message);
          },
          py::arg("client"), "The msgpack message for a client; None: nothing new.")
      .def(
          "wait_outputs",
          [](EngineCore& core) {
            std::vector<std::pair<uint16_t, std::string>> messages;
            {
              py::gil_scoped_release release;
              messages = core.wait_outputs();
            }
            py::list list;
            for (auto& [client, message] : messages) {
              list.append(py::make_tuple(client, py::bytes(message)));
            }
            return list;
          },
          "Blocks until there is news; [(client, message), ...], empty once stopped.")
      .def(
          "run",
          [](EngineCore& core, int plan_fd, int result_fd, int64_t step_timeout_ms) {
            py::gil_scoped_release release;
            ShmRing plans(plan_fd);
            ShmRing results(result_fd);
            core.run(plans, results, std::chrono::milliseconds(step_timeout_ms));
          },
          py::arg("plan_fd"), py::arg("result_fd"), py::arg("step_timeout_ms"),
          "Steps until stop(), with a worker behind the two rings. Raises what went wrong if the "
          "worker is gone; every request has then been answered with that error.")
      .def("stop", &EngineCore::stop, "Ends run() and wait_outputs(), for good.")
      .def("stats", &EngineCore::stats)
      .def("check_invariants", &EngineCore::check_invariants,
           "Raises InternalError unless everything is consistent; between steps only.");
}

// Ends this process when the peer of the connected socket is gone: when the parent is, however it
// went. Reads nothing. A thread of its own, so that it works whatever the interpreter is doing.
// Before that it removes `directory`, if one is given: what the parent can no longer remove.
void exit_when_hung_up(int fd, int exit_code, const std::string& directory) {
  // poll() would take it for a peer that is gone.
  VL_CHECK(::fcntl(fd, F_GETFD) >= 0, "fd is " + std::to_string(fd) + ": not an open descriptor");
  std::thread([fd, exit_code, directory] {
    pollfd watched{fd, POLLRDHUP, 0};
    while (::poll(&watched, 1, -1) < 0 && errno == EINTR) {
    }
    std::error_code ignored;
    if (!directory.empty()) std::filesystem::remove_all(directory, ignored);
    ::_exit(exit_code);
  }).detach();
}

}  // namespace
}  // namespace vllm_lite

PYBIND11_MODULE(_core, m) {
  m.doc() = "vllm_lite's engine core: scheduler, KV blocks, text, shared-memory rings.";
  py::register_exception<vllm_lite::Error>(m, "Error", PyExc_ValueError);
  py::register_exception<vllm_lite::InternalError>(m, "InternalError", PyExc_RuntimeError);
  vllm_lite::bind_text(m);
  vllm_lite::bind_engine_core(m);
  m.def("make_token_table", &vllm_lite::make_token_table, py::arg("bytes"), py::arg("offsets"),
        py::arg("kinds"), py::arg("decoding"));
  m.def("trim_heap", [] { ::malloc_trim(0); });
  m.def("exit_when_hung_up", &vllm_lite::exit_when_hung_up, py::arg("fd"), py::arg("exit_code"),
        py::arg("directory") = "");
}
