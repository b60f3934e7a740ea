#include "cuda_on_host/wgmma.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "cuda_on_host/block.h"
#include "cuda_on_host/number_formats.h"
#include "cuda_on_host/options.h"
#include "mma_fragments.h"
#include "sanitizers.h"

namespace cuda_on_host {
namespace {

constexpr uint32_t kStepK = 16;
constexpr std::byte kNaNByte{0xff};
constexpr uint32_t kWholeWarp = 0xffffffffu;

void check_sm90a(const char* what) {
  const int capability = options().compute_capability;
  if (capability != 90) {
    fail(std::string(what) + " needs compute capability 9.0; options().compute_capability is " +
         std::to_string(capability));
  }
}

Thread& lane_of(Warp& warp, int lane) { return *warp.threads[lane]; }

template <const char* kWhat>
void check_all_lanes(Warp&, uint32_t lanes) {
  if (lanes != kWholeWarp) fail(std::string(kWhat) + " needs all 32 lanes of the warp");
}

// ---- the matrix in shared memory

// Lines of 64 elements; a line is a row of b or a column.
constexpr uint32_t kChunkBytes = 16, kChunkElements = 8;
constexpr uint32_t kLineBytes = 128, kLineElements = 64;
constexpr uint32_t kAtomBytes = 8 * kLineBytes;  // the swizzle repeats after it

struct Descriptor {
  uint32_t start, leading, stride;  // bytes
};

Descriptor decode(uint64_t b, bool b_in_rows) {
  const auto field = [b](int low, int bits) {
    return static_cast<uint32_t>(b >> low & ((uint64_t{1} << bits) - 1));
  };
  const auto refuse = [](const std::string& what) { fail("wgmma: the descriptor has " + what); };
  if (field(62, 2) != 1) {
    refuse("swizzle mode " + std::to_string(field(62, 2)) + "; the host knows 1 (128 bytes)");
  }
  if (field(49, 3) != 0) refuse("base offset " + std::to_string(field(49, 3)) + ", not 0");
  if (field(14, 2) != 0 || field(30, 2) != 0 || field(46, 3) != 0 || field(52, 10) != 0) {
    refuse("bits set that have no meaning");
  }
  const Descriptor result{field(0, 14) * 16, field(16, 14) * 16, field(32, 14) * 16};
  if (result.start % kAtomBytes >= kLineBytes || result.start % (2 * kChunkBytes) != 0) {
    refuse("a start that is not an even chunk of a row whose number is a multiple of 8");
  }
  if (b_in_rows && result.start % kLineBytes != 0) {
    refuse("a start inside a row, of a matrix whose rows are b's");
  }
  return result;
}

// Calls body(row or column of b, the first of 8 columns or rows, the 16 bytes there). Returns a
// hash of all that was read.
template <typename F>
uint64_t read_matrix(const WgmmaShape& shape, uint64_t b, F&& body) {
  const Descriptor descriptor = decode(b, shape.b_in_rows);
  const SharedMemory& shared = current.block->shared;
  const auto n = static_cast<uint32_t>(8 * shape.blocks);
  const uint32_t lines = shape.b_in_rows ? kStepK : n, line_elements = shape.b_in_rows ? n : kStepK;
  uint64_t hash = 0;
  for (uint32_t line = 0; line < lines; ++line) {
    const uint32_t row = descriptor.start + line / 8 * descriptor.stride + line % 8 * kLineBytes;
    for (uint32_t first = 0; first < line_elements; first += kChunkElements) {
      uint32_t address =
          row + first / kLineElements * descriptor.leading + first % kLineElements * 2;
      address ^= address / kLineBytes % 8 * kChunkBytes;
      if (address + kChunkBytes > shared.size) fail("wgmma reads past the end of shared memory");
      const std::byte* chunk = shared.memory + address;
      // AddressSanitizer sees the copy itself.
      if (kThreadSanitizer) announce_read(chunk, kChunkBytes);
      uint64_t words[2];
      std::memcpy(words, chunk, sizeof(words));
      for (const uint64_t word : words) hash = (std::rotl(hash, 23) ^ word) * 0x9e3779b97f4a7c15u;
      body(line, first, chunk);
    }
  }
  return hash;
}

void check_proxy(const std::byte* chunk) {
  const Block& block = *current.block;
  const auto [writer, fences] =
      block.shared.copy_marks[static_cast<size_t>(chunk - block.shared.memory) / kCopyBytes];
  if (writer == 0) return;
  const Thread& thread = block.threads[writer - 1];
  if (thread.proxy_fences != fences) return;
  fail("cp.async data read by wgmma without fence.proxy.async: thread " +
       coordinates(thread.index) + " copied it and has had no fence since");
}

// ---- products

// b is read now, and a product whose matrix is not what it was is no product.
template <float (*kToFloat)(uint16_t), int kBlocks>
void perform(Warp& warp, size_t number) {
  const WgmmaProduct& product = lane_of(warp, 0).wgmma.products[number];
  float a[16][16], b[kStepK][8 * kBlocks], products[16][8 * kBlocks];
  const auto unpack = [&](uint32_t line, uint32_t first, const std::byte* chunk) {
    uint16_t elements[kChunkElements];
    std::memcpy(elements, chunk, sizeof(elements));
    for (uint32_t i = 0; i < kChunkElements; ++i) {
      (product.shape.b_in_rows ? b[line][first + i] : b[first + i][line]) = kToFloat(elements[i]);
    }
  };
  if (read_matrix(product.shape, product.b, unpack) != product.b_hash) {
    fail("the matrix in shared memory changed while a wgmma product was under way");
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    unpack_a<kToFloat>(lane, lane_of(warp, lane).wgmma.products[number].a->bits, a);
  }
  multiply(a, b, products);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    uint32_t* sums = lane_of(warp, lane).wgmma.products[number].d->bits;
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const float before = product.accumulate ? std::bit_cast<float>(sums[i]) : 0.0f;
      const int column = i / 4 * 8 + column_of_d(lane, i % 4);
      sums[i] = std::bit_cast<uint32_t>(before + products[row_of_d(lane, i % 4)][column]);
    }
  }
}

void perform_any(Warp& warp, size_t number) {
  const WgmmaShape& shape = lane_of(warp, 0).wgmma.products[number].shape;
  const bool is_bfloat16 = shape.type == Float16Kind::kBFloat16;
  if (shape.blocks == 8) {
    is_bfloat16 ? perform<bfloat16_to_float, 8>(warp, number)
                : perform<float16_to_float, 8>(warp, number);
  } else {
    is_bfloat16 ? perform<bfloat16_to_float, 16>(warp, number)
                : perform<float16_to_float, 16>(warp, number);
  }
}

// ---- registers

bool overlap(const WgmmaRegisters& a, const WgmmaRegisters& b) {
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

// The entry of these registers, and whether there was one. Those that overlap it are of arrays that
// are gone.
std::pair<WgmmaRegisters&, bool> find_registers(void* address, size_t bytes, bool are_sums) {
  std::list<WgmmaRegisters>& all = current.thread->wgmma.registers;
  WgmmaRegisters wanted{static_cast<std::byte*>(address), bytes, are_sums, 0, {}};
  for (auto i = all.begin(); i != all.end();) {
    if (i->address == address && i->bytes == bytes && i->are_sums == are_sums) return {*i, true};
    if (!overlap(*i, wanted)) {
      ++i;
      continue;
    }
    if (i->products != 0) fail("wgmma: registers overlap those of a product that is under way");
    i = all.erase(i);
  }
  return {all.emplace_front(wanted), false};
}

void check_sums_untouched(const WgmmaRegisters& registers) {
  const auto is_nan = [](std::byte x) { return x == kNaNByte; };
  if (!std::all_of(registers.address, registers.address + registers.bytes, is_nan)) {
    fail("the sums of a wgmma product were written while it was under way");
  }
}

bool changed(const WgmmaRegisters& registers) {
  return std::memcmp(registers.bits, registers.address, registers.bytes) != 0;
}

void check_a_untouched(const WgmmaRegisters& registers) {
  if (changed(registers)) {
    fail("the registers of a were written while a wgmma product was under way");
  }
}

void take_copy(WgmmaRegisters& registers) {
  std::memcpy(registers.bits, registers.address, registers.bytes);
}

WgmmaRegisters* use_a(const uint32_t* a) {
  const auto [registers, known] =
      find_registers(const_cast<uint32_t*>(a), 4 * sizeof(*a), /*are_sums=*/false);
  if (registers.products != 0) {
    check_a_untouched(registers);
  } else if (known && changed(registers)) {
    fail("wgmma: the registers of a were written after the last wgmma_fence");
  }
  take_copy(registers);
  ++registers.products;
  return &registers;
}

WgmmaRegisters* use_sums(float* d, size_t bytes, bool accumulate) {
  const auto [registers, known] = find_registers(d, bytes, /*are_sums=*/true);
  if (registers.products++ != 0) {
    check_sums_untouched(registers);
    return &registers;
  }
  if (known && accumulate && changed(registers)) {
    fail("wgmma: the sums were written after the last wgmma_fence");
  }
  take_copy(registers);
  std::memset(d, static_cast<int>(kNaNByte), bytes);
  return &registers;
}

// ---- collectives

bool same(const WgmmaProduct& x, const WgmmaProduct& y) {
  return x.shape.type == y.shape.type && x.shape.b_in_rows == y.shape.b_in_rows &&
         x.shape.blocks == y.shape.blocks && x.b == y.b && x.accumulate == y.accumulate;
}

WgmmaProduct& operand_of(Warp& warp, int lane) {
  return *static_cast<WgmmaProduct*>(lane_of(warp, lane).operands);
}

constexpr char kWgmmaName[] = "wgmma", kFenceName[] = "wgmma_fence", kCommitName[] = "wgmma_commit",
               kWaitName[] = "wgmma_wait";

void complete_wgmma(Warp& warp, uint32_t lanes) {
  check_all_lanes<kWgmmaName>(warp, lanes);
  Block& block = *current.block;
  WgmmaProduct& product = operand_of(warp, 0);
  const uint64_t hash =
      read_matrix(product.shape, product.b,
                  [](uint32_t, uint32_t, const std::byte* chunk) { check_proxy(chunk); });
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!same(product, operand_of(warp, lane))) {
      fail("divergence: lanes of one warp have different operands for wgmma", lane_of(warp, lane));
    }
    operand_of(warp, lane).b_hash = hash;
  }
  const uint32_t first = warp.number / kWarpsPerGroup * kWarpsPerGroup;
  WarpGroup& group = block.warp_groups[warp.number / kWarpsPerGroup];
  for (uint32_t i = first; i < first + kWarpsPerGroup; ++i) {
    if (i >= block.num_warps || (block.warps[i].members & ~block.warps[i].exited) != kWholeWarp) {
      fail("wgmma needs four whole warps, " + std::to_string(first) + " to " +
           std::to_string(first + kWarpsPerGroup - 1) + "; warp " + std::to_string(i) +
           " is not whole or has returned");
    }
  }
  if (group.arrived == 0) {
    group.product = product;
  } else if (!same(group.product, product)) {
    fail("divergence: warps of one warpgroup have different operands for wgmma");
  }
  group.arrived |= 1u << warp.number % kWarpsPerGroup;
  if (group.arrived != (1u << kWarpsPerGroup) - 1) return;
  group.arrived = 0;
  ++group.meetings;
  for (uint32_t i = 0; i < kWarpsPerGroup; ++i) {
    const uint32_t waiting = std::exchange(group.waiting[i], 0);
    if (waiting != 0) make_ready(block.warps[first + i], waiting);
  }
}

struct WaitOperands {
  size_t num_products;
};

void complete_wait(Warp& warp, uint32_t lanes) {
  check_all_lanes<kWaitName>(warp, lanes);
  const auto count = [&warp](int lane) {
    return static_cast<const WaitOperands*>(lane_of(warp, lane).operands)->num_products;
  };
  for (int lane = 1; lane < kWarpSize; ++lane) {
    if (count(lane) != count(0)) fail("divergence: lanes of one warp wait for different products");
  }
  for (size_t i = 0; i < count(0); ++i) perform_any(warp, i);
}

constexpr Collective kWgmma{kWgmmaName, complete_wgmma, Collective::Order::kAfterLast};
constexpr Collective kWgmmaFence{kFenceName, check_all_lanes<kFenceName>};
constexpr Collective kWgmmaCommit{kCommitName, check_all_lanes<kCommitName>};
constexpr Collective kWgmmaWait{kWaitName, complete_wait, Collective::Order::kAfterLast};

}  // namespace

void wgmma(WgmmaShape shape, float* d, const uint32_t* a, uint64_t b, bool accumulate) {
  const KernelFrame frame(__builtin_return_address(0));
  check_sm90a(kWgmmaName);
  const Thread& thread = *current.thread;
  WgmmaQueue& queue = current.thread->wgmma;
  if (!queue.fenced) fail("wgmma without a wgmma_fence before the thread's first");
  WarpGroup& group = current.block->warp_groups[thread.warp / kWarpsPerGroup];
  const uint32_t meeting = group.meetings;  // does not end without this lane
  WgmmaProduct product{shape, b, accumulate, 0, nullptr, nullptr};
  product.a = use_a(a);
  product.d = use_sums(d, 4 * sizeof(float) * static_cast<size_t>(shape.blocks), accumulate);
  meet(kWgmma, kWholeWarp, &product);
  queue.products.push_back(product);
  if (group.meetings == meeting) {
    group.waiting[thread.warp % kWarpsPerGroup] |= 1u << thread.lane;
    wait_at(kWgmmaName);
  }
}

void wgmma_fence() {
  check_sm90a(kFenceName);
  meet(kWgmmaFence, kWholeWarp, nullptr);
  WgmmaQueue& queue = current.thread->wgmma;
  queue.fenced = true;
  queue.registers.remove_if([](const WgmmaRegisters& registers) {
    return registers.products == 0 && is_poisoned(registers.address, registers.bytes);
  });
  for (WgmmaRegisters& registers : queue.registers) {
    if (registers.products == 0) take_copy(registers);
  }
}

void wgmma_commit() {
  check_sm90a(kCommitName);
  meet(kWgmmaCommit, kWholeWarp, nullptr);
  WgmmaQueue& queue = current.thread->wgmma;
  queue.group_ends.push_back(queue.products.size());
}

void wgmma_wait(uint32_t pending) {
  const KernelFrame frame(__builtin_return_address(0));
  check_sm90a(kWaitName);
  WgmmaQueue& queue = current.thread->wgmma;
  const size_t groups = std::max<size_t>(queue.group_ends.size(), pending) - pending;
  const size_t count = groups == 0 ? 0 : queue.group_ends[groups - 1];
  for (size_t i = 0; i < count; ++i) check_a_untouched(*queue.products[i].a);
  WaitOperands operands{count};
  meet(kWgmmaWait, kWholeWarp, &operands);
  for (size_t i = 0; i < count; ++i) {
    WgmmaProduct& product = queue.products[i];
    --product.a->products;
    if (--product.d->products != 0) continue;
    check_sums_untouched(*product.d);
    std::memcpy(product.d->address, product.d->bits, product.d->bytes);
  }
  queue.products.erase(queue.products.begin(), queue.products.begin() + static_cast<long>(count));
  queue.group_ends.erase(queue.group_ends.begin(),
                         queue.group_ends.begin() + static_cast<long>(groups));
  for (size_t& end : queue.group_ends) end -= count;
}

}  // namespace cuda_on_host
