// How one sequence ends, and what of its text is shown. Each case also equals the slow solo run.
#include <limits>

#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

// Tokens of the byte-level vocabulary.
enum : TokenId {
  kSpecialX = 1,
  kA,
  kB,
  kAb,
  kBa,
  kSpace,
  kNewline,
  kC,
  kC3,
  kA9,
  kEAcute,
  kE282,
  kAc,
  kEuro,
  kF09f,
  k9880,
  kStop,
  kSt,
  kOp,
  kHole,
  kEAcuteNewlineC3,
  kX,
  kUser
};

struct EngineStop : EngineTest {};

TEST_F(EngineStop, LengthAtMaxTokens) {
  for (const int32_t max_tokens : {1, 2, 10}) {
    const Sample& sample = run(endless(5, max_tokens));
    EXPECT_EQ(sample.finish_reason, "length");
    EXPECT_EQ(sample.tokens.size(), static_cast<size_t>(max_tokens));
  }
}

// LEN-05
TEST_F(EngineStop, LengthAtMaxModelLen) {
  config_.scheduler.max_model_len = 20;
  const Sample& sample = run(endless(5, std::numeric_limits<int32_t>::max()));
  EXPECT_EQ(sample.finish_reason, "length");
  EXPECT_EQ(sample.tokens.size(), 15U);
}

TEST_F(EngineStop, NoLimitAndNoMinimumOverflows) {
  config_.scheduler.max_model_len = 20;
  RequestInput input = request(prompt(5), std::numeric_limits<int32_t>::max());
  input.min_tokens = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(run(input).finish_reason, "length");  // EOS was masked to the end
}

TEST_F(EngineStop, EosIsATokenWithoutTextOrReason) {
  const Sample& sample = run(scripted({kA, kEos, kB}));
  EXPECT_EQ(sample.finish_reason, "stop");
  EXPECT_EQ(sample.stop_token, -1);
  EXPECT_EQ(sample.tokens, (std::vector<TokenId>{kA, kEos}));
  EXPECT_EQ(sample.text, "a");
}

// STP-03
TEST_F(EngineStop, EosIsHiddenEvenIfSpecialTokensAreShown) {
  RequestInput input = scripted({kA, kSpecialX, kEos, kB});
  input.skip_special_tokens = false;
  EXPECT_EQ(run(input).text, "a<|x|>");
  input = scripted({kA, kSpecialX, kEos, kB});
  input.skip_special_tokens = false;
  input.include_stop_in_output = true;
  EXPECT_EQ(run(input).text, "a<|x|></s>");
}

// STP-05
TEST_F(EngineStop, StopTokenIsTheReason) {
  RequestInput input = scripted({kA, kX, kB});
  input.sampling.stop_ids.push_back(kX);
  const Sample hidden = run(input);
  EXPECT_EQ(hidden.finish_reason, "stop");
  EXPECT_EQ(hidden.stop_token, kX);
  EXPECT_EQ(hidden.text, "a");
  input.key = make_key(0, next_key_++);
  input.include_stop_in_output = true;
  EXPECT_EQ(run(input).text, "ax");
}

TEST_F(EngineStop, IgnoredEosGoesOn) {
  RequestInput input = scripted({kA, kEos, kB});
  input.sampling.stop_ids.clear();
  const Sample& sample = run(input);
  EXPECT_EQ(sample.finish_reason, "length");
  EXPECT_EQ(sample.text, "ab");
}

TEST_F(EngineStop, StopTokenAtTheLimitIsAStop) {
  const Sample& sample = run(scripted({kA, kEos}));
  EXPECT_EQ(sample.finish_reason, "stop");
}

// STP-01, STP-05
TEST_F(EngineStop, StopStringWithinAndAcrossTokens) {
  for (const std::vector<TokenId>& output :
       {std::vector<TokenId>{kA, kStop, kB}, {kA, kSt, kOp, kB}, {kSt, kSt, kOp, kB}}) {
    for (const bool include : {false, true}) {
      RequestInput input = scripted(output);
      input.stops = {"nothing", "stop"};
      input.include_stop_in_output = include;
      const Sample& sample = run(input);
      EXPECT_EQ(sample.finish_reason, "stop");
      EXPECT_EQ(sample.stop_string, "stop");
      EXPECT_EQ(sample.text.ends_with("stop"), include);
      EXPECT_LT(sample.tokens.size(), output.size());  // at that very token
    }
  }
}

TEST_F(EngineStop, StopStringAtTheLimitIsAStop) {
  RequestInput input = scripted({kA, kSt, kOp});
  input.stops = {"stop"};
  EXPECT_EQ(run(input).finish_reason, "stop");
}

// STP-01
TEST_F(EngineStop, TextHeldForAStopStringThatDoesNotComeIsLetOut) {
  RequestInput input = scripted({kA, kSt});
  input.stops = {"stop"};
  EXPECT_EQ(run(input).text, "ast");  // length
  input = scripted({kA, kSt, kEos});
  input.stops = {"stop"};
  EXPECT_EQ(run(input).text, "ast");  // EOS
  input = scripted({kA, kSt, kB, kX});
  input.stops = {"stop"};
  EXPECT_EQ(run(input).text, "astbx");
}

TEST_F(EngineStop, StopStringInTheTextOfAStopToken) {
  RequestInput input = scripted({kA, kSt, kOp, kB});
  input.sampling.stop_ids.push_back(kOp);
  input.stops = {"stop"};
  input.include_stop_in_output = true;
  const Sample& shown = run(input);
  EXPECT_EQ(shown.stop_string, "stop");
  EXPECT_EQ(shown.stop_token, -1);
  EXPECT_EQ(shown.text, "astop");
  input.key = make_key(0, next_key_++);
  input.include_stop_in_output = false;  // then the token has no text
  EXPECT_EQ(run(input).stop_token, kOp);
  EXPECT_EQ(engine().sample(input.key).text, "ast");
}

// TOK-01
TEST_F(EngineStop, CharactersCutByTokens) {
  EXPECT_EQ(run(scripted({kC3, kA9, kE282, kAc, kF09f, k9880})).text,
            "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
  RequestInput input = scripted({kA, kE282, kAc, kB});
  input.stops = {"\xE2\x82\xAC"};
  EXPECT_EQ(run(input).text, "a");
  input = scripted({kEAcuteNewlineC3, kA9, kA, kB});
  input.stops = {
      "\n\xC3\xA9"
      "a"};
  EXPECT_EQ(run(input).text, "\xC3\xA9");
}

TEST_F(EngineStop, HalfACharacterAtTheEndIsReplaced) {
  EXPECT_EQ(run(scripted({kA, kE282})).text, "a" + kFffd);
  EXPECT_EQ(run(scripted({kA, kE282, kEos})).text, "a" + kFffd);
  EXPECT_EQ(run(scripted({kA, kE282, kB})).text, "a" + kFffd + "b");
}

TEST_F(EngineStop, ReplacementCharacterAtTheEndCompletesAStopString) {
  for (const std::vector<TokenId>& output :
       {std::vector<TokenId>{kA, kX, kE282}, {kA, kX, kE282, kEos}}) {
    RequestInput input = scripted(output);
    input.stops = {"x" + kFffd};
    const Sample& sample = run(input);
    EXPECT_EQ(sample.finish_reason, "stop");
    EXPECT_EQ(sample.stop_string, "x" + kFffd);
    EXPECT_EQ(sample.text, "a");
  }
}

TEST_F(EngineStop, HalfACharacterIsNoStopStringWhileItIsBeingWritten) {
  RequestInput input = scripted({kA, kE282, kAc, kB});
  input.stops = {kFffd};
  EXPECT_EQ(run(input).text,
            "a\xE2\x82\xAC"
            "b");
}

TEST_F(EngineStop, BytesThatMayChangeCountAsTheyStand) {
  vocabulary_ = byte_fallback_vocabulary();
  // <0x61> alone is "a"; a byte that fits no character after it would make it U+FFFD.
  RequestInput input = scripted({kX, kC, kB});
  input.stops = {"a"};
  const Sample& sample = run(input);
  EXPECT_EQ(sample.finish_reason, "stop");
  EXPECT_EQ(sample.tokens.size(), 2U);
}

// STP-06
TEST_F(EngineStop, MinTokensHidesEosAndStopStrings) {
  RequestInput input = request(prompt(5), 40);
  input.min_tokens = 30;
  EXPECT_GE(run(input).tokens.size(), 30U);
  input = scripted({kStop, kA, kStop, kStop, kB});
  input.stops = {"stop"};
  input.min_tokens = 3;
  const Sample& sample = run(input);
  EXPECT_EQ(sample.tokens.size(), 3U);
  EXPECT_EQ(sample.text, "stopa");
  EXPECT_EQ(sample.stop_string, "stop");
}

// STP-06
TEST_F(EngineStop, AStopStringThatEndsAtMinTokensMayBeginBefore) {
  RequestInput input = scripted({kStop, kSt, kOp, kSt, kOp, kB});
  input.stops = {"stop"};
  input.min_tokens = 3;
  const Sample& sample = run(input);
  EXPECT_EQ(sample.tokens.size(), 3U);
  EXPECT_EQ(sample.text, "stop");
  EXPECT_EQ(sample.stop_string, "stop");
  input = scripted({kStop, kSt, kOp, kSt, kOp, kB});
  input.stops = {"stop", "stopstopst"};
  input.min_tokens = 4;
  EXPECT_EQ(run(input).text, "");
}

TEST_F(EngineStop, EndBeforeMinTokensFindsNoStopString) {
  config_.scheduler.max_model_len = 10;
  RequestInput input = scripted({kStop, kA, kStop, kA, kStop});
  input.stops = {"stop"};
  input.min_tokens = 6;
  const Sample& sample = run(input);
  EXPECT_EQ(sample.finish_reason, "length");
  EXPECT_EQ(sample.text, "stopastopastop");
}

TEST_F(EngineStop, LogprobsOfTheRowsThatAsk) {
  std::vector<RequestInput> inputs;
  for (const int32_t wanted : {-1, 0, 5, 20, 1}) {
    RequestInput& input = inputs.emplace_back(endless(5, 6, 1 + wanted));
    input.sampling.row.num_logprobs = wanted;
    core().submit(input);
  }
  engine().run_until_idle();
  for (const RequestInput& input : inputs) {
    engine().expect_solo(input);
    const Sample& sample = engine().sample(input.key);
    const int32_t wanted = input.sampling.row.num_logprobs;
    ASSERT_EQ(sample.logprobs.size(), wanted < 0 ? 0U : 6U);
    for (const Logprobs& logprobs : sample.logprobs) {
      EXPECT_EQ(logprobs.top_ids.size(), static_cast<size_t>(wanted));
    }
  }
}

// KVA-03
TEST_F(EngineStop, RowWithoutFiniteLogitsEndsWithAnErrorAlone) {
  const RequestInput broken = scripted({kA, -1, kB});
  const RequestInput other = endless(9, 8);
  core().submit(broken);
  core().submit(other);
  engine().run_until_idle();
  engine().expect_solo(broken);
  engine().expect_solo(other);
  EXPECT_EQ(engine().sample(broken.key).finish_reason, "error");
  EXPECT_EQ(engine().sample(broken.key).tokens, std::vector<TokenId>{kA});
}

}  // namespace
}  // namespace vllm_lite::testing
