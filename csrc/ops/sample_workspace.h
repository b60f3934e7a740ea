// Where the sampler's CUDA kernels leave what the next one needs; see sample.cu.
#pragma once

#include <cstdint>

namespace vllm_lite {

// A row is cut into segments of this many logits, each the work of one block.
constexpr int kSampleSegment = 8192;
// Bins of a histogram of distances to the peak.
constexpr int kSampleBins = 2048;
// A selection among more ids than this reads the whole row instead of a list of them.
constexpr int kSampleListCapacity = 16384;
// What is selected from: the processed logits for the draw, the raw ones for the likeliest tokens.
constexpr int kSampleJobs = 2;

// The least Key of the raw and of the processed logits: kNoKey if none is above -inf, kBrokenKey if
// one is NaN or +inf.
struct SegmentPeak {
  uint64_t raw;
  uint64_t processed;
};
constexpr uint64_t kNoKey = ~0ull, kBrokenKey = 0;
struct SegmentDraw {
  double score;
  int64_t id;
};

// Arrays back to back in one buffer; nothing in it outlives a call.
struct SampleWorkspace {
  float* logits;       // [num_rows, logits_stride], processed
  SegmentPeak* peaks;  // [num_rows, num_segments]
  SegmentDraw* draws;  // [num_rows, num_segments]
  int64_t* sums;       // [kSampleJobs, num_rows, num_segments], of weights
  uint64_t* bins;      // [kSampleJobs, num_rows, kSampleBins], counts or weights
  int32_t* num_ids;    // [kSampleJobs, num_rows], what the list would hold without its limit
  int32_t* ids;        // [kSampleJobs, num_rows, kSampleListCapacity]
  int64_t logits_stride;
  int64_t num_bytes;
  int32_t num_segments;

  // `base` is 16-byte aligned, or nullptr where only num_bytes is of interest.
  SampleWorkspace(void* base, int64_t num_rows, int64_t vocab_size)
      : logits_stride((vocab_size + 3) / 4 * 4),
        num_bytes(0),
        num_segments(static_cast<int32_t>((vocab_size + kSampleSegment - 1) / kSampleSegment)) {
    const auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<decltype(+array)>(reinterpret_cast<uintptr_t>(base) + num_bytes);
      num_bytes += (count * static_cast<int64_t>(sizeof(*array)) + 15) / 16 * 16;
    };
    const int64_t num_lists = kSampleJobs * num_rows;
    take(logits, num_rows * logits_stride);
    take(peaks, num_rows * num_segments);
    take(draws, num_rows * num_segments);
    take(sums, num_lists * num_segments);
    take(bins, num_lists * kSampleBins);
    take(num_ids, num_lists);
    take(ids, num_lists * kSampleListCapacity);
  }
};

}  // namespace vllm_lite
