#include "engine/output_writer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "output_reader.h"

namespace vllm_lite {
namespace {

using testing::Message;
using testing::Output;
using testing::read_message;

Message take(OutputWriter& writer) { return read_message(writer.take({})); }

Output round_trip(const SequenceOutput& output) {
  OutputWriter writer;
  writer.add(output);
  const Message message = take(writer);
  EXPECT_EQ(message.outputs.size(), 1U);
  return message.outputs.at(0);
}

TEST(OutputWriter, MessageWithoutOutputsHoldsTheStats) {
  OutputWriter writer;
  EXPECT_TRUE(writer.empty());
  const EngineStats stats{1, 127, 128, 70000, int64_t{1} << 40, 0, 255, 65536, 3, 300, 200};
  const Message message = read_message(writer.take(stats));
  EXPECT_TRUE(message.outputs.empty());
  EXPECT_EQ(message.stats.num_running, 1);
  EXPECT_EQ(message.stats.num_waiting, 127);
  EXPECT_EQ(message.stats.kv_used_blocks, 128);
  EXPECT_EQ(message.stats.kv_total_blocks, 70000);
  EXPECT_EQ(message.stats.prefix_queries, int64_t{1} << 40);
  EXPECT_EQ(message.stats.prefix_hits, 0);
  EXPECT_EQ(message.stats.num_preemptions, 255);
  EXPECT_EQ(message.stats.num_steps, 65536);
  EXPECT_EQ(message.stats.num_drafts, 3);
  EXPECT_EQ(message.stats.num_draft_tokens, 300);
  EXPECT_EQ(message.stats.num_accepted_tokens, 200);
}

TEST(OutputWriter, WhatIsNotThereIsNil) {
  const Output output = round_trip({});
  EXPECT_TRUE(output.tokens.empty());
  EXPECT_EQ(output.text, "");
  EXPECT_EQ(output.finish_reason, "");
  EXPECT_EQ(output.stop_token, -1);
  EXPECT_EQ(output.stop_string, "");
  EXPECT_FALSE(output.has_logprobs);
  EXPECT_EQ(output.message, "");
}

TEST(OutputWriter, EveryFieldComesThrough) {
  const TokenId ids[] = {5, 200000, -1};
  const float values[] = {-0.5f, -1.25f, -std::numeric_limits<float>::infinity()};
  const TokenLogprobs logprobs{-0.125f, 3, ids, values};
  SequenceOutput output;
  output.key = 0xffff'ffff'ffff'fffe;
  output.sample_index = 129;
  output.token = 151935;
  output.text = "h\xC3\xA9";
  output.finish_reason = "stop";
  output.stop_string = "\n\n";
  output.logprobs = &logprobs;
  output.num_cached_tokens = 4096;
  output.message = "why";
  const Output read = round_trip(output);
  EXPECT_EQ(read.key, output.key);
  EXPECT_EQ(read.sample_index, 129);
  EXPECT_EQ(read.tokens, std::vector<TokenId>{151935});
  EXPECT_EQ(read.text, "h\xC3\xA9");
  EXPECT_EQ(read.finish_reason, "stop");
  EXPECT_EQ(read.stop_string, "\n\n");
  EXPECT_EQ(read.stop_token, -1);
  ASSERT_EQ(read.logprobs.size(), 1U);
  EXPECT_EQ(read.logprobs[0],
            (testing::Logprobs{-0.125f, 3, {5, 200000, -1}, {-0.5f, -1.25f, -INFINITY}}));
  EXPECT_EQ(read.num_cached_tokens, 4096);
  EXPECT_EQ(read.message, "why");
}

TEST(OutputWriter, StopTokenZeroIsAStopReason) {
  SequenceOutput output;
  output.token = output.stop_token = 0;
  EXPECT_EQ(round_trip(output).stop_token, 0);
  EXPECT_EQ(round_trip(output).tokens, std::vector<TokenId>{0});
}

// Where msgpack changes from one form to the next.
TEST(OutputWriter, EveryLengthOfText) {
  for (const size_t size : {0, 1, 31, 32, 33, 255, 256, 65535, 65536, 1 << 20}) {
    const std::string text(size, 'x');
    SequenceOutput output;
    output.text = text;
    output.message = text;
    const Output read = round_trip(output);
    EXPECT_EQ(read.text, text);
    EXPECT_EQ(read.message, text);
  }
}

TEST(OutputWriter, EverySizeOfInteger) {
  for (const int32_t value : {0, 1, 127, 128, 255, 256, 65535, 65536, 2147483647}) {
    SequenceOutput output;
    output.token = output.stop_token = output.sample_index = output.num_cached_tokens = value;
    output.key = static_cast<RequestKey>(value);
    const Output read = round_trip(output);
    EXPECT_EQ(read.tokens, std::vector<TokenId>{value});
    EXPECT_EQ(read.stop_token, value);
    EXPECT_EQ(read.sample_index, value);
    EXPECT_EQ(read.num_cached_tokens, value);
    EXPECT_EQ(read.key, static_cast<RequestKey>(value));
  }
}

TEST(OutputWriter, EveryNumberOfTopLogprobs) {
  for (const size_t count : {0, 1, 15, 16, 17, 300}) {
    std::vector<TokenId> ids;
    std::vector<float> values;
    for (size_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<TokenId>(i * 7));
      values.push_back(-0.5f * static_cast<float>(i));
    }
    const TokenLogprobs logprobs{-1.0f, 1, ids, values};
    SequenceOutput output;
    output.token = 1;
    output.logprobs = &logprobs;
    const Output read = round_trip(output);
    EXPECT_EQ(read.logprobs.at(0).top_ids, ids);
    EXPECT_EQ(read.logprobs.at(0).top_logprobs, values);
  }
}

TEST(OutputWriter, ManyOutputsInOrderAndThenANewMessage) {
  for (const int32_t count : {1, 15, 16, 70000}) {
    OutputWriter writer;
    for (int32_t i = 0; i < count; ++i) {
      SequenceOutput output;
      output.sample_index = i;
      writer.add(output);
    }
    EXPECT_FALSE(writer.empty());
    const Message message = take(writer);
    ASSERT_EQ(message.outputs.size(), static_cast<size_t>(count));
    for (int32_t i = 0; i < count; ++i) {
      ASSERT_EQ(message.outputs[static_cast<size_t>(i)].sample_index, i);
    }
    EXPECT_TRUE(writer.empty());
    EXPECT_TRUE(take(writer).outputs.empty());
  }
}

TEST(OutputWriter, AppendTakesOverInOrder) {
  OutputWriter first, second;
  const auto add = [](OutputWriter& writer, int32_t number) {
    SequenceOutput output;
    output.sample_index = number;
    writer.add(output);
  };
  first.append(second);
  EXPECT_TRUE(first.empty() && second.empty());
  add(second, 1);
  first.append(second);  // into an empty one
  EXPECT_TRUE(second.empty());
  EXPECT_FALSE(first.empty());
  first.append(second);  // an empty one
  add(second, 2);
  add(second, 3);
  first.append(second);  // behind another
  add(second, 4);
  const Message message = take(first);
  ASSERT_EQ(message.outputs.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(message.outputs[i].sample_index, static_cast<int32_t>(i) + 1);
  }
  EXPECT_EQ(take(second).outputs.at(0).sample_index, 4);
}

TEST(OutputWriter, PromptLogprobsAndVectorComeThrough) {
  const PromptLogprobs prompt{.num_top = 2,
                              .logprobs = {-0.5f, -INFINITY},
                              .ranks = {1, 200},
                              .top_ids = {5, 6, 7, -1},
                              .top_logprobs = {-0.5f, -1.0f, -2.0f, -INFINITY}};
  const float vector[] = {1.5f, -0.0f, 3e38f};
  SequenceOutput output;
  output.prompt_logprobs = &prompt;
  const Output scored = round_trip(output);
  ASSERT_EQ(scored.prompt_logprobs.size(), 2U);
  EXPECT_EQ(scored.prompt_logprobs[0], (testing::Logprobs{-0.5f, 1, {5, 6}, {-0.5f, -1.0f}}));
  EXPECT_EQ(scored.prompt_logprobs[1],
            (testing::Logprobs{-INFINITY, 200, {7, -1}, {-2.0f, -INFINITY}}));
  EXPECT_TRUE(scored.vector.empty());
  output.prompt_logprobs = nullptr;
  output.vector = vector;
  const Output pooled = round_trip(output);
  EXPECT_FALSE(pooled.has_prompt_logprobs);
  EXPECT_EQ(pooled.vector, std::vector<float>(std::begin(vector), std::end(vector)));
}

}  // namespace
}  // namespace vllm_lite
