// The outbox's messages as structs, and a client that collects them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/output_writer.h"
#include "engine/utf8.h"
#include "msgpack_reader.h"

namespace vllm_lite::testing {

struct Logprobs {
  float logprob = 0;
  int32_t rank = 0;
  std::vector<TokenId> top_ids;
  std::vector<float> top_logprobs;
  bool operator==(const Logprobs&) const = default;
};

struct Output {
  RequestKey key = 0;
  int32_t sample_index = 0;
  std::vector<TokenId> tokens;
  std::string text;
  std::string finish_reason;  // empty: nil
  TokenId stop_token = -1;
  std::string stop_string;
  bool has_logprobs = false;
  std::vector<Logprobs> logprobs;
  int32_t num_cached_tokens = 0;
  std::string message;  // empty: nil
  bool has_prompt_logprobs = false;
  std::vector<Logprobs> prompt_logprobs;
  std::vector<float> vector;
};

struct Message {
  std::vector<Output> outputs;
  EngineStats stats;
};

inline Message read_message(std::string_view bytes) {
  const auto string_or_nil = [](const MsgpackValue& value) {
    if (value.is_nil()) return std::string();
    EXPECT_NE(value.string(), "") << "an empty string in place of nil";
    return value.string();
  };
  const auto read_logprobs = [](const MsgpackValue& list) {
    std::vector<Logprobs> all;
    for (const MsgpackValue& entry : list.array()) {
      const std::vector<MsgpackValue>& parts = entry.array();
      EXPECT_EQ(parts.size(), 4U);
      Logprobs& logprobs = all.emplace_back();
      logprobs.logprob = static_cast<float>(parts.at(0).number());
      logprobs.rank = static_cast<int32_t>(parts.at(1).integer());
      for (const MsgpackValue& id : parts.at(2).array()) {
        logprobs.top_ids.push_back(static_cast<TokenId>(id.integer()));
      }
      for (const MsgpackValue& logprob : parts.at(3).array()) {
        logprobs.top_logprobs.push_back(static_cast<float>(logprob.number()));
      }
    }
    return all;
  };
  const MsgpackValue root = MsgpackReader::read_all(bytes);
  EXPECT_EQ(root.array().size(), 2U);
  Message message;
  for (const MsgpackValue& value : root.array().at(0).array()) {
    const std::vector<MsgpackValue>& fields = value.array();
    EXPECT_TRUE(fields.size() == 9U || fields.size() == 11U);
    Output& output = message.outputs.emplace_back();
    output.key = fields.at(0).unsigned_integer();
    output.sample_index = static_cast<int32_t>(fields.at(1).integer());
    for (const MsgpackValue& token : fields.at(2).array()) {
      output.tokens.push_back(static_cast<TokenId>(token.integer()));
    }
    output.text = fields.at(3).string();
    output.finish_reason = string_or_nil(fields.at(4));
    if (fields.at(5).kind == MsgpackValue::Kind::kInteger) {
      output.stop_token = static_cast<TokenId>(fields.at(5).integer());
    } else {
      output.stop_string = string_or_nil(fields.at(5));
    }
    output.has_logprobs = !fields.at(6).is_nil();
    if (output.has_logprobs) output.logprobs = read_logprobs(fields.at(6));
    output.num_cached_tokens = static_cast<int32_t>(fields.at(7).integer());
    output.message = string_or_nil(fields.at(8));
    if (fields.size() == 9U) continue;
    output.has_prompt_logprobs = !fields.at(9).is_nil();
    if (output.has_prompt_logprobs) output.prompt_logprobs = read_logprobs(fields.at(9));
    if (fields.at(10).is_nil()) continue;
    const std::string& bytes_of_vector = fields.at(10).string();
    output.vector.resize(bytes_of_vector.size() / sizeof(float));
    std::memcpy(output.vector.data(), bytes_of_vector.data(), bytes_of_vector.size());
  }
  const std::vector<MsgpackValue>& stats = root.array().at(1).array();
  EXPECT_EQ(stats.size(), 11U);
  int64_t* const fields[] = {&message.stats.num_running,        &message.stats.num_waiting,
                             &message.stats.kv_used_blocks,     &message.stats.kv_total_blocks,
                             &message.stats.prefix_queries,     &message.stats.prefix_hits,
                             &message.stats.num_preemptions,    &message.stats.num_steps,
                             &message.stats.num_drafts,         &message.stats.num_draft_tokens,
                             &message.stats.num_accepted_tokens};
  for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = stats.at(i).integer();
  return message;
}

// Everything that one sequence has given.
struct Sample {
  std::vector<TokenId> tokens;
  std::string text;
  std::string finish_reason;
  TokenId stop_token = -1;
  std::string stop_string;
  std::vector<Logprobs> logprobs;
  std::string message;
  int32_t num_cached_tokens = 0;
  std::vector<Logprobs> prompt_logprobs;
  std::vector<float> vector;

  bool finished() const { return !finish_reason.empty(); }
};

class Client {
 public:
  explicit Client(uint16_t id) : id_(id) {}

  // Adds a message to what there is, and checks what holds for every output.
  void take(std::string_view bytes) {
    const Message message = read_message(bytes);
    ++num_messages;
    stats = message.stats;
    for (const Output& output : message.outputs) {
      EXPECT_EQ(client_of(output.key), id_) << "another client's output";
      EXPECT_TRUE(is_well_formed_utf8(output.text));
      EXPECT_TRUE(is_well_formed_utf8(output.message));
      EXPECT_EQ(output.logprobs.size(), output.has_logprobs ? output.tokens.size() : 0);
      Sample& sample = samples_[{output.key, output.sample_index}];
      EXPECT_TRUE(!output.has_prompt_logprobs || sample.tokens.empty()) << "not the first output";
      EXPECT_TRUE(output.vector.empty() || !output.finish_reason.empty());
      if (output.has_prompt_logprobs) sample.prompt_logprobs = output.prompt_logprobs;
      sample.vector = output.vector;
      EXPECT_FALSE(sample.finished()) << "an output after the last";
      sample.tokens.insert(sample.tokens.end(), output.tokens.begin(), output.tokens.end());
      sample.text += output.text;
      sample.logprobs.insert(sample.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
      sample.finish_reason = output.finish_reason;
      sample.stop_token = output.stop_token;
      sample.stop_string = output.stop_string;
      sample.message = output.message;
      sample.num_cached_tokens = output.num_cached_tokens;
    }
  }

  // What the sample has given so far; an empty one if nothing.
  const Sample& sample(RequestKey key, int32_t index = 0) { return samples_[{key, index}]; }
  size_t num_samples(RequestKey key) const {
    size_t count = 0;
    for (const auto& [id, sample] : samples_) count += id.first == key;
    return count;
  }
  bool finished(RequestKey key, int32_t num_samples) {
    for (int32_t i = 0; i < num_samples; ++i) {
      if (!sample(key, i).finished()) return false;
    }
    return true;
  }

  EngineStats stats;
  int32_t num_messages = 0;

 private:
  uint16_t id_;
  std::map<std::pair<RequestKey, int32_t>, Sample> samples_;
};

}  // namespace vllm_lite::testing
