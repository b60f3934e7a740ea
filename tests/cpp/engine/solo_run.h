// What a request gives when it is alone in the world, worked out the slow way: all its tokens are
// decoded anew after each, and the stop strings looked for in the whole text.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_core.h"
#include "fake_worker.h"
#include "output_reader.h"
#include "text_reference.h"

namespace vllm_lite::testing {

struct Vocabulary {
  TextDecoding decoding;
  std::vector<Piece> pieces;

  const Piece& at(TokenId id) const {
    static const Piece none;
    const auto index = static_cast<size_t>(id);
    return id >= 0 && index < pieces.size() ? pieces[index] : none;
  }
};

constexpr TokenId kEos = 0;

// kNumTokens tokens: a few words, whole and split characters, special tokens, one without text.
inline Vocabulary byte_level_vocabulary() {
  return {TextDecoding::kByteLevel,
          {{"</s>", TokenKind::kSpecial},
           {"<|x|>", TokenKind::kSpecial},
           {"a"},
           {"b"},
           {"ab"},
           {"ba"},
           {" "},
           {"\n"},
           {"c"},
           {"\xC3"},
           {"\xA9"},
           {"\xC3\xA9"},
           {"\xE2\x82"},
           {"\xAC"},
           {"\xE2\x82\xAC"},
           {"\xF0\x9F"},
           {"\x98\x80"},
           {"stop"},
           {"st"},
           {"op"},
           {""},
           {"\xC3\xA9\n\xC3"},
           {"x"},
           {"User:"}}};
}

inline Vocabulary byte_fallback_vocabulary() {
  return {TextDecoding::kByteFallback,
          {{"</s>", TokenKind::kSpecial},
           {"<|x|>", TokenKind::kSpecial},
           {"a"},
           {"b"},
           {"ab"},
           {"ba"},
           {" "},
           {"\n"},
           {"a", TokenKind::kByte},
           {"\xC3", TokenKind::kByte},
           {"\xA9", TokenKind::kByte},
           {"\xC3\xA9"},
           {"\xE2", TokenKind::kByte},
           {"\x82", TokenKind::kByte},
           {"\xAC", TokenKind::kByte},
           {"\xE2\x82\xAC"},
           {"b", TokenKind::kByte},
           {"stop"},
           {"st"},
           {"op"},
           {""},
           {"\n", TokenKind::kByte},
           {"x"},
           {"User:"}}};
}

// Text that later tokens cannot change, and what would follow if the sequence ended here.
inline Decoded decode(const std::vector<TokenId>& tokens, const Vocabulary& vocabulary,
                      bool skip_special) {
  std::string bytes, settled;
  for (const TokenId token : tokens) {
    const Piece& piece = vocabulary.at(token);
    if (piece.bytes.empty() || (skip_special && piece.kind == TokenKind::kSpecial)) continue;
    if (vocabulary.decoding == TextDecoding::kByteLevel || piece.kind == TokenKind::kByte) {
      bytes += piece.bytes;
    } else {
      if (!bytes.empty()) settled += decode_run(bytes, true).settled;
      bytes.clear();
      settled += piece.bytes;
    }
  }
  if (vocabulary.decoding == TextDecoding::kByteLevel) return decode_bytes(bytes);
  const Decoded run = bytes.empty() ? Decoded{} : decode_run(bytes, false);
  return {settled + run.settled, run.tail};
}

// The stop string that ends first after `from`, of those the longest: its index and its beginning.
inline std::optional<std::pair<size_t, size_t>> find_stop(const std::string& text, size_t from,
                                                          const std::vector<std::string>& stops) {
  std::optional<std::pair<size_t, size_t>> best;
  size_t best_end = 0;
  for (size_t i = 0; i < stops.size(); ++i) {
    const size_t size = stops[i].size();
    const size_t at = text.find(stops[i], from < size ? 0 : from + 1 - size);
    if (at == std::string::npos) continue;
    const size_t end = at + size;
    if (!best || end < best_end || (end == best_end && at < best->second)) {
      best = {i, at};
      best_end = end;
    }
  }
  return best;
}

inline Sample solo_run(const RequestInput& input, int32_t sample_index,
                       const Vocabulary& vocabulary, int32_t max_model_len, int32_t window = 0) {
  SamplingParams params = input.sampling;
  const auto num_prompt = static_cast<int32_t>(input.prompt.size());
  const uint64_t seed = (uint64_t{params.row.seed_high} << 32 | params.row.seed_low) +
                        static_cast<uint64_t>(sample_index);
  params.row.seed_low = static_cast<uint32_t>(seed);
  params.row.seed_high = static_cast<uint32_t>(seed >> 32);
  params.row.num_prompt_tokens = num_prompt;
  params.row.min_total_tokens = std::min(input.min_tokens, max_model_len) + num_prompt;

  Sample sample;
  const auto seen_at = [&](int32_t position) {
    const int32_t begin = first_visible(position, window);
    return std::pair(
        std::span(input.prompt)
            .subspan(static_cast<size_t>(begin), static_cast<size_t>(position - begin + 1)),
        begin);
  };
  for (int32_t i = std::max(input.prompt_logprobs_start, 1); i < num_prompt; ++i) {
    if (input.num_prompt_logprobs < 0 || sample_index > 0) break;
    const auto [visible_prompt, begin] = seen_at(i - 1);
    sample.prompt_logprobs.push_back(score_token(
        visible_prompt, begin, input.prompt[static_cast<size_t>(i)], input.num_prompt_logprobs));
  }
  if (input.pooling != Pooling::kNone) {
    float sum = 0;
    for (int32_t i = input.pooling == Pooling::kLast ? num_prompt - 1 : 0; i < num_prompt; ++i) {
      const auto [visible_prompt, begin] = seen_at(i);
      sum += hidden_state(visible_prompt, begin);
    }
    sample.vector = {sum};
  }
  if (input.max_tokens == 0) {
    sample.finish_reason = input.pooling == Pooling::kNone ? "length" : "stop";
    return sample;
  }
  std::vector<TokenId> all = input.prompt;
  std::vector<TokenId> visible;  // to the reader: with text
  size_t searched_from = 0;
  while (!sample.finished()) {
    const auto first =
        static_cast<size_t>(first_visible(static_cast<int32_t>(all.size()) - 1, window));
    const Sampled next =
        sample_next(std::span(all).subspan(first), static_cast<int32_t>(first), params);
    if (next.token == kNoToken) {
      sample.finish_reason = "error";
      break;
    }
    const auto is_in = [&](const std::vector<TokenId>& ids) {
      return std::find(ids.begin(), ids.end(), next.token) != ids.end();
    };
    all.push_back(next.token);
    sample.tokens.push_back(next.token);
    if (params.row.num_logprobs >= 0) sample.logprobs.push_back(next.logprobs);
    const auto num_output = static_cast<int32_t>(sample.tokens.size());
    if (num_output == input.min_tokens) {
      searched_from = decode(visible, vocabulary, input.skip_special_tokens).settled.size();
    }
    const bool is_stop_id = is_in(params.stop_ids);
    if (!is_stop_id || input.include_stop_in_output) visible.push_back(next.token);
    if (is_stop_id) {
      sample.finish_reason = "stop";
      if (!is_in(input.eos_ids)) sample.stop_token = next.token;
    } else if (num_output == input.max_tokens || num_prompt + num_output == max_model_len) {
      sample.finish_reason = "length";
    }

    const auto [settled, tail] = decode(visible, vocabulary, input.skip_special_tokens);
    const bool tail_counts = sample.finished() || tail.find(kFffd) == std::string::npos;
    sample.text = sample.finished() || tail_counts ? settled + tail : settled;
    if (num_output < input.min_tokens) continue;
    const auto stop = find_stop(sample.text, searched_from, input.stops);
    if (!stop) continue;
    const auto [index, at] = *stop;
    sample.text.resize(at + (input.include_stop_in_output ? input.stops[index].size() : 0));
    sample.finish_reason = "stop";
    sample.stop_token = -1;
    sample.stop_string = input.stops[index];
  }
  return sample;
}

// The samples of a beam search, best first; one that failed has an error alone.
inline std::vector<Sample> solo_beam_search(const RequestInput& input, const Vocabulary& vocabulary,
                                            int32_t max_model_len, int32_t window = 0) {
  SamplingParams params = input.sampling;
  const auto num_prompt = static_cast<int32_t>(input.prompt.size());
  params.row.num_prompt_tokens = num_prompt;
  BeamSearch search(input.beam_search, std::min(input.max_tokens, max_model_len - num_prompt),
                    params.stop_ids);
  Sample failed;
  failed.finish_reason = "error";
  std::vector<std::vector<TokenId>> running = {input.prompt};
  while (!search.done()) {
    std::vector<Sampled> sampled;
    std::vector<BeamSearch::Continuations> after;
    for (const std::vector<TokenId>& tokens : running) {
      const int32_t first = first_visible(static_cast<int32_t>(tokens.size()) - 1, window);
      sampled.push_back(
          sample_next(std::span(tokens).subspan(static_cast<size_t>(first)), first, params));
      if (sampled.back().token == kNoToken) return {failed};
    }
    for (const Sampled& row : sampled) {
      after.push_back({row.logprobs.top_ids, row.logprobs.top_logprobs});
    }
    search.advance(after);
    std::vector<std::vector<TokenId>> next;
    for (const BeamSearch::Beam& beam : search.beams()) {
      next.push_back(running[static_cast<size_t>(beam.parent)]);
      next.back().push_back(beam.token);
    }
    running = std::move(next);
  }
  if (search.num_hypotheses() < search.width()) return {failed};
  std::vector<Sample> samples;
  std::vector<BeamSearch::Token> tokens;
  for (int32_t i = 0; i < search.width(); ++i) {
    Sample& sample = samples.emplace_back();
    search.tokens(i, tokens);
    for (const BeamSearch::Token& token : tokens) {
      sample.tokens.push_back(token.id);
      sample.logprobs.push_back({token.logprob, token.rank, {}, {}});
    }
    std::vector<TokenId> visible = sample.tokens;
    sample.finish_reason = search.ends_with_stop(i) ? "stop" : "length";
    if (search.ends_with_stop(i)) {
      const TokenId last = visible.back();
      if (std::count(input.eos_ids.begin(), input.eos_ids.end(), last) == 0) {
        sample.stop_token = last;
      }
      if (!input.include_stop_in_output) visible.pop_back();
    }
    const Decoded text = decode(visible, vocabulary, input.skip_special_tokens);
    sample.text = text.settled + text.tail;
  }
  return samples;
}

}  // namespace vllm_lite::testing
