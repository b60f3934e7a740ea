// Per-token text work allocates nothing but the growth of the output.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "engine/detokenizer.h"
#include "engine/stop_matcher.h"
#include "text_reference.h"

namespace {
thread_local int64_t num_allocations = 0;
}  // namespace

// Not inlined: GCC would see malloc meet delete and warn.
[[gnu::noinline]] void* operator new(size_t size) {
  ++num_allocations;
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace vllm_lite {
namespace {

TEST(TextAllocation, NonePerToken) {
  for (const TextDecoding decoding : {TextDecoding::kByteLevel, TextDecoding::kByteFallback}) {
    const TokenTable table = testing::make_table({{"a longer token than a small string holds"},
                                                  {"\xF0", TokenKind::kByte},
                                                  {"\x9F", TokenKind::kByte},
                                                  {"\x98", TokenKind::kByte},
                                                  {"\x80", TokenKind::kByte},
                                                  {"\n\nUs"},
                                                  {"</s>", TokenKind::kSpecial}},
                                                 decoding);
    Detokenizer detokenizer(table, true);
    StopMatcher matcher(
        std::make_shared<const StopAutomaton>(std::vector<std::string>{"\n\nUser:", "Assistant:"}),
        false);
    std::string text, out;
    text.reserve(1 << 10);
    out.reserve(1 << 20);
    const int64_t before = num_allocations;
    int32_t found = -1;
    for (int i = 0; i < 10000 && found < 0; ++i) {
      text.clear();
      detokenizer.append(i % table.size(), text);
      found = matcher.append(text, out);
      text.clear();
      detokenizer.preview_tail(text);
      if (found < 0) found = matcher.would_match(text);
    }
    EXPECT_EQ(num_allocations, before);
    EXPECT_EQ(found, -1);
    EXPECT_GT(out.size(), 50000U);
  }
}

}  // namespace
}  // namespace vllm_lite
