#include "engine/output_writer.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

namespace vllm_lite {
namespace {

// The few msgpack forms that are needed (msgpack.org's spec), big-endian.
void put(std::string& out, uint8_t byte) { out.push_back(static_cast<char>(byte)); }

template <typename T>
void put_big_endian(std::string& out, T value) {
  for (int shift = 8 * (static_cast<int>(sizeof(T)) - 1); shift >= 0; shift -= 8) {
    put(out, static_cast<uint8_t>(value >> shift));
  }
}

void put_nil(std::string& out) { put(out, 0xc0); }

void put_int(std::string& out, int64_t value) {
  if (value >= 0 && value < 128) {
    put(out, static_cast<uint8_t>(value));
  } else {
    put(out, 0xd3);
    put_big_endian(out, static_cast<uint64_t>(value));
  }
}

void put_uint64(std::string& out, uint64_t value) {
  put(out, 0xcf);
  put_big_endian(out, value);
}

void put_float(std::string& out, float value) {
  put(out, 0xca);
  put_big_endian(out, std::bit_cast<uint32_t>(value));
}

void put_array(std::string& out, size_t size) {
  if (size < 16) {
    put(out, static_cast<uint8_t>(0x90 | size));
  } else {
    put(out, 0xdd);
    put_big_endian(out, static_cast<uint32_t>(size));
  }
}

void put_string(std::string& out, std::string_view text) {
  if (text.size() < 32) {
    put(out, static_cast<uint8_t>(0xa0 | text.size()));
  } else {
    put(out, 0xdb);
    put_big_endian(out, static_cast<uint32_t>(text.size()));
  }
  out.append(text);
}

void put_bytes(std::string& out, std::span<const float> values) {
  put(out, 0xc6);
  put_big_endian(out, static_cast<uint32_t>(values.size_bytes()));
  out.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

void put_logprobs(std::string& out, const TokenLogprobs& logprobs) {
  put_array(out, 4);
  put_float(out, logprobs.logprob);
  put_int(out, logprobs.rank);
  put_array(out, logprobs.top_ids.size());
  for (TokenId id : logprobs.top_ids) put_int(out, id);
  put_array(out, logprobs.top_logprobs.size());
  for (float logprob : logprobs.top_logprobs) put_float(out, logprob);
}

void put_prompt_logprobs(std::string& out, const PromptLogprobs* prompt) {
  if (prompt == nullptr) {
    put_nil(out);
    return;
  }
  put_array(out, prompt->logprobs.size());
  const std::span<const TokenId> ids(prompt->top_ids);
  const std::span<const float> values(prompt->top_logprobs);
  for (size_t i = 0; i < prompt->logprobs.size(); ++i) {
    const size_t top = i * prompt->num_top;
    put_logprobs(out, {prompt->logprobs[i], prompt->ranks[i], ids.subspan(top, prompt->num_top),
                       values.subspan(top, prompt->num_top)});
  }
}

void put_string_or_nil(std::string& out, std::string_view text) {
  if (text.empty()) {
    put_nil(out);
  } else {
    put_string(out, text);
  }
}

// Where a message holds the 32-bit number of outputs, and where the outputs begin.
constexpr size_t kCountOffset = 2;
constexpr size_t kOutputsOffset = kCountOffset + sizeof(uint32_t);
// A new message gets at most so much room from the start: one long message is no rule.
constexpr size_t kMaxReservedBytes = size_t{1} << 18;

}  // namespace

void OutputWriter::clear() {
  buffer_.clear();
  num_outputs_ = 0;
  put_array(buffer_, 2);
  put(buffer_, 0xdd);  // array with a 32-bit count, filled in by take()
  put_big_endian(buffer_, uint32_t{0});
}

void OutputWriter::add(const SequenceOutput& output) {
  ++num_outputs_;
  const bool has_extras = output.prompt_logprobs != nullptr || !output.vector.empty();
  put_array(buffer_, has_extras ? 11 : 9);
  put_uint64(buffer_, output.key);
  put_int(buffer_, output.sample_index);
  const bool has_token = output.token >= 0;
  put_array(buffer_, has_token ? 1 : 0);
  if (has_token) put_int(buffer_, output.token);
  put_string(buffer_, output.text);
  put_string_or_nil(buffer_, output.finish_reason);
  if (output.stop_token >= 0) {
    put_int(buffer_, output.stop_token);
  } else {
    put_string_or_nil(buffer_, output.stop_string);
  }
  if (output.logprobs == nullptr) {
    put_nil(buffer_);
  } else {
    put_array(buffer_, 1);
    put_logprobs(buffer_, *output.logprobs);
  }
  put_int(buffer_, output.num_cached_tokens);
  put_string_or_nil(buffer_, output.message);
  if (!has_extras) return;
  put_prompt_logprobs(buffer_, output.prompt_logprobs);
  if (output.vector.empty()) {
    put_nil(buffer_);
  } else {
    put_bytes(buffer_, output.vector);
  }
}

void OutputWriter::append(OutputWriter& later) {
  if (empty()) {
    std::swap(buffer_, later.buffer_);
  } else {
    buffer_.append(later.buffer_, kOutputsOffset);
  }
  num_outputs_ += later.num_outputs_;
  later.clear();
}

std::string OutputWriter::take(const EngineStats& stats) {
  for (int byte = 0; byte < 4; ++byte) {
    buffer_[kCountOffset + static_cast<size_t>(byte)] =
        static_cast<char>(num_outputs_ >> (8 * (3 - byte)));
  }
  const int64_t values[] = {stats.num_running,      stats.num_waiting,        stats.kv_used_blocks,
                            stats.kv_total_blocks,  stats.prefix_queries,     stats.prefix_hits,
                            stats.num_preemptions,  stats.num_steps,          stats.num_drafts,
                            stats.num_draft_tokens, stats.num_accepted_tokens};
  put_array(buffer_, std::size(values));
  for (int64_t value : values) put_int(buffer_, value);
  std::string message = std::move(buffer_);
  clear();
  buffer_.reserve(std::min(message.size(), kMaxReservedBytes));
  return message;
}

}  // namespace vllm_lite
