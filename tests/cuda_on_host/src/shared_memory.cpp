#include "cuda_on_host/shared_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "cuda_on_host/block.h"
#include "cuda_on_host/options.h"
#include "sanitizers.h"

namespace cuda_on_host {
namespace {

constexpr size_t kGap = 64;
constexpr size_t kAlignment = 1024;
// Of an address in a wgmma descriptor.
constexpr size_t kAddressSpace = 1 << 18;

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

SharedMemory::SharedMemory(uint32_t dynamic_size, uint32_t total_limit)
    : dynamic_bytes(dynamic_size), limit(total_limit) {
  const size_t rest = round_up(dynamic_bytes, kAlignment) + 2 * kAlignment;
  // Static variables with the gaps between them. What a block of a real device may use leaves 27
  // KiB of the address space for gaps.
  static_region = std::min<size_t>(2 * kStaticSharedBytes, kAddressSpace - rest);
  size = static_region + rest;
  memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, size));
  if (memory == nullptr) throw std::bad_alloc();
  dynamic = memory + static_region + kAlignment;
  variables.reserve(kMaxSharedVariables);
  if (options().compute_capability >= 90) copy_marks.resize(size / kCopyBytes);
  next_static = static_region;  // all of it is to be filled at first
}

SharedMemory::~SharedMemory() {
  unpoison(memory, size);
  std::free(memory);
}

void SharedMemory::reset() {
  unpoison(memory, size);
  std::memset(memory, 0xff, next_static);
  std::memset(dynamic, 0xff, dynamic_bytes);
  poison(memory, size);
  unpoison(dynamic, dynamic_bytes);
  next_static = kGap;
  static_bytes = 0;
  variables.clear();
  std::fill(copy_marks.begin(), copy_marks.end(), CopyMark{});
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  SharedMemory& shared = current.block->shared;
  for (const SharedMemory::Variable& variable : shared.variables) {
    if (variable.key == key) return variable.address;
  }
  if (shared.variables.size() == kMaxSharedVariables) fail("too many shared variables");
  const size_t offset = round_up(shared.next_static, std::max<size_t>(alignment, 16));
  shared.static_bytes += static_cast<uint32_t>(bytes);
  if (shared.static_bytes > kStaticSharedBytes ||
      shared.static_bytes + shared.dynamic_bytes > shared.limit ||
      offset + bytes + kGap > shared.static_region) {
    fail("too much shared memory: " + std::to_string(shared.static_bytes) + " static and " +
         std::to_string(shared.dynamic_bytes) + " dynamic bytes; the limit is " +
         std::to_string(shared.limit));
  }
  std::byte* address = shared.memory + offset;
  unpoison(address, bytes);
  shared.next_static = offset + bytes + kGap;
  shared.variables.push_back({key, address});
  return address;
}

void* dynamic_shared() { return current.block->shared.dynamic; }

uint32_t shared_address(const void* p) {
  const SharedMemory& shared = current.block->shared;
  const auto* address = static_cast<const std::byte*>(p);
  if (address < shared.memory || address >= shared.memory + shared.size) {
    fail("an address that must be in shared memory is not");
  }
  return static_cast<uint32_t>(address - shared.memory);
}

}  // namespace cuda_on_host
